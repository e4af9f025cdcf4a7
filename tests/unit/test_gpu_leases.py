"""No two engines decode on one GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import engine_session
from kog_dist.errors import LaunchError
from kog_dist.hardware.gpus import Gpu
from kog_dist.launch.gpu_leases import GpuLeases, use_of

GPUS = tuple(Gpu(index, f"GPU-{index:032x}", "NVIDIA H200", f"0:{index}") for index in range(3))


def test_a_gpu_has_one_engine(tmp_path: Path) -> None:
    assert use_of(GPUS[0], tmp_path) == ""
    first = GpuLeases.acquire(GPUS[:2], tmp_path)
    assert f"is used by process {os.getpid()}" in use_of(GPUS[1], tmp_path)
    with pytest.raises(LaunchError, match=rf"GPU 1 .* is used by process {os.getpid()} .*; stop it, or choose another GPU"):
        GpuLeases.acquire((GPUS[2], GPUS[1]), tmp_path)
    assert use_of(GPUS[2], tmp_path) == "", "what was taken before is given back"
    first.close()
    first.close()
    assert [use_of(gpu, tmp_path) for gpu in GPUS] == ["", "", ""]
    GpuLeases.acquire(GPUS, tmp_path).close()


def test_looking_at_a_lease_does_not_take_it(tmp_path: Path) -> None:
    GpuLeases.acquire(GPUS[:1], tmp_path).close()
    assert use_of(GPUS[0], tmp_path) == use_of(GPUS[0], tmp_path) == ""
    assert (tmp_path / f".{GPUS[0].uuid}.lease").stat().st_mode & 0o777 == 0o600


def test_only_a_lease_that_is_held_is_a_leftover() -> None:
    with engine_session() as session:
        root = session.folder / "kog"
        root.mkdir()
        leases = GpuLeases.acquire(GPUS[:1], root)
        assert session.leftovers() == [str(root / f".{GPUS[0].uuid}.lease")]
        leases.close()
        assert session.leftovers() == []
        assert (root / f".{GPUS[0].uuid}.lease").exists()
