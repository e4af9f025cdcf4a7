"""Gates and ups for Hopper: what fits; and gate_up.cu itself, run on a CPU, products and copies in plain C++."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from kog_dist.workers.prefill.gate_up import GateUp, build
from kog_dist.workers.prefill.gate_up_abi import CLUSTER, GATE_UP_PARAMS, GateUpShape, misfit
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu

SHAPE_2B = GateUpShape(3072, 1536)
NUM_CLUSTERS = 66


def test_a_shape_fits_into_shared_memory() -> None:
    assert SHAPE_2B.shared_bytes <= 227 << 10


def test_other_shapes_are_named() -> None:
    assert misfit(SHAPE_2B) == ""
    assert "448 values" in misfit(GateUpShape(448, 128))
    assert "800 values" in misfit(GateUpShape(800, 128))
    assert misfit(GateUpShape(520, 192)).count(";") == 1


def test_blocks_that_are_worth_it() -> None:
    def never(*_: object) -> None:
        raise AssertionError

    gate_up = GateUp(SHAPE_2B, NUM_CLUSTERS, never, map_on_cpu)
    sizes = (64, 128, 256, 512, 1024, 2048, 4096)
    assert [size for size in sizes if gate_up.is_worth(8, size)] == [512, 1024, 2048, 4096]
    assert [size for size in sizes if gate_up.is_worth(2, size)] == [2048, 4096]
    assert not gate_up.is_worth(8, 1000)


def wanted(x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """In float64, gates and ups rounded to binary16."""
    gate, up = ((x.float() @ matrix.float().transpose(1, 2)).half().double() * inverse_rms[..., None]).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernel_on_a_cpu(tmp_path: Path) -> None:
    shape, lanes, size = GateUpShape(576, 256), 2, 512
    path = compiled(tmp_path, "gate_up", shape.constants(), ["gate_up"], "GateUpLaunch", optimize="-O2", cluster=CLUSTER)
    launch = launcher(ctypes.CDLL(str(path)), "gate_up", GATE_UP_PARAMS.size_bytes)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(lanes, size, shape.hidden_size, generator=generator).half()
    matrix = (torch.randn(lanes, 2 * shape.ffn, shape.hidden_size, generator=generator) * 0.05).half()
    inverse_rms = 1 + 0.2 * torch.rand(lanes, size, generator=generator)

    def run(x: torch.Tensor, inverse_rms: torch.Tensor, num_clusters: int) -> torch.Tensor:
        found = torch.full((lanes, x.shape[1], shape.ffn), torch.nan, dtype=torch.float16)
        GateUp(shape, num_clusters, launch, map_on_cpu).run(x, matrix, inverse_rms, found)
        return found

    found, reference = run(x, inverse_rms, 3), wanted(x, matrix, inverse_rms)  # some clusters take one tile more
    assert float((found.double() - reference).norm() / reference.norm()) < 1e-3
    middle = run(x[:, 128:384], inverse_rms[:, 128:384].contiguous(), 1)
    assert torch.equal(middle, found[:, 128:384]), "a row has other bits elsewhere"
    shared = run(x[:1, :256].expand(lanes, -1, -1), inverse_rms[:, :256].contiguous(), 2)
    assert torch.equal(shared, run(x[:1, :256].repeat(lanes, 1, 1), inverse_rms[:, :256].contiguous(), 2)), "streams kept once"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernel_builds_without_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = build(SHAPE_2B).log
    assert log.count("0 bytes spill stores") == 1
    assert "serialized" not in log, "products wait for each other"
