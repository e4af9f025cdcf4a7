"""What is planned for models with gated delta nets on GPUs: memory with states, kept copies of these, and what is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.validate import validate
from kog_dist.errors import ConfigError
from kog_dist.launch import gpu_choice
from kog_dist.launch.gpu_choice import BESIDES_BYTES, GpuChoice, choose_gpus, gpu_rank_bytes, gpu_rank_shape
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.kept_prefixes import kept_on_gpus
from kog_dist.launch.target import why_not_on_gpus
from kog_dist.model.checkpoint import Checkpoint, planned_checkpoint
from kog_dist.model.published_config import read_config
from kog_dist.workers.cuda import draft_builds
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.company_build import company_bytes, company_sizes, obstacle_to_company
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import word_findings
from kog_dist.workers.cuda.kv_blocks import pool_slots
from kog_dist.workers.cuda.model_limits import untried
from kog_dist.workers.engines.cuda_device import kernel_shapes
from kog_dist.workers.prefill.memory import obstacle_to_prefill, prefill_bytes
from tests.unit.delta_configs import CONFIGS
from tests.unit.test_launch_limits import inventory_with

FP8 = Coding("E4M3", 1, "BF16")
GIB, FREE = 2**30, 139 << 30
STATE = 48 * (48 * 128 * 128 + 96 * 4 * (256 + 64)) * 4  # Qwen3.5-27B on one rank: of heads, and of items of half a head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("27B")
    (made / "config.json").write_text(json.dumps(CONFIGS["Qwen3.5-27B"]))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Checkpoint:
    return planned_checkpoint(folder, context=32768)


def choice_of(model: Checkpoint, free: int = FREE, **options: str | int) -> GpuChoice:
    found = choose_gpus(LaunchConfig(**options), model, {}, inventory_with(free, 2))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_rank_has_a_state_with_each_kv_cache(model: Checkpoint) -> None:
    one, four = (gpu_rank_bytes(model, 0, 1, "bfloat16", parallel=n, num_caches=n) for n in (1, 4))
    assert (one["states"], four["states"]) == (STATE, 4 * STATE)
    assert one["cache"] == 16 * 4 * 32768 * 2 * 256 * 2, "of four KV heads, which eight lanes have, in one layer of four"
    spec = model.spec
    vectors = 48 * (10240 * 4 + 2 * 48 + 128) + 16 * 2 * 256
    norms = (2 * 64 + 1) * spec.hidden_size
    assert one["tables"] == 2 * (spec.vocab_size * spec.hidden_size + norms + vectors) + 4 * 32768 * 64, "64 of 256 values rotate"
    halves = [gpu_rank_bytes(model, rank, 2, "bfloat16") for rank in range(2)]
    assert [half["states"] for half in halves] == [48 * (24 * 128 * 128 + 96 * 4 * (256 + 32)) * 4] * 2


def test_requests_share_passes_and_copies_have_what_is_spare(model: Checkpoint) -> None:
    unasked, alone = (choice_of(model, gpus="1", prefill="off", parallel=parallel) for parallel in (0, 1))
    assert (unasked.parallel, unasked.num_caches, alone.parallel) == (4, 4, 1)
    assert unasked.state_bytes == alone.state_bytes == STATE
    for choice in (unasked, alone):
        assert choice.spare_bytes == FREE - BESIDES_BYTES - sum(
            gpu_rank_bytes(
                model, 0, 1, "bfloat16", parallel=choice.parallel, num_caches=choice.num_caches
            ).values()
        )  # fmt: skip
    kept, _ = kept_on_gpus(LaunchConfig(gpus="1"), alone.spare_bytes, 1, of_state=STATE)
    assert kept == 16 * GIB
    slots, states = pool_slots(gpu_rank_shape(model, 0, 1, "bfloat16"), kept)
    assert (states, slots) == (12 * GIB // STATE, (kept - 12 * GIB // STATE * STATE) // (256 * 65_536))


@pytest.mark.parametrize(("name", "cache_gib", "spare_gib"), [("Qwen3.5-27B", 8, 20), ("Qwen3.5-35B-A3B", 2.5, 60)])
def test_contexts_of_131_072_fit_one_gpu(name: str, cache_gib: float, spare_gib: int, tmp_path: Path) -> None:
    """In 16 bit, with prefill, and room for copies of states."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    long = planned_checkpoint(tmp_path, context=131_072)
    choice, shape = choice_of(long, gpus="1", context=131_072), gpu_rank_shape(long, 0, 1, "bfloat16")
    assert (choice.count, choice.context, choice.prefill) == (1, 0, "auto")
    assert shape.cache.num_bytes == cache_gib * GIB
    assert choice.spare_bytes > spare_gib * GIB
    assert (
        min(pool_slots(shape, kept_on_gpus(LaunchConfig(gpus="1"), choice.spare_bytes, 1, of_state=choice.state_bytes)[0])) > 20
    )
    assert validate(kernel_plan([shape])) == []
    assert word_findings(shape) == ()


def test_less_than_a_copy_is_refused_or_not_taken() -> None:
    assert kept_on_gpus(LaunchConfig(), STATE, 1, of_state=STATE) == (0, 0), "a quarter of what is free"
    assert kept_on_gpus(LaunchConfig(prefix_cache="off"), FREE, 1, of_state=STATE) == (0, 0)
    with pytest.raises(ConfigError, match=r"^prefix_cache 0\.1 has no room for a copy of this model's state.*give 0\.216797 or"):
        kept_on_gpus(LaunchConfig(prefix_cache="0.1"), FREE, 1, of_state=STATE)
    assert kept_on_gpus(LaunchConfig(prefix_cache="0.216797"), FREE, 1, of_state=STATE)[0] >= 4 * STATE // 3


def test_with_drafts_a_rank_keeps_what_those_bring(model: Checkpoint) -> None:
    """Where they are asked for, until prose is measured."""
    assert not choice_of(model, gpus="1", speculate="auto").drafts
    assert choice_of(model, gpus="1", speculate="lookup").drafts
    shape = gpu_rank_shape(model, 0, 1, "bfloat16")
    assert draft_builds.why_unasked_without(shape).startswith("with delta nets auto has none")
    num_items, lines = 48 * 96, -(-(256 + 64 + 8) * 4 // 128) * 128
    assert gpu_rank_bytes(model, 0, 1, "bfloat16", drafts=True)["drafts"] > 3 * num_items * lines


def test_passes_of_several_requests_keep_nothing_but_states(model: Checkpoint) -> None:
    """More than one request unasked; on several ranks, where no GPU has run them, they take turns."""
    shape = gpu_rank_shape(model, 0, 1, "bfloat16")
    assert company_sizes(shape, 4) == [2, 4]
    assert choice_of(model, gpus="1", prefill="off").parallel == 4
    assert company_sizes(gpu_rank_shape(model, 0, 2, "bfloat16"), 4) == []
    assert obstacle_to_company(gpu_rank_shape(model, 0, 2, "bfloat16"), 4).endswith("with delta nets on several ranks yet")
    alone, together = (gpu_rank_bytes(model, 0, 1, "bfloat16", parallel=number, num_caches=4) for number in (1, 4))
    assert together["states"] == alone["states"]
    assert company_bytes(shape, 2) + company_bytes(shape, 4) < 30e6


def test_where_four_tokens_have_no_room_passes_have_two(folder: Path) -> None:
    rounded = planned_checkpoint(folder, context=32768, quantize="fp8")
    tokens = {count: draft_builds.drafting_shape(gpu_rank_shape(rounded, 0, count, "bfloat16")).tokens for count in (1, 2)}
    assert tokens == {1: 2, 2: 4}


def test_experts_in_turn_have_drafts_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3.5-35B-A3B"]))
    experts = planned_checkpoint(tmp_path, context=4096)
    shape = KernelShape(experts.spec, range(experts.spec.num_lanes))
    assert draft_builds.drafting_shape(shape).tokens == 4
    assert not choice_of(experts, gpus="1", speculate="auto").drafts
    assert choice_of(experts, gpus="1", speculate="lookup").drafts
    with pytest.raises(ConfigError, match="experts of several requests in turn"):
        replace(shape, tokens=4, company=True)


def test_gpus_that_are_here_are_used_unasked(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    choice = choice_of(model, device="auto")
    assert (choice.count, choice.prefill, choice.obstacles) == (2, "auto", ())
    assert why_not_on_gpus(model) == ""


@pytest.mark.parametrize(("form", "share"), [("fp8", 0.55), ("int4", 0.3)])
def test_quantised_ones_have_smaller_tapes_and_prefill_expands_a_matrix(
    form: str, share: float, folder: Path, model: Checkpoint
) -> None:
    rounded = planned_checkpoint(folder, context=32768, quantize=form)
    assert why_not_on_gpus(rounded) == ""
    whole, codes = (gpu_rank_bytes(one, 0, 1, "bfloat16") for one in (model, rounded))
    assert share - 0.05 < codes["tape"] / whole["tape"] < share
    assert codes["states"] == STATE
    choice = choice_of(rounded, gpus="1")
    assert choice.prefill == "auto"
    expanded, kept = (
        prefill_bytes(gpu_rank_shape(one, 0, 1, "bfloat16"))["prefill weights"] for one in (rounded, model)
    )  # of a layer of FFNs, and vectors
    assert 2 * 2 * 17_408 * 5120 < expanded < 0.4e9 < 49e9 < kept


def test_less_than_a_copy_is_refused_where_there_are_no_gpus_as_well(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^prefix_cache 0\.2 has no room for a copy of this model's state"):
        dry_run(LaunchConfig(str(folder), gpus="1", context=32768, prefix_cache="0.2"))


def test_a_dry_run_shows_states_and_copies(folder: Path) -> None:
    shown = dry_run(LaunchConfig(str(folder), gpus="1", context=32768, parallel=2))
    assert "333.0 MiB states, read and written per token" in shown
    assert "2 requests at most" in shown
    assert "in turns" not in shown


def test_a_shared_expert_in_16_bit_is_refused_beside_codes(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    said = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "re:.*shared_expert.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["Qwen3.5-35B-A3B"], "quantization_config": said}))
    reason = why_not_on_gpus(planned_checkpoint(tmp_path, context=4096))
    assert reason == "GPUs run quantised experts beside a shared one in codes, and this model's has 16 bit"


def test_what_no_gpu_has_run_is_refused_by_name(tmp_path: Path) -> None:
    """Until its tests under tests/gpu have passed there. Shapes have it."""
    quantised, published = {"quant_method": "fp8", "weight_block_size": [128, 128]}, CONFIGS["Qwen3.5-35B-A3B"]
    for per_token, what in ((8, ""), (6, "6 quantised experts for each token (1, 2, 4, 8 or 10)")):
        text = {**published["text_config"], "num_experts_per_tok": per_token}
        config = {**published, "text_config": text, "quantization_config": quantised}
        (tmp_path / "config.json").write_text(json.dumps(config))
        experts = planned_checkpoint(tmp_path, context=4096)
        assert untried(experts.spec, coding_of(experts)) == what
        assert untried(experts.spec, None) == ""
    assert why_not_on_gpus(experts) == f"GPUs cannot run this model yet: it has {what}, which no GPU has run yet"
    with pytest.raises(ConfigError, match=r"^the CUDA kernel cannot run this model: it has .*; use --device cpu$"):
        kernel_shapes(experts, "bfloat16", 1)


def test_prompts_of_quantised_nets_and_of_experts_are_read_by_chunks() -> None:
    for name, coding in (("27B", FP8), ("35B-A3B", FP8), ("35B-A3B", None)):
        spec = read_config(CONFIGS[f"Qwen3.5-{name}"]).with_context(4096)
        assert obstacle_to_prefill(spec, coding, "bfloat16") == ""
