"""Products of a chunk by cuBLAS, each with the fastest of its algorithms for its shape, found once before graphs are captured.

The algorithm that cuBLAS would take is up to 15 % slower than another (docs/prefill.md). Only such are taken as give its bits, so
it does not matter for results that another may be the fastest at another time. What was chosen is kept for the next start.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.cuda import cublas_lt
from kog_dist.cuda.cublas_lt import GemmProblem, Operand
from kog_dist.cuda.driver import launch_graph
from kog_dist.errors import LaunchError
from kog_dist.workers.prefill.gemm.algorithm_cache import AlgorithmCache

if TYPE_CHECKING:
    from torch import Tensor

_REPEATS = 4  # of a product in a graph, and of the graph
_MANY_ROWS = 512  # from here on a product waits for the matrix units, below for memory
_FLUSHED = (8192, 4096)  # float32, more than the L2 cache has: small products find nothing in it when a chunk is run
_WORTH = 0.99  # of the time of the algorithm before it, to be taken instead
_HOPELESS = 1.1  # times the best so far, after two replays
_LONG_MS = 4.0  # of replays, of which no more are needed then


class Products:
    """out (L, M, N) = x (L, M, K) times the transposed `matrix` (L, N, K), on torch's current stream; see `Operations.product`.

    The first product of each shape chooses its algorithm and must not be captured; `end_trials` is called when no more shapes are
    to come for now. Without cuBLASLt torch multiplies. `cache`: of earlier choices.
    """

    def __init__(self, cache: AlgorithmCache | None = None) -> None:
        import torch

        self._cache = cache
        self._plans: dict[tuple[object, ...], tuple[GemmProblem, int] | None] = {}  # None: torch multiplies
        self._trial: Trial | None = None
        self.num_tried = 0  # shapes whose algorithms were timed
        self._workspace: Tensor | None = None
        try:
            self._major = _major()
            cublas_lt.library(self._major)
        except OSError:
            return
        self._workspace = torch.empty(cublas_lt.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    @property
    def num_shapes(self) -> int:
        """How many there were so far."""
        return len(self._plans)

    def __call__(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Queue the product. Raises LaunchError if what ran before does not run any more."""
        if self._workspace is None:
            _by_torch(x, matrix, out)
            return
        alignment = math.gcd(256, *(part for tensor in (x, matrix, out) for part in _byte_places(tensor)))
        key = (tuple(x.shape), x.stride(), tuple(matrix.shape), matrix.stride(), out.stride(), out.dtype, alignment)
        if key not in self._plans:
            self._plans[key] = self._plan(x, matrix, out, alignment, repr(key))
        plan = self._plans[key]
        if plan is None:
            _by_torch(x, matrix, out)
        else:
            self._run(*plan, x, matrix, out)

    def end_trials(self) -> None:
        """Give back the memory of trials, and keep what they found for the next start."""
        self._trial = None
        if self._cache is not None:
            self._cache.save()

    def _run(self, product: GemmProblem, algorithm: int, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        import torch

        assert self._workspace is not None
        stream = torch.cuda.current_stream().cuda_stream
        product.run(algorithm, x.data_ptr(), matrix.data_ptr(), out.data_ptr(), self._workspace.data_ptr(), stream)

    def _runs(self, product: GemmProblem, algorithm: int, x: Tensor, matrix: Tensor, out: Tensor) -> bool:
        try:
            self._run(product, algorithm, x, matrix, out)
        except LaunchError:
            return False
        return True

    def _plan(self, x: Tensor, matrix: Tensor, out: Tensor, alignment: int, name: str) -> tuple[GemmProblem, int] | None:
        """The product, and the fastest of its algorithms; None if cuBLASLt can run none. Overwrites `out`."""
        try:
            product = GemmProblem(self._major, _operand(x), _operand(matrix), _operand(out), count=len(x), alignment=alignment)
        except LaunchError:
            return None
        kept = None if self._cache is None else self._cache.get(name)
        algorithm = None if kept is None else product.index(kept)
        if algorithm is not None and self._runs(product, algorithm, x, matrix, out):
            return product, algorithm
        self.num_tried += 1
        algorithm = self._try_all(product, x, matrix, out)
        if algorithm is None:
            return None
        if self._cache is not None and (chosen := product.name(algorithm)) is not None:
            self._cache.put(name, chosen)
        return product, algorithm

    def _try_all(self, product: GemmProblem, x: Tensor, matrix: Tensor, out: Tensor) -> int | None:
        """The fastest of the algorithms that give the bits of the first that runs; None if there is none."""
        import torch

        trial = self._trial = self._trial or Trial()
        times = [math.inf] * product.num_algorithms
        with trial.aside():
            values = trial.values(x)
            wanted: Tensor | None = None
            if len(x) > 1 and x.stride(0) == 0:  # the bits of lanes with streams of their own
                self(values.contiguous(), matrix, out)
                wanted = out.clone()
            for algorithm in range(product.num_algorithms):
                if not self._runs(product, algorithm, values, matrix, out):
                    continue
                if wanted is None:
                    wanted = out.clone()
                if torch.equal(out, wanted):
                    run = partial(self._run, product, algorithm, values, matrix, out)
                    times[algorithm] = trial.time_ms(run, is_flushed=x.shape[1] < _MANY_ROWS, best_ms=min(times))
        return None if min(times) == math.inf else fastest(times)


def fastest(times: list[float]) -> int:
    """The index of the shortest time; an earlier one if that is hardly longer."""
    best = 0
    for index, time in enumerate(times):
        if time < _WORTH * times[best]:
            best = index
    return best


def algorithms_kept() -> AlgorithmCache | None:
    """What was chosen before on a GPU like torch's current one, by code like this; None without cuBLASLt, or this text."""
    import cupy
    import torch

    try:
        version = cublas_lt.version(_major())
        source = "".join(map(inspect.getsource, (sys.modules[__name__], cublas_lt)))
    except OSError:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    made_for = {
        "GPU": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors",
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cuBLASLt": str(version),
        "code that chooses": hashlib.sha256(source.encode()).hexdigest(),
    }
    return AlgorithmCache(made_for)


class Trial:
    """Where algorithms are timed: random values for them, and what pushes these out of the L2 cache."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._values = torch.empty(0, dtype=torch.float16, device="cuda")
        self._others = torch.empty(*_FLUSHED, device="cuda")
        self._sums = torch.empty(_FLUSHED[0], device="cuda")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, which can be captured, behind what is queued and before what comes after it."""
        import torch

        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def values(self, x: Tensor) -> Tensor:
        """Random ones, the same each time, that lie as those of `x` do."""
        import torch

        count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if len(self._values) < count:
            generator = torch.Generator(x.device).manual_seed(1)
            self._values = torch.empty(count, dtype=x.dtype, device=x.device).normal_(generator=generator)
        return self._values.as_strided(x.shape, x.stride())

    def time_ms(self, run: Callable[[], None], *, is_flushed: bool, best_ms: float) -> float:
        """Of some runs; with something else read into the L2 cache before each, which takes the same for all algorithms.

        Fewer runs are made where the time is clear, or worse than `best_ms`. Within `aside`.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # `torch.cuda.graph` would give all unused memory back first
        try:
            for _ in range(_REPEATS):
                if is_flushed:
                    torch.sum(
                        self._others, dim=1, out=self._sums
                    )  # reads: next to nothing is left to be written beside the product
                run()
        finally:
            graph.capture_end()
        times = list[float]()
        while len(times) < 2 or (len(times) < _REPEATS and min(times) < _HOPELESS * best_ms and sum(times) < _LONG_MS):
            self._begin.record()
            launch_graph(graph.raw_cuda_graph_exec(), self._stream.cuda_stream)
            self._end.record()
            self._end.synchronize()
            times.append(float(self._begin.elapsed_time(self._end)))
        return min(times)


def _by_torch(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    import torch

    if out.dtype == x.dtype:
        torch.bmm(x, matrix.transpose(1, 2), out=out)
    else:
        torch.ops.aten.bmm.dtype_out(x, matrix.transpose(1, 2), out.dtype, out=out)


def _byte_places(tensor: Tensor) -> tuple[int, ...]:
    return tensor.data_ptr(), *(tensor.itemsize * stride for stride in tensor.stride()[:2])


def _operand(tensor: Tensor) -> Operand:
    import torch

    assert tensor.stride(2) == 1
    kind = cublas_lt.FLOAT32 if tensor.dtype == torch.float32 else cublas_lt.BINARY16
    return Operand(tensor.shape[1], tensor.shape[2], tensor.stride(1), tensor.stride(0), kind)


def _major() -> int:
    """Of the cuBLAS that torch has loaded."""
    import torch

    return int((torch.version.cuda or "0").split(".", maxsplit=1)[0])
