"""The choice among algorithms of a product, and products without cuBLASLt."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from kog_dist.cuda import cublas_lt
from kog_dist.errors import LaunchError
from kog_dist.workers.prefill import products
from kog_dist.workers.prefill.products import Products, fastest


@pytest.mark.parametrize(
    ("times", "wanted"),
    [([1.0], 0), ([1.0, 0.999, 0.95], 2), ([1.0, 0.995], 0), ([1.0, math.inf, 0.5, 0.497], 2), ([2.0, 1.0, 1.5], 1)],
)
def test_fastest_of_those_with_the_same_bits(times: list[float], wanted: int) -> None:
    assert fastest(times) == wanted


def test_without_cublaslt_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(major: int) -> ctypes.CDLL:
        raise OSError(f"no cuBLASLt {major}")

    monkeypatch.setattr(cublas_lt, "library", missing)
    x, matrix, out = torch.randn(2, 3, 8).half(), torch.randn(2, 5, 8).half(), torch.zeros(2, 3, 5).half()
    Products()(x, matrix, out)
    assert torch.allclose(out.float(), x.float() @ matrix.float().transpose(1, 2), rtol=1e-2, atol=1e-2)


class PlayedProduct:
    """Algorithm 1 adds in another order, 2 and 5 refuse; all others multiply."""

    num_algorithms = 6
    found = True

    def __init__(self, *_: Any, **__: Any) -> None:
        if not self.found:
            raise LaunchError("no algorithm")

    def play(self, algorithm: int, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        if algorithm in (2, 5):
            raise LaunchError(f"algorithm {algorithm} does not run")
        out.copy_(x.float() @ matrix.float().transpose(1, 2) + (algorithm == 1))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Products:
    """Products on a CPU, whose algorithms take less time the later they come."""
    timed = iter(range(100, 0, -10))
    monkeypatch.setattr(products, "Product", PlayedProduct)
    monkeypatch.setattr(Products, "_run", lambda _, product, *rest: product.play(*rest))
    monkeypatch.setattr(products, "_time_ms", lambda run, *, is_flushed: float(next(timed)))
    monkeypatch.setattr(cublas_lt, "library", lambda major: (_ for _ in ()).throw(OSError))
    made = Products()
    made._workspace = torch.zeros(1)
    return made


def _multiply(multiply: Products, rows: int = 3) -> torch.Tensor:
    torch.manual_seed(1)
    x, matrix, out = torch.randn(2, rows, 8).half(), torch.randn(2, 5, 8).half(), torch.zeros(2, rows, 5)
    multiply(x, matrix, out)
    assert torch.allclose(out, x.float() @ matrix.float().transpose(1, 2), rtol=1e-2, atol=1e-2)
    return out


def test_the_fastest_with_the_bits_of_the_first_is_taken_once_for_each_shape(played: Products) -> None:
    _multiply(played)
    (plan,) = played._plans.values()
    assert plan is not None
    assert plan[1] == 4, "0, 3 and 4 give the same bits; 4 took the least time"
    _multiply(played)
    assert len(played._plans) == 1
    _multiply(played, rows=4)
    assert len(played._plans) == 2


@pytest.mark.parametrize("found", [False, True])
def test_torch_multiplies_what_no_algorithm_runs(played: Products, monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    def refuse(*_: Any) -> None:
        raise LaunchError("does not run")

    by_torch = list[int]()
    monkeypatch.setattr(PlayedProduct, "found", found)
    monkeypatch.setattr(PlayedProduct, "play", refuse)
    monkeypatch.setattr(
        products, "_by_torch", lambda x, matrix, out: by_torch.append(out.copy_(x.float() @ matrix.float().mT).numel())
    )
    _multiply(played)
    assert by_torch == [30]
    assert list(played._plans.values()) == [None]


class _Library:
    """Notes what is called, with numbers; `states`: of the algorithms that it finds; a code for one function."""

    def __init__(self, states: tuple[int, ...], failing: str = "") -> None:
        self.states, self.failing = states, failing
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            values = [getattr(getattr(argument, "_obj", argument), "value", argument) for argument in arguments]
            self.calls.append((name, *values))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                found = arguments[-2]
                for index, state in enumerate(self.states):
                    found[index].state, found[index].algorithm[0] = state, 100 + index
                arguments[-1]._obj.value = len(self.states)
            if name == "cublasLtMatmul":
                self.algorithm = arguments[12]._obj[0]
            return 7 if name == self.failing else 0

        return call

    def numbers(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of each call of a function that are numbers."""
        return [tuple(value for value in call[1:] if isinstance(value, int)) for call in self.calls if call[0] == name]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "_handle", lambda major: ctypes.c_void_p())


def _made(monkeypatch: pytest.MonkeyPatch, library: _Library) -> cublas_lt.Product:
    monkeypatch.setattr(cublas_lt, "library", lambda major: library)
    x, w, y = (cublas_lt.Operand(*sizes) for sizes in ((3, 8, 16, 48, 2), (5, 8, 8, 40, 2), (3, 5, 5, 15, 0)))
    return cublas_lt.Product(13, x, w, y, count=2, alignment=16)


@pytest.mark.usefixtures("handle")
def test_row_major_matrices_are_described_as_transposed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library((0,))
    _made(monkeypatch, library)
    assert library.numbers("cublasLtMatrixLayoutCreate") == [(2, 8, 5, 8), (2, 8, 3, 16), (0, 5, 3, 5)]  # w, x, y: columns first
    attributes = library.numbers("cublasLtMatrixLayoutSetAttribute")
    assert attributes == [(kind, value, size) for stride in (40, 48, 15) for kind, value, size in ((5, 2, 4), (6, stride, 8))]
    assert library.numbers("cublasLtMatmulDescSetAttribute") == [(3, 1, 4)], "w is read transposed"
    alignments = [(kind, 16, 4) for kind in (5, 6, 7, 8)]
    assert library.numbers("cublasLtMatmulPreferenceSetAttribute") == [(1, 32 << 20, 8), (3, 0, 4), *alignments]


@pytest.mark.usefixtures("handle")
def test_only_algorithms_that_were_found_usable_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library((15, 0, 0))
    product = _made(monkeypatch, library)
    assert product.num_algorithms == 2
    for algorithm, wanted in enumerate((101, 102)):
        product.run(algorithm, 0, 0, 0, 0, 0)
        assert library.algorithm == wanted


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (_Library(()), "no algorithm for a product"),
        (_Library((15,)), "no algorithm for a product"),
        (_Library((0, 0), "cublasLtMatmul"), r"cublasLtMatmul failed \(7\)"),
        (_Library((0, 0), "cublasLtMatrixLayoutCreate"), r"cublasLtMatrixLayoutCreate failed \(7\)"),
    ],
)
@pytest.mark.usefixtures("handle")
def test_what_cublaslt_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, library: _Library, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        _made(monkeypatch, library).run(1, 0, 0, 0, 0, 0)


def test_results_of_the_search_have_the_size_of_cublaslt_h() -> None:
    assert ctypes.sizeof(cublas_lt._Heuristic) == 96
