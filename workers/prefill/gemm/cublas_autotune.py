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
from types import ModuleType

import numpy as np

from kog_dist.cuda import cublas_lt
from kog_dist.cuda.cublas_lt import GemmProblem, Operand
from kog_dist.cuda.driver import Graph
from kog_dist.errors import LaunchError
from kog_dist.workers.prefill.base.arrays import Array, address, current_stream
from kog_dist.workers.prefill.gemm.algorithm_cache import AlgorithmCache

_REPEATS = 4  # of a product in a graph, and of the graph
_MANY_ROWS = 512  # from here on a product waits for the matrix units, below for memory
# Float32, more than the L2 cache has: small products find nothing in it when a chunk is run. It is read by so many threads.
_NUM_FLUSHED, _NUM_READERS = 1 << 25, 1 << 16
_NUM_RANDOM = 1 << 20  # different values of a trial
_WORTH = 0.99  # of the time of the algorithm before it, to be taken instead
_HOPELESS = 1.1  # times the best so far, after two replays
_LONG_MS = 4.0  # of replays, of which no more are needed then


class Products:
    """out (L, M, N) = x (L, M, K) times the transposed `matrix` (L, N, K), on cupy's current stream; see `Operations.product`.

    The first product of each shape chooses its algorithm and must not be captured; `end_trials` is called when no more shapes are
    to come for now. `cache`: of earlier choices. Raises LaunchError without cuBLASLt.
    """

    def __init__(self, cache: AlgorithmCache | None = None) -> None:
        import cupy

        cublas_lt.library()
        self._cache = cache
        self._plans: dict[tuple[object, ...], tuple[GemmProblem, int]] = {}
        self._trial: Trial | None = None
        self.num_tried = 0  # shapes whose algorithms were timed
        self._workspace: Array = cupy.empty(cublas_lt.WORKSPACE_BYTES, np.uint8)

    @property
    def num_shapes(self) -> int:
        """How many there were so far."""
        return len(self._plans)

    def __call__(self, x: Array, matrix: Array, out: Array) -> None:
        """Queue the product. Raises LaunchError if no algorithm runs it, or what ran before does not any more."""
        alignment = math.gcd(256, *(part for array in (x, matrix, out) for part in (address(array), *array.strides[:2])))
        key = (x.shape, x.strides, matrix.shape, matrix.strides, out.strides, out.dtype.str, alignment)
        if key not in self._plans:
            self._plans[key] = self._plan(x, matrix, out, alignment, repr(key))
        self._run(*self._plans[key], x, matrix, out)

    def end_trials(self) -> None:
        """Give back the memory of trials, and keep what they found for the next start."""
        self._trial = None
        if self._cache is not None:
            self._cache.save()

    def _run(self, product: GemmProblem, algorithm: int, x: Array, matrix: Array, out: Array) -> None:
        to = address(self._workspace)
        product.run(algorithm, address(x), address(matrix), address(out), to, current_stream())

    def _runs(self, product: GemmProblem, algorithm: int, x: Array, matrix: Array, out: Array) -> bool:
        try:
            self._run(product, algorithm, x, matrix, out)
        except LaunchError:
            return False
        return True

    def _plan(self, x: Array, matrix: Array, out: Array, alignment: int, name: str) -> tuple[GemmProblem, int]:
        """The product, and the fastest of its algorithms. Overwrites `out`."""
        product = GemmProblem(_operand(x), _operand(matrix), _operand(out), count=len(x), alignment=alignment)
        kept = None if self._cache is None else self._cache.get(name)
        algorithm = None if kept is None else product.index(kept)
        if algorithm is not None and self._runs(product, algorithm, x, matrix, out):
            return product, algorithm
        self.num_tried += 1
        algorithm = self._try_all(product, x, matrix, out)
        if algorithm is None:
            shapes = f"{x.shape} and {matrix.shape} values"
            raise LaunchError(f"cuBLASLt runs no algorithm for a product of {shapes}; update CUDA's libraries")
        if self._cache is not None and (chosen := product.name(algorithm)) is not None:
            self._cache.put(name, chosen)
        return product, algorithm

    def _try_all(self, product: GemmProblem, x: Array, matrix: Array, out: Array) -> int | None:
        """The fastest of the algorithms that give the bits of the first that runs; None if there is none."""
        import cupy

        trial = self._trial = self._trial or Trial()
        times = [math.inf] * product.num_algorithms
        with trial.aside():
            values = trial.values(x)
            wanted: Array | None = None
            if len(x) > 1 and x.strides[0] == 0:  # the bits of lanes with streams of their own
                self(cupy.ascontiguousarray(values), matrix, out)
                wanted = out.copy()
            for algorithm in range(product.num_algorithms):
                if not self._runs(product, algorithm, values, matrix, out):
                    continue
                if wanted is None:
                    wanted = out.copy()
                if bool((out == wanted).all()):
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
    """What was chosen before on a GPU like the current one, by code like this; None without this text. Raises LaunchError."""
    import cupy

    try:
        source = "".join(map(inspect.getsource, (sys.modules[__name__], cublas_lt)))
    except OSError:
        return None
    gpu = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    made_for = {
        "GPU": f"{gpu['name'].decode()}, {gpu['multiProcessorCount']} multiprocessors",
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cuBLASLt": str(cublas_lt.version()),
        "code that chooses": hashlib.sha256(source.encode()).hexdigest(),
    }
    return AlgorithmCache(made_for)


class Trial:
    """Where algorithms are timed: random values for them, and what pushes these out of the L2 cache."""

    def __init__(self) -> None:
        import cupy

        self._cupy: ModuleType = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._begin, self._end = (cupy.cuda.Event() for _ in range(2))
        self._random = np.random.default_rng(1).standard_normal(_NUM_RANDOM, np.float32).astype(np.float16)
        self._values = cupy.empty(0, np.float16)
        self._others, self._sums = cupy.zeros(_NUM_FLUSHED, np.float32), cupy.zeros(_NUM_READERS, np.float32)
        reads = f"sum = 0; for (int i = 0; i < {_NUM_FLUSHED // _NUM_READERS}; ++i) sum += all[{_NUM_READERS} * i + thread]"
        self._read = cupy.ElementwiseKernel("raw float32 all, int32 thread", "float32 sum", reads, "kog_read_all")
        self._threads = cupy.asarray(np.arange(_NUM_READERS, dtype=np.int32))
        self._flush()  # compiled, if it has to be, before anything is captured
        cupy.cuda.Device().synchronize()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream of its own, which can be captured, behind what is queued and before what comes after it."""
        here = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(here.record())
        with self._stream:
            yield
        here.wait_event(self._stream.record())

    def values(self, x: Array) -> Array:
        """Random ones, the same each time, that lie as those of `x` do."""

        count = 1 + sum((size - 1) * stride // x.itemsize for size, stride in zip(x.shape, x.strides, strict=True))
        if len(self._values) < count:
            self._values = self._cupy.asarray(np.resize(self._random, count))
        values: Array = self._cupy.lib.stride_tricks.as_strided(self._values, x.shape, x.strides)
        return values

    def _flush(self) -> None:
        self._read(self._others, self._threads, self._sums)

    def time_ms(self, run: Callable[[], None], *, is_flushed: bool, best_ms: float) -> float:
        """Of some runs; with something else read into the L2 cache before each, which takes the same for all algorithms.

        Fewer runs are made where the time is clear, or worse than `best_ms`. Within `aside`.
        """
        graph = Graph()
        with graph.captured_from(self._stream.ptr):
            for _ in range(_REPEATS):
                if is_flushed:
                    self._flush()  # reads: next to nothing is left to be written beside the product
                run()
        times = list[float]()
        while len(times) < 2 or (len(times) < _REPEATS and min(times) < _HOPELESS * best_ms and sum(times) < _LONG_MS):
            self._begin.record(self._stream)
            graph.launch(self._stream.ptr)
            self._end.record(self._stream)
            self._end.synchronize()
            times.append(float(self._cupy.cuda.get_elapsed_time(self._begin, self._end)))
        return min(times)


def _operand(array: Array) -> Operand:
    batch, row, value = (stride // array.itemsize for stride in array.strides)
    assert value == 1
    kind = cublas_lt.FLOAT32 if array.dtype == np.float32 else cublas_lt.BINARY16
    return Operand(array.shape[1], array.shape[2], row, batch, kind)
