"""What one rank does to measure the all-reduces of other libraries, for comparison: chains of them in a CUDA graph.

No variant uses NVLink multicast: `ENVIRON` switches it off everywhere, and multimem operations are not called.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from kog_dist.collectives.ranks import RankContext

ENVIRON = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Environments, because NCCL reads its settings once per process. The low-latency protocol is what small messages want.
TUNED = {"NCCL_PROTO": "LL", "NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_MAX_CTAS": "4"}
GRAPH_STEPS = 100


def measure(context: RankContext) -> dict[str, Any]:
    """Microseconds per all-reduce by method and bytes; a text where a method does not work here."""
    torch, dist = _torch()
    rank, world_size = context.info.rank, context.info.world_size
    device = torch.device("cuda", context.gpu)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(context.arguments["store"]), world_size)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world_size, device_id=device, timeout=timedelta(seconds=60)
    )
    figures: dict[str, Any] = {}
    for method in context.arguments["methods"]:
        figures[method] = {}
        for num_bytes in context.arguments["sizes"]:
            try:
                step, give_back = _METHODS[method](num_bytes // 4, device)
                figures[method][str(num_bytes)] = _time(step, int(context.arguments["repeats"]))
                give_back()
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:  # libraries differ in what they have
                figures[method][str(num_bytes)] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        dist.barrier()
    dist.destroy_process_group()
    return figures


Step = Callable[[], None]


def _torch() -> tuple[Any, Any]:
    return importlib.import_module("torch"), importlib.import_module("torch.distributed")


def _nothing() -> None:
    """What most methods have to give back."""


def _nccl(length: int, device: Any) -> tuple[Step, Step]:
    torch, dist = _torch()
    values = torch.randn(length, device=device)
    return lambda: dist.all_reduce(values, op=dist.ReduceOp.AVG), _nothing


def _nccl_window(length: int, device: Any) -> tuple[Step, Step]:
    """Memory that NCCL has allocated and registered as a symmetric window."""
    torch, dist = _torch()
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        values = torch.randn(length, device=device)
    backend.register_mem_pool(pool, symm=True)
    return lambda: dist.all_reduce(values), lambda: backend.deregister_mem_pool(pool)


def _one_shot(length: int, device: Any) -> tuple[Step, Step]:
    """Every rank reads all; the result goes into another symmetric buffer, which is the next input."""
    torch, dist = _torch()
    group = dist.group.WORLD.group_name
    first, second = _symmetric(length, device), _symmetric(length, device)
    reduce = torch.ops.symm_mem.one_shot_all_reduce_out
    buffers = [first, second]

    def step() -> None:
        reduce(buffers[0], "sum", group, buffers[1])
        buffers.reverse()

    return step, _nothing


def _two_shot(length: int, device: Any) -> tuple[Step, Step]:
    torch, dist = _torch()
    group = dist.group.WORLD.group_name
    values = _symmetric(length, device)
    return lambda: torch.ops.symm_mem.two_shot_all_reduce_(values, "sum", group), _nothing


def _symmetric(length: int, device: Any) -> Any:
    torch, dist = _torch()
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    values = symmetric.empty(length, dtype=torch.float32, device=device)
    symmetric.rendezvous(values, dist.group.WORLD.group_name)
    values.normal_()
    return values


_METHODS: dict[str, Callable[[int, Any], tuple[Step, Step]]] = {
    "nccl": _nccl,
    "nccl window": _nccl_window,
    "torch one-shot": _one_shot,
    "torch two-shot": _two_shot,
}


def _time(step: Step, repeats: int) -> float:
    """Microseconds of one step in a chain of GRAPH_STEPS of them in a CUDA graph; median over replays."""
    torch, _ = _torch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):  # even, so that buffers that take turns are back where they were
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL has threads of its own
            for _ in range(GRAPH_STEPS):
                step()
        times: list[float] = []
        for repeat in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if repeat >= 2:
                times.append(1000.0 * begin.elapsed_time(end) / GRAPH_STEPS)
    return statistics.median(times)
