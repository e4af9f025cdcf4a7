"""Passes of several tokens with experts on a CPU (decode_twin/): the bits of plain decoding, whoever has chosen the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.decode.coding import Coding
from kog_dist.runtime.ring import Finish
from tests.sweeps import cases
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import Model
from tests.unit.test_expert_twin import MXFP4, QUANTISED, SPLITS, VARIANTS, CodedExperts
from tests.unit.test_passes_twin import PROMPT, Twin, drafts_of, greedy

pytestmark = needs_compiler
WRONG = (1, 4, 5, 6, 11)


def _of_16_bit(name: str) -> Callable[[pytest.MonkeyPatch], Model]:
    return lambda monkeypatch: Model(replace(VARIANTS[name], max_context=48), "bfloat16", monkeypatch)


def _coded(form: str) -> Callable[[pytest.MonkeyPatch], Model]:
    return lambda monkeypatch: CodedModel(replace(QUANTISED, max_context=48), "bfloat16", FORMS[form], monkeypatch)


# By name: what makes the model, options of its shape, and numbers of ranks and tokens.
MODELS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Model], dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "two of ten": (_of_16_bit("qwen3_moe"), {}, ((2, 4),)),
    "two of ten, other ranks": (_of_16_bit("qwen3_moe"), {}, ((1, 2), (1, 4), (2, 2), (4, 2), (4, 4))),
    "four of forty": (_of_16_bit("qwen3_moe, weights of all"), {}, ((1, 2), (1, 4), (2, 4))),
    "three of sixteen, in turn": (_of_16_bit("qwen3_moe, three of sixteen"), {}, ((1, 4), (2, 2))),
    "two splits of outputs in a thread": (_of_16_bit("qwen3_moe, two splits of outputs in a thread"), {}, ((1, 2), (1, 4))),
    "windows, sinks and biases": (_of_16_bit("gpt_oss"), {"splits": SPLITS["gpt_oss"]}, ((1, 4), (2, 2))),
    "FP8": (_coded("FP8, blocks"), {"coding": Coding.of(FORMS["FP8, blocks"])}, ((1, 2), (1, 4), (2, 4))),
    "INT4": (_coded("INT4"), {"coding": Coding.of(FORMS["INT4"])}, ((1, 2), (1, 4), (2, 4))),
    "experts in MXFP4": (CodedExperts, {"coding": Coding.of(MXFP4, is_of_experts=True)}, ((1, 4),)),
    "experts in MXFP4, ranks": (CodedExperts, {"coding": Coding.of(MXFP4, is_of_experts=True)}, ((1, 2), (2, 2), (2, 4))),
}
SWEPT = set(MODELS) - {"two of ten", "experts in MXFP4"}


@pytest.mark.parametrize("name", cases(MODELS, SWEPT))
def test_passes_with_experts_have_the_bits_of_plain_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind right, wrong and random drafts; also with warps that are far behind others."""
    make, options, forms = MODELS[name]
    options, model = {"max_ctas": 4, **options}, make(monkeypatch)
    max_tokens = 16 if model.spec.num_layers < 3 else 8  # a program has so many turns
    plain = Twin(model, 1, tmp_path / "plain", options).answer([], max_tokens)
    assert plain.finish is Finish.LENGTH
    assert len(plain.tokens) == max_tokens
    assert plain.tokens[:4] == greedy(model, plain.tokens[:3])
    for num_ranks, tokens in forms:
        twin = Twin(model, tokens, tmp_path / f"{num_ranks} {tokens}", options, num_ranks)
        for drafts in (drafts_of(plain), drafts_of(plain, WRONG), [*PROMPT, *[71] * 60]):
            found = twin.answer(drafts, max_tokens)
            assert replace(found, passes=plain.passes) == plain
            assert found.passes < plain.passes
    restless = twin.answer(drafts_of(plain, wrong=(2,)), 5, {"UNREST": "1"})
    assert restless.tokens == plain.tokens[:5]
