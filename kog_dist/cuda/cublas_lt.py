"""The few calls of cuBLASLt that a matrix product needs which is to run with a certain algorithm.

Constants and layouts are those of cublasLt.h (cuBLAS 12 and 13); matrices are column by column there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
from pathlib import Path

from kog_dist.errors import LaunchError
from kog_dist.records import dataclass

WORKSPACE_BYTES = 32 << 20
MOST_ALGORITHMS = 16

_COMPUTE_FLOAT32 = 68
_TRANSA, _BATCH_COUNT, _BATCH_STRIDE = 3, 5, 6  # CUBLASLT_MATMUL_DESC_, CUBLASLT_MATRIX_LAYOUT_
_MAX_WORKSPACE, _REDUCTIONS, _FIRST_ALIGNMENT = 1, 3, 5  # CUBLASLT_MATMUL_PREF_; alignments of A, B, C and D in a row
# Of CUBLASLT_ALGO_CONFIG_: ID, TILE_ID, SPLITK_NUM, REDUCTION_SCHEME, CTA_SWIZZLING, CUSTOM_OPTION, STAGES_ID, INNER_SHAPE_ID and
# CLUSTER_SHAPE_ID, from 0 on.
_CONFIGURATION = 9
FLOAT32, BINARY16 = 0, 2  # cudaDataType_t


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Operand:
    """A batch of row-major matrices: `rows` of `columns` values, `row_stride` and `stride` values apart. `type`: of above."""

    rows: int
    columns: int
    row_stride: int
    stride: int
    type: int


@functools.cache
def library() -> ctypes.CDLL:
    """cuBLASLt for the CUDA that cupy is made for: a package's in this environment, else the system's. Raises LaunchError."""
    import cupy

    name = f"libcublasLt.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    for path in (*_of_packages(name), name, *_of_toolkits(name)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise LaunchError(f"{name} cannot be loaded; pip install nvidia-cublas, or install CUDA's toolkit")


def _of_packages(name: str) -> list[str]:
    """nvidia-cublas puts it into a folder of the namespace `nvidia`."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found is not None else None
    return [str(path) for folder in folders or () for path in sorted(Path(folder).glob(f"*/lib/{name}"))]


def _of_toolkits(name: str) -> list[str]:
    """Beside the compiler that device programs are built with, and where toolkits are by default."""
    nvcc = shutil.which("nvcc")
    folders = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    return [str(folder / "lib64" / name) for folder in folders]


def version() -> int:
    """Of the library itself. Raises LaunchError."""
    read = library().cublasLtGetVersion
    read.restype = ctypes.c_size_t
    return int(read())


class GemmProblem:
    """`count` products y = x w^T, with what cuBLASLt knows of algorithms for them, the one that it expects most of first.

    x (M, K) and w (N, K) are binary16, y (M, N) binary16 or float32; sums are float32, each by one thread block to its end.
    `alignment`: bytes that divide all addresses and strides. Raises LaunchError.
    """

    def __init__(self, x: Operand, w: Operand, y: Operand, *, count: int, alignment: int) -> None:
        self._library = library()
        self._handle = _handle()
        # Row by row is column by column of the transposed matrix: y^T = w x^T, and w is read transposed.
        self._description = ctypes.c_void_p()
        self._do("cublasLtMatmulDescCreate", ctypes.byref(self._description), _COMPUTE_FLOAT32, FLOAT32)
        self._set("cublasLtMatmulDescSetAttribute", self._description, _TRANSA, ctypes.c_int32(1))
        self._w, self._x, self._y = (self._layout(operand, count) for operand in (w, x, y))
        preference = ctypes.c_void_p()
        self._do("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        wanted: list[tuple[int, ctypes.c_uint32 | ctypes.c_uint64]]
        wanted = [(_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)), (_REDUCTIONS, ctypes.c_uint32(0))]
        wanted += [(_FIRST_ALIGNMENT + i, ctypes.c_uint32(alignment)) for i in range(4)]
        for attribute, value in wanted:
            self._set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
        results, num_found = (_Heuristic * MOST_ALGORITHMS)(), ctypes.c_int()
        self._do(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._w, self._x, self._y, self._y, preference,
            MOST_ALGORITHMS, results, ctypes.byref(num_found),
        )  # fmt: skip
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        self._usable = [result for result in results[: num_found.value] if result.state == 0]
        self.num_algorithms = len(self._usable)
        if not self.num_algorithms:
            raise LaunchError(f"cuBLASLt has no algorithm for a product of {x} and {w}")

    def name(self, algorithm: int) -> str | None:
        """By which another process knows it, too: the library's numbers for its parts; None if it does not tell them."""
        return self._names()[algorithm]

    def index(self, name: str) -> int | None:
        """The algorithm that has this name; None if the library does not propose it now."""
        found = [index for index, other in enumerate(self._names()) if other == name]
        return found[0] if len(found) == 1 else None

    def run(self, algorithm: int, x: int, w: int, y: int, workspace: int, stream: int) -> None:
        """Queue the products with an algorithm, 0 to `num_algorithms` - 1. `x`, `w`, `y`, `workspace`: device addresses."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        pointer = ctypes.c_void_p
        self._do(
            "cublasLtMatmul", self._handle, self._description, ctypes.byref(one), pointer(w), self._w, pointer(x), self._x,
            ctypes.byref(zero), pointer(y), self._y, pointer(y), self._y, ctypes.byref(self._usable[algorithm].algorithm),
            pointer(workspace), ctypes.c_size_t(WORKSPACE_BYTES), pointer(stream),
        )  # fmt: skip

    def _names(self) -> list[str | None]:
        """Where numbers are those of another one, too, all that the library keeps of an algorithm stands behind them."""
        numbers = [self._numbers(algorithm) for algorithm in range(self.num_algorithms)]
        raw = [bytes(result.algorithm).hex() for result in self._usable]
        return [
            None if text is None else text if numbers.count(text) == 1 else f"{text} {rest}"
            for text, rest in zip(numbers, raw, strict=True)
        ]

    def _numbers(self, algorithm: int) -> str | None:
        found = [self._number(algorithm, attribute) for attribute in range(_CONFIGURATION)]
        return None if None in found else ".".join(map(str, found))

    def _number(self, algorithm: int, attribute: int) -> int | None:
        read = self._library.cublasLtMatmulAlgoConfigGetAttribute
        number, size, chosen = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.byref(self._usable[algorithm].algorithm)
        if read(chosen, attribute, None, ctypes.c_size_t(0), ctypes.byref(size)) or size.value > ctypes.sizeof(number):
            return None
        if read(chosen, attribute, ctypes.byref(number), ctypes.c_size_t(size.value), ctypes.byref(size)):
            return None
        return number.value

    def _layout(self, operand: Operand, count: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._do(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            operand.type,
            ctypes.c_uint64(operand.columns),
            ctypes.c_uint64(operand.rows),
            ctypes.c_int64(operand.row_stride),
        )
        for attribute, value in ((_BATCH_COUNT, ctypes.c_int32(count)), (_BATCH_STRIDE, ctypes.c_int64(operand.stride))):
            self._set("cublasLtMatrixLayoutSetAttribute", layout, attribute, value)
        return layout

    def _set(self, function: str, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        self._do(function, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _do(self, function: str, *arguments: object) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise LaunchError(f"{function} failed ({code})")


@functools.cache
def _handle() -> ctypes.c_void_p:
    """Of the current GPU: a process uses one."""
    handle = ctypes.c_void_p()
    if code := library().cublasLtCreate(ctypes.byref(handle)):
        raise LaunchError(f"cublasLtCreate failed ({code})")
    return handle
