"""Products of a block by cuBLAS, each with the fastest of its algorithms for its shape, measured once before graphs are captured.

The algorithm that cuBLAS would take is up to 15 % slower than another (docs/prefill.md). Only such are taken as give its bits:
which one is the fastest may change from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.cuda import cublas_lt
from kog_dist.cuda.cublas_lt import Operand, Product
from kog_dist.errors import LaunchError

if TYPE_CHECKING:
    from torch import Tensor

_REPEATS = 4
_MANY_ROWS = 512  # from here on a product waits for the matrix units, below for memory
_FLUSHED_VALUES = 32 << 20  # float32, more than the L2 cache has: small products find nothing in it when a block is run
_WORTH = 0.99  # of the time of the algorithm before it, to be taken instead


class Products:
    """out (L, M, N) = x (L, M, K) times the transposed `matrix` (L, N, K), on torch's current stream; see `Operations.product`.

    The first product of each shape chooses its algorithm and must not be captured. Without cuBLASLt torch multiplies.
    """

    def __init__(self) -> None:
        import torch

        self._plans: dict[tuple[object, ...], tuple[Product, int] | None] = {}  # None: torch multiplies
        self._workspace: Tensor | None = None
        try:
            self._major = int((torch.version.cuda or "0").split(".", maxsplit=1)[0])
            cublas_lt.library(self._major)
        except OSError:
            return
        self._workspace = torch.empty(cublas_lt.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Queue the product. Raises LaunchError if what ran before does not run any more."""
        if self._workspace is None:
            _by_torch(x, matrix, out)
            return
        alignment = math.gcd(256, *(part for tensor in (x, matrix, out) for part in _byte_places(tensor)))
        key = (x.shape, x.stride(), matrix.shape, matrix.stride(), out.stride(), out.dtype, alignment)
        if key not in self._plans:
            self._plans[key] = self._plan(x, matrix, out, alignment)
        plan = self._plans[key]
        if plan is None:
            _by_torch(x, matrix, out)
        else:
            self._run(*plan, x, matrix, out)

    def _run(self, product: Product, algorithm: int, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        import torch

        assert self._workspace is not None
        stream = torch.cuda.current_stream().cuda_stream
        product.run(algorithm, x.data_ptr(), matrix.data_ptr(), out.data_ptr(), self._workspace.data_ptr(), stream)

    def _plan(self, x: Tensor, matrix: Tensor, out: Tensor, alignment: int) -> tuple[Product, int] | None:
        """The product, and the fastest of its algorithms; None if cuBLASLt can run none. Overwrites `out`."""
        import torch

        try:
            product = Product(self._major, _operand(x), _operand(matrix), _operand(out), count=len(x), alignment=alignment)
        except LaunchError:
            return None
        generator = torch.Generator(x.device).manual_seed(1)
        is_shared = len(x) > 1 and x.stride(0) == 0
        values = torch.empty_strided(x[: 1 if is_shared else None].shape, x.stride(), dtype=x.dtype, device=x.device)
        values = values.normal_(generator=generator).expand_as(x)
        wanted: Tensor | None = None
        if is_shared:  # the bits of lanes with streams of their own
            self(values.contiguous(), matrix, out)
            wanted = out.clone()
        times = [math.inf] * product.num_algorithms
        for algorithm in range(product.num_algorithms):
            run = partial(self._run, product, algorithm, values, matrix, out)
            try:
                run()
            except LaunchError:
                continue
            if wanted is None:
                wanted = out.clone()
            if torch.equal(out, wanted):
                times[algorithm] = _time_ms(run, is_flushed=x.shape[1] < _MANY_ROWS)
        return None if min(times) == math.inf else (product, fastest(times))


def fastest(times: list[float]) -> int:
    """The index of the shortest time; an earlier one if that is hardly longer."""
    best = 0
    for index, time in enumerate(times):
        if time < _WORTH * times[best]:
            best = index
    return best


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


def _time_ms(run: Callable[[], None], *, is_flushed: bool) -> float:
    """Of some runs; with something else read into the L2 cache before each, which takes the same for all algorithms."""
    import torch

    others = torch.empty(_FLUSHED_VALUES if is_flushed else 1, device="cuda")
    their_sum = torch.empty((), device="cuda")
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    torch.sum(others, dim=0, out=their_sum)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_REPEATS):
            torch.sum(others, dim=0, out=their_sum)  # reads: nothing is left to be written beside the product
            run()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
