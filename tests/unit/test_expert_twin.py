"""The monokernel with experts on a CPU (test_decode_twin.py), against the oracle: 16-bit experts of both families."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.kernel.yardsticks import replaced
from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.rounding import rounded
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layout import EXPERTS
from kog_dist.runtime.abi import WaitRecord
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_rows, to_words
from kog_dist.workers.cuda.expert_weights import behind
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS, KernelShape
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import PROMPT, RUNS_ALL, SPEC, Model, answer, command_of, pytestmark  # noqa: F401

LIMIT_US = 100
IN_LAYER_1 = "(tag - 1) % (kLayers + 1) == 1"  # as long as tags have not come round
NUM_KEPT = 3  # positions whose choices a build that is checked keeps here: fewer than are decoded

QWEN3 = replace(
    SPEC, shared_norm_scale=True, delay=0, num_heads=8, own_head_dim=16, intermediate_size=48, qk_norm=True,
    experts=ExpertsSpec(10, 2),
)  # fmt: skip
VARIANTS = {
    "qwen3_moe": QWEN3,
    "qwen3_moe, weights of all": replace(QWEN3, experts=ExpertsSpec(40, 4, is_normalised=False)),
    "qwen3_moe, two splits of outputs in a thread": replace(QWEN3, num_heads=32, own_head_dim=80, num_layers=2),
    # Chosen ones that divide neither thread blocks nor warps: shares of rows, and tiles of DOWN that end within an expert.
    "qwen3_moe, three of sixteen": replace(QWEN3, intermediate_size=384, experts=ExpertsSpec(16, 3)),
    "qwen3_moe, ten of 512": replace(QWEN3, intermediate_size=160, experts=ExpertsSpec(512, 10, is_normalised=False)),
    "gpt_oss": replace(  # as large heads, and as many of each KV head, as the real ones
        QWEN3, qk_norm=False, qkv_bias=True, out_bias=True, attention_sinks=True, num_layers=3, num_heads=32, own_head_dim=64,
        max_context=64, sliding_window=4, window_layers=(0, 2),
        experts=ExpertsSpec(6, 2, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 0.8)),
    ),
}  # fmt: skip
SPLITS = {"gpt_oss": 15}  # of the real ones; else as many as suit the number of thread blocks
CTAS = {"qwen3_moe, ten of 512": 6}  # else 4; the last of six has fewer shares


def with_few_choices(sources: Mapping[str, str]) -> dict[str, str]:
    return replaced(sources, "shape.cuh", f"KOG_CHOICES {CHOICE_POSITIONS}\n", f"KOG_CHOICES {NUM_KEPT}\n")


def with_silences(sources: Mapping[str, str]) -> dict[str, str]:
    """Faults in layer 1. SILENCE 1: thread block 1 publishes no router logits, 2: no activations, 3: block 2 publishes none."""
    is_silent = f"{IN_LAYER_1} && rows.role.cta == (twin_silence == 3 ? 2 : 1) && twin_silence"
    return silenced(sources, f"{is_silent} == 1", f"{is_silent} > 1")


def silenced(sources: Mapping[str, str], of_logits: str, of_activations: str) -> dict[str, str]:
    """Router logits and activations are not published where these expressions say so."""
    changed = replaced(sources, "finalize_experts.cuh", "#pragma once\n", "#pragma once\nextern unsigned twin_silence;\n")
    changed = replaced(changed, "finalize_experts.cuh", "if (is_mine)\n", f"if (is_mine && !({of_logits}))\n")
    publish = "rows.publish<O::kRows / 2"
    return replaced(changed, "finalize_experts.cuh", publish, f"if (!({of_activations})) {publish}")


# What has the same bits as the build for two ranks: the number of ranks, what changes the sources, and options. Each difference
# is that of one variant, and differences that have nothing to do with each other share a build.
Build = tuple[int, Callable[[Mapping[str, str]], dict[str, str]], dict[str, Any]]
ALL_OTHER_BUILDS: list[Build] = [
    (1, with_silences, {}),
    (4, dict, {}),
    (2, dict, {"whole_windows": True}),
    (1, with_few_choices, {"checks_experts": True}),
    (2, with_few_choices, {"checks_experts": True}),
]
OTHER_BUILDS: dict[str, list[Build]] = {
    "qwen3_moe": [(1, with_silences, {})],
    "qwen3_moe, weights of all": [(2, with_few_choices, {"checks_experts": True})],
    "qwen3_moe, two splits of outputs in a thread": [(1, dict, {})],
    "qwen3_moe, three of sixteen": [(1, with_silences, {}), (4, dict, {})],
    "qwen3_moe, ten of 512": [(4, dict, {})],
    "gpt_oss": [(1, with_few_choices, {"checks_experts": True, "whole_windows": True})],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_oracle_with_equal_bits(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several numbers of ranks, with windowed layers that keep all positions, and with choices that are kept and right."""
    model = Model(VARIANTS[variant], "bfloat16", monkeypatch)
    options: dict[str, Any] = {"max_ctas": CTAS.get(variant, 4), "splits": SPLITS.get(variant, 0)}
    tokens, logits = answer(model, 2, tmp_path / "2", **options)
    ids = [*PROMPT, *tokens[:-1]]
    wanted, choices = logits_and_choices(model, ids, monkeypatch)
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(variant, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    for num_ranks, changed, others in OTHER_BUILDS[variant] if not RUNS_ALL else ALL_OTHER_BUILDS:
        folder = tmp_path / " ".join([f"{num_ranks}", *others])
        other_tokens, other_logits = answer(model, num_ranks, folder, **options, num_runs=1, changed=changed, **others)
        assert other_tokens == tokens
        assert other_logits.tobytes() == logits.tobytes(), f"{num_ranks} ranks, {others}"
        if "checks_experts" in others:
            every_thread_block_has_kept(choices, model, num_ranks, folder)
    if variant == "qwen3_moe":
        waits_name_layer_and_expert(model, tmp_path / "1")


def test_of_equal_logits_the_smaller_numbers_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth expert has the same logit: five are equal, of two of which a thread has both, and four are chosen."""
    model = Model(VARIANTS["qwen3_moe, weights of all"], "bfloat16", monkeypatch)
    for name, words in model.words.items():
        if name.endswith("router.weight"):
            words[:] = words[np.arange(len(words)) % 8]
    # The oracle's says nothing of equal ones.
    monkeypatch.setattr(torch, "topk", lambda x, k: tuple(y[..., :k] for y in torch.sort(x, descending=True, stable=True)))
    tokens, logits = answer(model, 2, tmp_path / "2", max_ctas=4, num_runs=1)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    assert np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1]) < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()


def every_thread_block_has_kept(choices: list[list[int]], model: Model, num_ranks: int, folder: Path) -> None:
    """On every rank the choices of the newest positions."""
    assert len(choices) > NUM_KEPT, "some are overwritten"
    for rank in range(num_ranks):
        kept = np.fromfile(folder / f"kept.{rank}.bin", np.uint64).reshape(NUM_KEPT, model.spec.num_layers, -1)
        for position in range(len(choices) - NUM_KEPT, len(choices)):
            of_blocks = kept[position % NUM_KEPT]
            assert (of_blocks == of_blocks[:, :1]).all()
            assert [int(word) for word in of_blocks[:, 0]] == choices[position], f"rank {rank}, position {position}"


def logits_and_choices(model: Model, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[int]]]:
    """The oracle's logits, and what it chooses at each position in each layer, in the words that a kernel keeps."""
    chosen: list[Any] = []
    topk = torch.topk

    def noted(x: Any, k: int) -> Any:
        found = topk(x, k)
        chosen.append(found.indices)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(torch, "topk", noted)
        logits = model.logits(ids)
    assert len(chosen) == model.spec.num_layers
    return logits, [
        [sum(expert << 8 * place for place, expert in enumerate(sorted(of_layer[position].tolist()))) for of_layer in chosen]
        for position in range(len(ids))
    ]


def waits_name_layer_and_expert(model: Model, folder: Path) -> None:
    shape = TrialShape(model.spec, range(model.spec.num_lanes), model.dtype, model.dtype, max_ctas=4, copies=2, max_slots=6)
    assert shape.experts is not None
    logits, first, second = (record_of(shape, folder, silence) for silence in (1, 2, 3))
    rows = shape.experts.route.cta_rows
    assert (logits.phase, logits.layer, logits.lane) == (Phase.SELECT, 1, NONE)
    assert (logits.expert, logits.num_missing) == (rows, rows), "those of the second thread block"
    for record in (first, second):
        assert f": DOWN of layer 1, lane {record.lane}, expert {record.expert} waited" in str(record)
    assert 0 <= first.expert < second.expert < shape.experts.num_experts, "each thread block had one of two experts, in order"


def record_of(shape: KernelShape, folder: Path, silence: int) -> WaitRecord:
    """What the program in a folder says that it waited for."""
    environ = {**os.environ, "SILENCE": f"{silence}", "LIMIT_US": f"{LIMIT_US}"}
    done = subprocess.run(command_of(shape), cwd=folder, env=environ, timeout=100, check=False)
    assert done.returncode == 5, "4: somebody waits for ever"
    return WaitRecord.unpack((folder / "record.0.bin").read_bytes())


MXFP4 = WeightFormat("E2M1", 1, 32, "E8M0")
CODED = replace(
    VARIANTS["gpt_oss"], hidden_size=160, num_heads=8, own_head_dim=16, num_lanes=2, num_kv_heads=2, intermediate_size=96
)


class CodedExperts(Model):
    """A random model whose experts are in MXFP4; a lane has a group and a half of 32 FFN columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(CODED, "bfloat16", monkeypatch)
        self.coded: dict[tuple[str, int], Codes] = {}
        for name, words in self.words.items():
            if EXPERTS not in name or not name.endswith(".weight"):
                continue
            values = (words.astype(np.uint32) << 16).view(np.float32)
            is_down = name.endswith("w2.weight")
            matrix = np.concatenate(list(values), axis=1) if is_down else values.reshape(-1, values.shape[2])
            whole = rounded(matrix, MXFP4)
            parts = np.split(whole.values(), len(values), axis=1 if is_down else 0)
            self.words[name] = to_words(np.stack(parts), self.dtype)
            for lane, codes in enumerate(np.split(whole.codes, len(values), axis=1 if is_down else 0)):
                first = lane * codes.shape[1] // 32 if is_down else 0
                scales = whole.scales[:, first:] if is_down else np.split(whole.scales, len(values))[lane]
                self.coded[name, lane] = Codes(codes, np.ascontiguousarray(scales[:, : codes.shape[1] // 32 + 1]))

    def weights(self, shape: KernelShape) -> DeviceWeights:
        def codes(name: str, lane: int) -> Codes:
            return self.coded[name, shape.hosted_lanes[lane]]

        return from_tensors(shape, lambda name: self.words[name][slice(*needed_rows(shape, name))], codes)


QUANTISED = replace(QWEN3, hidden_size=160, num_lanes=2, num_kv_heads=4, intermediate_size=256)


@pytest.mark.parametrize("form", [name for name in FORMS if "a scale for" not in name] if RUNS_ALL else ["FP8, blocks", "INT4"])
def test_attention_and_experts_are_quantised_and_the_router_is_not(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8 the router's weights are multiplied in binary16; in INT4 its input lies behind the digits of the experts' one."""
    model = CodedModel(QUANTISED, "bfloat16", FORMS[form], monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=Coding.of(FORMS[form]), max_ctas=4, num_runs=3 if RUNS_ALL else 1)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(form, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    if RUNS_ALL:
        others, other_logits = answer(model, 1, tmp_path / "1", coding=Coding.of(FORMS[form]), max_ctas=4, num_runs=1)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes()


def test_experts_in_mxfp4_give_the_logits_of_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CodedExperts(monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", coding=Coding.of(MXFP4, is_of_experts=True), max_ctas=4, num_runs=1)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    others, other_logits = answer(model, 1, tmp_path / "1", coding=Coding.of(MXFP4, is_of_experts=True), max_ctas=4, num_runs=1)
    assert others == tokens
    assert other_logits.tobytes() == logits.tobytes()


def test_columns_of_published_experts_are_whole_groups_behind_those_of_the_lane_before(tmp_path: Path) -> None:
    from tests.unit import moe_models  # needs libraries that a GPU machine may lack

    config, stored, _ = moe_models.in_mxfp4()
    moe_models.write_mxfp4(tmp_path, config, stored)
    checkpoint = open_checkpoint(tmp_path)
    assert coding_of(checkpoint) == Coding.of(MXFP4, is_of_experts=True)
    shape = KernelShape(checkpoint.spec, range(checkpoint.spec.num_lanes), coding=coding_of(checkpoint), max_ctas=4)
    assert shape.experts is not None
    assert [shape.experts.skew(lane) for lane in range(4)] == [0, 16, 0, 16]
    name = "model.layers.1.feed_forward.experts.3.w2.weight"
    for lane in range(4):
        skew = shape.experts.skew(lane)
        codes = behind(skew, Codes.of(lane_codes(checkpoint, name, lane, may_split=True), np.asarray))
        values = NUMBERS["E2M1"].values[codes.codes] * codes.scales[:, np.arange(codes.codes.shape[1]) // 32]
        wanted = np.empty((64, 48), np.float32)
        checkpoint.read_part(name, lane, wanted, verify=False)
        np.testing.assert_array_equal(values[:, skew:], wanted)
        assert not values[:, :skew].any()
