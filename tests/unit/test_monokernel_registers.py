"""The monokernel's builds for the 2B shape keep everything in registers: spills cost 16 us of a token, as traced builds show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kog_dist.model.spec import laneformer_2b
from kog_dist.workers.cuda.build import KERNEL_SOURCES, build
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.sweeps import cases

SPEC = laneformer_2b()


# Of eight ranks the build with processors spills one register (4 bytes).
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("num_ranks", "sources"), cases([(1, KERNEL_SOURCES[:1]), (4, KERNEL_SOURCES)], [(4, KERNEL_SOURCES)]))
def test_nothing_spills(num_ranks: int, sources: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    generated = headers(KernelShape(SPEC, SPEC.lanes_of_rank(0, num_ranks), num_ranks=num_ranks))
    for source in sources:
        log = build(generated, source).log
        assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1, f"{source}: {log}"
