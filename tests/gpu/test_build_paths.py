"""Both compilers give a kernel with the same tokens, and a warm cache asks neither."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kog_dist.cuda import build as build_module
from kog_dist.errors import CompileError
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_weights

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(200)]

SHAPE = KernelShape(ModelSpec(256, 3, 16, 8, 1024, 1000, max_context=256, num_lanes=8, delay=1), range(8))


def answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], str]:
    """Tokens of a small model whose kernel comes from this cache, and what the compiler said ("" if it was not asked)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    kernel = Monokernel(SHAPE, random_weights(SHAPE, 1))
    return kernel.generate([1, 2, 3], 100), kernel.build_log


def test_nvrtc_gives_the_same_tokens_as_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if build_module._nvcc() is None:
        pytest.skip("needs nvcc")
    with_nvcc, log = answer(tmp_path / "nvcc", monkeypatch)
    assert "registers" in log
    monkeypatch.setattr(build_module, "_nvcc", lambda: None)
    with_nvrtc, _ = answer(tmp_path / "nvrtc", monkeypatch)
    assert len(list((tmp_path / "nvrtc").rglob("*.cubin"))) == 1
    assert with_nvrtc == with_nvcc


def test_a_warm_cache_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_module._nvcc()
    if real is None:
        pytest.skip("needs nvcc")
    tokens, log = answer(tmp_path / "cache", monkeypatch)
    assert log
    # From here on the compiler can only tell its version.
    stub = tmp_path / "bin" / "nvcc"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {shlex.quote(real)} --version\necho "not today" >&2\nexit 1\n')
    stub.chmod(0o755)
    monkeypatch.setattr(build_module, "_nvcc", lambda: str(stub))
    assert answer(tmp_path / "cache", monkeypatch) == (tokens, "")
    with pytest.raises(CompileError, match="not today"):
        answer(tmp_path / "cold", monkeypatch)
