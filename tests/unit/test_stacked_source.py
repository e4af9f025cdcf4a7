"""Experts of gpt-oss as it is published: read several at once they lie where they lie when each matrix is read for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coded_packing import code_tables, code_words
from kog_dist.decode.coding import Coding
from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.workers.cuda import coded_source, load, stacked_source
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from tests.unit import moe_models
from tests.unit.test_load_weights import numpy_as_cupy  # noqa: F401

GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
Stored = dict[str, Any]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of four experts and of two, and several jobs for each."""
    monkeypatch.setattr(stacked_source, "JOB_BYTES", 3000)


@pytest.fixture
def stored() -> tuple[Any, Stored]:
    """Two layers of six experts; each of four lanes has a group and a half of FFN columns."""
    config, tensors, _ = moe_models.in_mxfp4()
    return config, tensors


def opened(folder: Path, config: Any, tensors: Stored, **changes: Any) -> Checkpoint:
    moe_models.write_mxfp4(folder, config, tensors | changes)
    return open_checkpoint(folder)


def shape_of(checkpoint: Checkpoint, hosted: range) -> KernelShape:
    num_ranks = checkpoint.spec.num_lanes // len(hosted)
    return KernelShape(checkpoint.spec, hosted, max_ctas=4, num_ranks=num_ranks, coding=coding_of(checkpoint))


def in_batches(shape: KernelShape, num_experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shape.experts is not None
    monkeypatch.setattr(stacked_source, "BATCH_BYTES", 2 * num_experts * shape.experts.num_values)


def one_by_one(shape: KernelShape, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> DeviceWeights:
    """As experts are read that are no stacks."""
    with monkeypatch.context() as patch:
        patch.setattr(load, "stacked_experts", lambda *_: None)
        return load_weights(shape, checkpoint)


def arrays(weights: DeviceWeights) -> dict[str, Any]:
    assert weights.experts is not None
    found = {**vars(weights), **vars(weights.experts)}
    return {name: np.asarray(array) for name, array in found.items() if isinstance(array, np.ndarray)}


@pytest.mark.parametrize("hosted", [range(4), range(2), range(2, 4), range(1, 2), range(3, 4)], ids=str)
def test_all_bytes_are_those_of_matrices_that_are_read_for_themselves(
    hosted: range, tmp_path: Path, stored: tuple[Any, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path, *stored)
    shape = shape_of(checkpoint, hosted)
    in_batches(shape, 4, monkeypatch)
    wanted, shares = arrays(one_by_one(shape, checkpoint, monkeypatch)), list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(coded_source.CodesReader, "codes", None)  # nobody asks for a matrix by itself
        found = arrays(load_weights(shape, checkpoint, on_share=shares.append))
    assert found.keys() == wanted.keys() >= {"matrices", "router_bias", "gate_up_bias", "down_bias", "tape"}
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        assert np.array_equal(array, wanted[name]), name
    assert len(np.unique(found["matrices"])) > 1000
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_biases_in_another_type_become_those_of_the_model(
    tmp_path: Path, stored: tuple[Any, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = stored
    checkpoint = opened(tmp_path, config, tensors, **{f"{GATE_UP}_bias": tensors[f"{GATE_UP}_bias"].float()})
    shape = shape_of(checkpoint, range(4))
    wanted, found = (arrays(weights) for weights in (one_by_one(shape, checkpoint, monkeypatch), load_weights(shape, checkpoint)))
    assert np.array_equal(found["gate_up_bias"], wanted["gate_up_bias"])


@pytest.mark.parametrize(
    ("name", "place", "value", "what"),
    [
        (f"{GATE_UP}_scales", (5, 7, 1), 255, r"gate_up_proj\[5\]\.up has a code or scale of a value that is not finite"),
        (f"{GATE_UP}_scales", (0, 0, 0), 253, r"gate_up_proj\[0\]\.gate has a code or scale of a value that is not finite"),
        (f"{DOWN}_scales", (4, 63, 5), 254, r"down_proj\[4\] has a code or scale of a value that is not finite"),
        (f"{GATE_UP}_bias", (2, 5), float("nan"), r"gate_up_proj_bias\[2\]\.up has a value that is not finite"),
        (f"{DOWN}_bias", (3, 9), float("-inf"), r"down_proj_bias\[3\] has a value that is not finite"),
    ],
)
def test_values_that_are_not_finite_are_named(
    name: str, place: tuple[int, ...], value: float, what: str, tmp_path: Path, stored: tuple[Any, Stored]
) -> None:
    config, tensors = stored
    changed = tensors[name].clone()
    changed[place] = value
    checkpoint = opened(tmp_path, config, tensors, **{name: changed})
    with pytest.raises(CheckpointError, match=what):
        load_weights(shape_of(checkpoint, range(4)), checkpoint)
    load_weights(shape_of(checkpoint, range(4)), open_checkpoint(tmp_path, verify=False))


def test_the_largest_scales_of_finite_values_are_loaded(tmp_path: Path, stored: tuple[Any, Stored]) -> None:
    config, tensors = stored
    changed = tensors[f"{DOWN}_scales"].clone()
    changed[3, 0] = 252
    checkpoint = opened(tmp_path, config, tensors, **{f"{DOWN}_scales": changed})
    load_weights(shape_of(checkpoint, range(4)), checkpoint)


def test_a_file_that_was_replaced_meanwhile_is_refused(tmp_path: Path, stored: tuple[Any, Stored]) -> None:
    checkpoint = opened(tmp_path, *stored)
    file = checkpoint.owner["model.layers.1.feed_forward.experts.0.w1.weight"].path
    file.write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="changed or replaced"):
        load_weights(shape_of(checkpoint, range(4)), checkpoint)


@pytest.mark.parametrize("coding", [Coding("E2M1", 4, "E8M0"), Coding("INT4", 1, "BF16")], ids=str)
def test_every_code_has_its_bits_wherever_it_stands(coding: Coding) -> None:
    """A word is the sum of what each of its codes is alone."""
    tables = code_tables(coding)
    packed = np.random.default_rng(3).integers(0, 256, (2, 3, 8), np.uint8)
    alone = np.zeros((2, 3, 2), np.uint32)
    for column in range(16):
        of_column = packed[..., column // 2] & (0xF0 if column % 2 else 0x0F)
        one = np.zeros_like(packed)
        one[..., column // 2] = of_column
        alone += code_words(one, tables)
    words = code_words(packed, tables)
    assert words.dtype == np.uint32
    assert np.array_equal(words, alone)
