"""gpt-oss folders with experts in MXFP4: values as transformers finds them, memory, and damage that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import GptOssForCausalLM

from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.errors import CheckpointError
from kog_dist.launch.inspection import cpu_rank_bytes, dry_run
from kog_dist.launch.target import plan_target
from kog_dist.model.checkpoint import open_checkpoint, planned_checkpoint
from kog_dist.model.formats.lanes import lane_codes, weight_format
from kog_dist.model.weight_bytes import bytes_per_token, formats
from tests.unit import moe_models
from tests.unit.moe_models import Reference
from tests.unit.test_moe_families import PROMPT, SINGLE, TOLERANCE, Run, relative_error


class Case(NamedTuple):
    folder: Path
    config: Any
    stored: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    reference: Reference


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("mxfp4")
    config, stored, values = moe_models.in_mxfp4()
    moe_models.write_mxfp4(folder, config, stored)
    model = moe_models.plain(GptOssForCausalLM, config)
    model.load_state_dict(values)
    return Case(folder, config, stored, values, moe_models.reference(model, PROMPT))


def test_logits_and_choices_are_those_of_transformers(case: Case) -> None:
    for position, (logits, _, chosen) in enumerate(Run(case.folder).tokens(PROMPT)):
        assert relative_error(logits, case.reference.logits[position]) < TOLERANCE
        assert np.array_equal(chosen, np.stack([rows[position] for rows in case.reference.chosen]))


def test_experts_that_are_kept_as_codes_are_multiplied_as_well(case: Case) -> None:
    """What CPU ranks run: a lane's columns begin and end within groups."""
    if host_library.library() is None:
        pytest.skip("needs a C compiler")
    same = 0
    for position, (logits, _, chosen) in enumerate(Run(case.folder, np.float32, keeps_halves=True).tokens(PROMPT)):
        if np.array_equal(chosen, np.stack([rows[position] for rows in case.reference.chosen])):
            same += 1
            assert relative_error(logits, case.reference.logits[position]) < SINGLE
    assert same > 0.95 * len(PROMPT)


@pytest.mark.parametrize("has_library", [True, False])
def test_memory_is_said_as_it_is(case: Case, has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_library:
        monkeypatch.setattr(host_library, "library", lambda: None)
    elif host_library.library() is None:
        pytest.skip("needs a C compiler")
    settings = LaunchConfig(model=str(case.folder), device="cpu", ranks=4)
    target = plan_target(settings)[0]
    checkpoint = target.checkpoint
    small = 8 * sum(layout.num_values for layout in checkpoint.layouts.values() if len(layout.shape) < 2)
    for rank in range(4):
        weights = checkpoint.rank_weights([rank], keeps_halves=has_library)
        experts = weights.lanes[rank].layers[1].experts
        assert experts is not None
        assert (experts.w2_scales is not None) == has_library
        assert experts.w2_skew == (16 if has_library and rank % 2 else 0)
        said = cpu_rank_bytes(target, rank)["weights"]
        assert abs(weights.num_bytes - said) <= small + 8192, "and scales that two lanes share"
    assert f"weights in {'MXFP4' if has_library else 'float32'} (" in dry_run(settings)


def test_every_part_is_what_the_stack_has(case: Case) -> None:
    checkpoint = open_checkpoint(case.folder)
    module = "model.layers.1.mlp.experts"
    gate_up, down = (case.values[f"{module}.{name}"].numpy() for name in ("gate_up_proj", "down_proj"))  # inputs first
    bias = case.values[f"{module}.gate_up_proj_bias"].numpy()
    for expert in (0, 5):
        prefix = f"model.layers.1.feed_forward.experts.{expert}."
        for name, whole in (("w1", gate_up[expert, :, ::2].T), ("w3", gate_up[expert, :, 1::2].T)):
            assert np.array_equal(checkpoint.tensor(f"{prefix}{name}.weight"), whole.reshape(4, 48, 64))
        assert np.array_equal(checkpoint.tensor(f"{prefix}w2.weight"), down[expert].T.reshape(64, 4, 48).swapaxes(0, 1))
        assert np.array_equal(checkpoint.tensor(f"{prefix}w1.bias"), bias[expert, ::2].reshape(4, 48))
        assert np.array_equal(checkpoint.tensor(f"{prefix}w3.bias"), bias[expert, 1::2].reshape(4, 48))


def test_what_is_said_of_the_format(case: Case) -> None:
    checkpoint, planned = open_checkpoint(case.folder), planned_checkpoint(case.folder)
    for name in checkpoint.layouts:
        assert (weight_format(checkpoint, name) is not None) == (".experts." in name and name.endswith("weight"))
        assert weight_format(planned, name) == weight_format(checkpoint, name)
    assert formats(checkpoint) == "MXFP4 (E2M1) in groups of 32, as published (mxfp4), the rest bfloat16"
    coded = sum(tensor.numel() for name, tensor in case.stored.items() if name.endswith(("_blocks", "_scales")))
    others = sum(2 * tensor.numel() for tensor in case.stored.values() if tensor.dtype == torch.bfloat16)
    biases = sum(2 * tensor.numel() for name, tensor in case.stored.items() if "experts" in name and name.endswith("_bias"))
    unread = 2 * case.stored["model.embed_tokens.weight"].numel()
    expected = (coded + biases) * 2 // 6 + others - biases - unread  # 2 experts of 6
    assert bytes_per_token(checkpoint) == bytes_per_token(planned) == expected


def test_codes_of_a_lane(case: Case) -> None:
    """What kernels keep: of matrices whose lanes have whole groups; others are refused."""
    checkpoint = open_checkpoint(case.folder)
    name = "model.layers.0.feed_forward.experts.3."
    assert np.array_equal(lane_codes(checkpoint, f"{name}w3.weight", 2).values(), checkpoint.tensor(f"{name}w3.weight")[2])
    with pytest.raises(CheckpointError, match="lane 1 has columns 48 to 96 of 192, which are no whole groups of 32"):
        lane_codes(checkpoint, f"{name}w2.weight", 1)


# ---- damage ----
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


@pytest.mark.parametrize("name", [f"{GATE_UP}_blocks", f"{DOWN}_scales", f"{GATE_UP}_bias"])
def test_missing_misshapen_and_mistyped_stacks_are_named(case: Case, name: str, tmp_path: Path) -> None:
    tensor = case.stored[name]
    for changed, what in (
        (None, f"lacks tensor {name}, which its config.json asks for"),
        (tensor[:-1].contiguous(), f"tensor {name} has shape .* but config.json asks for"),
        (tensor.to(torch.int32), f"tensor {name} is I32, which config.json does not say; expected"),
    ):
        stored = {key: value for key, value in case.stored.items() if key != name} | ({} if changed is None else {name: changed})
        moe_models.write_mxfp4(tmp_path, case.config, stored)
        with pytest.raises(CheckpointError, match=what):
            open_checkpoint(tmp_path)


def test_values_that_are_not_finite_are_found(case: Case, tmp_path: Path) -> None:
    scales = case.stored[f"{DOWN}_scales"].clone()
    scales[4, 7, 2] = 255
    moe_models.write_mxfp4(tmp_path, case.config, case.stored | {f"{DOWN}_scales": scales})
    with pytest.raises(CheckpointError, match=r"tensor .*down_proj\[4\] has a value that is not finite"):
        open_checkpoint(tmp_path).verify_all()
    bias = case.stored[f"{GATE_UP}_bias"].clone()
    bias[2, 5] = torch.inf
    moe_models.write_mxfp4(tmp_path, case.config, case.stored | {f"{GATE_UP}_bias": bias})
    with pytest.raises(CheckpointError, match=r"tensor .*gate_up_proj_bias\[2\]\.up has a value that is not finite"):
        open_checkpoint(tmp_path).verify_all()


def test_a_stack_in_16_bit_beside_its_codes_is_refused(case: Case, tmp_path: Path) -> None:
    moe_models.write_mxfp4(tmp_path, case.config, case.stored | {GATE_UP: torch.zeros(6, 64, 384, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=f"has a tensor '{GATE_UP}' that a model of this config.json does not have"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("end", "other"), [("blocks", "scales"), ("scales", "blocks")])
def test_codes_without_a_config_ask_for_it(case: Case, tmp_path: Path, end: str, other: str) -> None:
    stored = {name: tensor for name, tensor in case.stored.items() if not name.endswith(other)}
    moe_models.write_mxfp4(tmp_path, case.config, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    cause = f"_proj_{end}' belongs to quantised weights, but config.json has no quantization_config .*; take config.json"
    with pytest.raises(CheckpointError, match=cause):
        open_checkpoint(tmp_path)


def test_sizes_that_are_no_whole_groups_are_refused(case: Case, tmp_path: Path) -> None:
    config = moe_models.gpt_oss(intermediate_size=200)
    moe_models.write_mxfp4(tmp_path, config, case.stored)
    with pytest.raises(CheckpointError, match="hidden and intermediate sizes that are multiples of 32, not 64 and 200"):
        open_checkpoint(tmp_path)
