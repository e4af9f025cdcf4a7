"""Arrays of prefill: NumPy's on a CPU, cupy's on a GPU. Both have one interface; what is written for it runs on either.

NumPy has no bfloat16: arrays of such values are arrays of their words, uint16, and uint16 means nothing else here.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]  # or cupy's, which has no types
BFLOAT16 = np.dtype(np.uint16)
_WIDENING = """
__device__ float widened(unsigned short word) { return __uint_as_float(static_cast<unsigned>(word) << 16); }
__device__ float widened(float16 value) { return static_cast<float>(value); }
"""


def library(device: str) -> ModuleType:
    """NumPy for `cpu`, else cupy."""
    if device == "cpu":
        return np
    import cupy

    module: ModuleType = cupy
    return module


def library_of(array: Array) -> ModuleType:
    """The one that an array is of."""
    return library("cpu" if isinstance(array, np.ndarray) else "cuda")


def with_room(memory: Array | None, count: int, like: Array, dtype: DTypeLike = np.float16) -> Array:
    """`memory`, or new one if that has not so many values."""
    if memory is not None and len(memory) >= count:
        return memory
    made: Array = library_of(like).empty(count, dtype)
    return made


def address(array: Array) -> int:
    """Of its first value."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def current_stream() -> int:
    """The CUDA stream that cupy queues on in this thread; 0 is the default one."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def repeated(array: Array, count: int) -> Array:
    """`array` (1, ...) as `count` of it: a view, whose first stride is 0."""
    as_strided = library_of(array).lib.stride_tricks.as_strided
    view: Array = as_strided(array, shape=(count, *array.shape[1:]), strides=(0, *array.strides[1:]))
    return view


def float32_of(array: Array) -> Array:
    """Its values; a copy but for those that are float32 already."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def on_host(array: Array) -> NDArray[np.float32]:
    """A small array's values."""
    host: Any = array if isinstance(array, np.ndarray) else array.get()
    return float32_of(host)


def rounded(values: Array, dtype: DTypeLike) -> Array:
    """Floating-point values as those of another type, ties to even."""
    if dtype != BFLOAT16:
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    words: Array = library_of(values).where(is_nan, np.uint32(0x7FC0), kept).astype(np.uint16)
    return words


def put_scaled(target: Array, values: Array, factors: Array | None) -> None:
    """target = `values`, of any type, times float32 `factors`, which have their shape or are spread to it."""
    if library_of(target) is np:
        target[...] = float32_of(values) if factors is None else float32_of(values) * factors
    else:
        _scaling()(values, np.float32(1) if factors is None else factors, target)


@functools.cache
def _scaling() -> Any:
    """One kernel, without float32 values of a whole matrix in memory."""
    import cupy

    text = "out = widened(value) * factor"
    return cupy.ElementwiseKernel("T value, float32 factor", "S out", text, "kog_put_scaled", preamble=_WIDENING)
