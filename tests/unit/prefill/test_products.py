"""The choice among algorithms of a product, and products without cuBLASLt."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from kog_dist.cuda import cublas_lt
from kog_dist.errors import LaunchError
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


class _Library:
    """Notes what is called; `found` algorithms, and a code for one function."""

    def __init__(self, found: int, failing: str = "") -> None:
        self.found, self.failing = found, failing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self.found
            return 7 if name == self.failing else 0

        return call


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (_Library(0), "no algorithm for a product"),
        (_Library(2, "cublasLtMatmul"), r"cublasLtMatmul failed \(7\)"),
        (_Library(2, "cublasLtMatrixLayoutCreate"), r"cublasLtMatrixLayoutCreate failed \(7\)"),
    ],
)
def test_what_cublaslt_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, library: _Library, message: str) -> None:
    monkeypatch.setattr(cublas_lt, "library", lambda major: library)
    monkeypatch.setattr(cublas_lt, "_handle", lambda major: ctypes.c_void_p())
    operand = cublas_lt.Operand(4, 8, 8, 32, cublas_lt.BINARY16)
    with pytest.raises(LaunchError, match=message):
        cublas_lt.Product(13, operand, operand, operand, count=2, alignment=16).run(1, 0, 0, 0, 0, 0)


def test_results_of_the_search_have_the_size_of_cublaslt_h() -> None:
    assert ctypes.sizeof(cublas_lt._Heuristic) == 96
