"""Passes of several tokens with gated delta nets, on a CPU (decode_twin/): the bits of plain decoding, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coding import Coding
from kog_dist.decode.pass_drafts import PassDrafts
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda.coded_source import is_coded
from tests.sweeps import cases
from tests.unit import test_drafts_twin
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_delta_codes_twin import MIXTURE, CodedNets
from tests.unit.test_drafts_twin import EDGE, EXTRA
from tests.unit.test_kinds_twin import DENSE, NET, SHARED, SMALL, StoredModel, spec_of
from tests.unit.test_kinds_twin import SPECS as STORED
from tests.unit.test_passes_twin import PROMPT, Answer, Twin, drafts_of

pytestmark = needs_compiler

GATED = AttentionMixer(4, 2, 256, qk_norm=True, rotary_dim=64, gated=True)
# Two slices of a head on two ranks; as published, with heads of 256 whose outputs are gated; a convolution over three tokens.
SPECS: dict[str, tuple[int, ModelSpec]] = {
    "small nets on two ranks": (2, spec_of(NET, SMALL, NET)),
    "published heads": (1, spec_of(DeltaNet(4, 8, 128, 128, 4), GATED, max_context=18)),
    "odd shapes": (1, spec_of(DeltaNet(4, 12, 64, 16, 3), AttentionMixer(12, 4, 16), DeltaNet(4, 12, 64, 16, 3))),
    "experts beside a shared one on two ranks": (2, STORED[SHARED]),
    "experts beside a shared one": (1, STORED[SHARED]),
    "ten experts of 512 beside a shared one": (1, STORED["ten experts of 512 beside a shared one"]),
}
SWEPT = set(SPECS) - {"small nets on two ranks", "experts beside a shared one on two ranks"}
CODED_SPEC = spec_of(NET, SMALL, hidden_size=160, max_context=20)
CODED_EXPERTS = replace(MIXTURE, max_context=20)
# By name: the model, the form of codes, and whether what nets multiply first, and last, has 16 bit beside them.
CODED: dict[str, tuple[ModelSpec, WeightFormat, bool, bool]] = {
    "FP8, blocks": (CODED_SPEC, WeightFormat("E4M3", 128, 128, "BF16"), False, False),
    "INT4": (CODED_SPEC, WeightFormat("INT4", 1, 128, "BF16"), False, False),
    "INT4, plain nets": (CODED_SPEC, WeightFormat("INT4", 1, 128, "BF16"), True, True),
    "FP8, experts": (CODED_EXPERTS, WeightFormat("E4M3", 128, 128, "BF16"), False, False),
    "INT4, experts": (CODED_EXPERTS, WeightFormat("INT4", 1, 128, "BF16"), False, False),
}
WARM = {"INVERSE_TEMPERATURE": str(np.float32(2).view(np.uint32))}


def drafted_ways(plain: Answer) -> dict[str, list[int]]:
    """Drafts by position: all right, hardly ever, some, and wrong ones in no order."""
    chance = np.random.default_rng(7)
    return {
        "right": drafts_of(plain),
        "wrong": [*PROMPT, *[71] * 60],
        "some": drafts_of(plain, wrong=(1, 4, 5, 6, 11, 13, 22)),
        "any": drafts_of(plain, wrong=[i for i in range(60) if chance.random() < 0.4]),
    }


@pytest.mark.parametrize("name", cases(SPECS, SWEPT))
def test_passes_with_states_have_the_bits_of_plain_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, scores and logits, also where warps are far behind others; a launch ends in the midst of each answer."""
    num_ranks, spec = SPECS[name]
    model = StoredModel(spec, "bfloat16", monkeypatch)
    plain_twin = Twin(model, 1, tmp_path / "plain", {})
    plain = plain_twin.answer([], 60)
    assert plain.finish is Finish.LENGTH
    assert len(plain.tokens) == spec.max_context - len(PROMPT)
    plain_warm = plain_twin.answer([], 9, WARM)
    for tokens in (2, 4):
        twin = Twin(model, tokens, tmp_path / str(tokens), {}, num_ranks)
        passes = dict[str, int]()
        for way, drafts in drafted_ways(plain).items():
            found = twin.answer(drafts, 60)
            assert replace(found, passes=plain.passes) == plain, way
            passes[way] = found.passes
        assert passes["right"] <= plain.passes / tokens + 2
        assert passes["right"] < passes["any"] < passes["wrong"]
        assert replace(twin.answer(drafts_of(plain_warm, wrong=(3,)), 9, WARM), passes=plain_warm.passes) == plain_warm
    assert twin.answer(drafts_of(plain, wrong=(2,)), 5, {"UNREST": "1"}).tokens == plain.tokens[:5]


@pytest.mark.sweep
@pytest.mark.parametrize("name", CODED)
def test_so_have_passes_of_quantised_nets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, form, plain_inputs, plain_outputs = CODED[name]
    coding = replace(Coding.of(form), plain_inputs=plain_inputs, plain_outputs=plain_outputs)
    model = CodedNets(spec, "bfloat16", form, monkeypatch)
    layouts = tensor_layouts(spec)
    model.values = {tensor: values for tensor, values in model.values.items() if is_coded(layouts, coding, tensor)}
    options = {"coding": coding}
    plain = Twin(model, 1, tmp_path / "1", options).answer([], 40)
    assert len(plain.tokens) == spec.max_context - len(PROMPT)
    for tokens in (2, 4):
        twin = Twin(model, tokens, tmp_path / str(tokens), options)
        for wrong in ((), (1, 4, 5, 6, 11)):
            found = twin.answer(drafts_of(plain, wrong), 40)
            assert replace(found, passes=plain.passes) == plain
            assert found.passes < plain.passes


# Of builds that take turns: ranks, and FFNs.
TURNS = {"one rank": (1, DENSE), "two ranks": (2, DENSE), "two ranks, experts": (2, Experts(80, ExpertsSpec(16, 3), 144))}


@pytest.mark.parametrize("name", cases(TURNS, set(TURNS) - {"two ranks"}))
def test_builds_that_take_turns_go_on_behind_each_others_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch leaves states behind the request's position, whichever build it is of, and wherever it ends."""
    num_ranks, ffn = TURNS[name]
    spec = spec_of(NET, SMALL, ffn=ffn, num_lanes=2, max_context=128)
    model = StoredModel(spec, "bfloat16", monkeypatch)

    def twin_of(name: str, *options: dict[str, Any], ranks: int = num_ranks) -> test_drafts_twin.Twin:
        builds = [test_drafts_twin.Build(model, tmp_path / f"{name}{i}", ranks, **one) for i, one in enumerate(options)]
        return test_drafts_twin.Twin(tmp_path / name, *builds)

    prompt, max_tokens = test_drafts_twin.PROMPT, 40
    plain = twin_of("plain", {}, ranks=1).answer(prompt, max_tokens, {})
    twin = twin_of("both", {"drafts": True}, {"tokens": 4})
    predicted = [(token + (index % 6 == 4)) % 76 for index, token in enumerate(plain.tokens)][:22]  # and then nothing
    of_costs = {"PASS_TOKENS": "4", "EXTRA": f"{EXTRA}", "EDGE": f"{EDGE}"}
    for others, stops in (({"OTHERS_WAIT": "1"}, ()), ({}, (9, 20, 21, 33))):  # launches end behind a pass; or at these positions
        drafts = PassDrafts(prompt, predicted, max_tokens, 4, extra=EXTRA, edge=EDGE, num_left=len(prompt))
        found = twin.answer(prompt, max_tokens, of_costs | others, drafts, predicted, stops)
        assert (found.tokens, found.scores, found.finish) == (plain.tokens, plain.scores, plain.finish)
        assert any(0 < one.num_right < one.num_drafted for one in found.drafted), "a pass of which some tokens counted"
        assert min(found.num_passes) > 0, "both builds have had turns"
