"""KCCL's kernels compile for the GPU, without spills, and the host's idea of their shapes is that of the sources."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kog_dist.collectives import cuda_kernels
from kog_dist.collectives.cuda_abi import STRUCTS, abi_header
from kog_dist.collectives.cuda_kernels import ChainShape, chain_cubin, device_sources, exchange_cubin, handoff_cubin
from kog_dist.cuda.build import Cubin


def test_sizes_of_structs_are_multiples_of_eight() -> None:
    """They lie one after the other in the parameters of a kernel."""
    text = abi_header()
    for struct in STRUCTS:
        assert struct.size_bytes % 8 == 0, struct.name
        assert f"sizeof(Kog{struct.name}) == {struct.size_bytes}" in text


def test_threads_of_the_exchange_are_those_of_its_source() -> None:
    found = re.search(r"kExchangeWarps = (\d+)", device_sources()["exchange.cu"])
    assert found is not None
    assert 32 * (int(found[1]) + 1) == cuda_kernels.EXCHANGE_THREADS


def test_only_ptx_has_assembly() -> None:
    assert [name for name, text in device_sources().items() if "asm " in text or "asm(" in text] == ["ptx.cuh"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernels_build_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: dict[str, Cubin] = {
        "kccl_exchange": exchange_cubin(4),
        "kccl_chain": chain_cubin(ChainShape(4, 3072, 24, True)),
        "kccl_handoff": handoff_cubin(4, 128, 24),
    }
    for name, cubin in built.items():
        assert f"Compiling entry function '{name}'" in cubin.log
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in cubin.log
        assert "warning" not in cubin.log, cubin.log
    assert exchange_cubin(4) == Cubin(built["kccl_exchange"].path, "")
    assert exchange_cubin(1).path != built["kccl_exchange"].path
