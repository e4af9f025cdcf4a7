"""Passes of several tokens on a CPU (decode_twin/): the bits of plain decoding, whatever is drafted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.shapes import named_shape
from kog_dist.decode.coding import HEAD_CODING, Coding
from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE
from kog_dist.workers.cuda.kernel_header import headers
from tests.sweeps import cases
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import NAMES, OF_EXPERTS, SPEC, Model, build_twin, command_of, decode_sources

pytestmark = needs_compiler

# Three groups of eight rows in a product, so that one has no neighbour; and two query heads for a KV head.
DENSE = replace(
    SPEC, num_lanes=2, num_heads=8, num_kv_heads=4, own_head_dim=16, shared_norm_scale=True, delay=0, intermediate_size=432
)  # fmt: skip
NORMED = replace(DENSE, own_head_dim=32, qkv_bias=True, qk_norm=True, out_bias=False, num_layers=1)
# Two sets of query heads, which two teams have; and a ring of positions that goes round, beside a layer that sees everything.
SETS = replace(DENSE, num_lanes=1, num_heads=10, num_kv_heads=2, own_head_dim=128, num_layers=1)
LONG = replace(DENSE, own_head_dim=256, num_layers=1)  # heads whose values come when scores are there
WINDOWS = replace(DENSE, own_head_dim=32, sliding_window=20, window_layers=(0,), max_context=160)
SPECS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "halves of groups": (DENSE, {}),
    "normed heads": (NORMED, {}),
    "sets of heads": (SETS, {}),
    "long heads": (LONG, {}),
    "windows, fp8": (WINDOWS, {"kv_dtype": "fp8"}),
    "whole windows": (WINDOWS, {"whole_windows": True}),
}
SWEPT = {"halves of groups", "sets of heads", "long heads", "whole windows"}
# By name: how layers are coded, and whether the LM head is. A lane has so many FFN columns that some warps have two steps; blocks
# of rows have four groups of eight, and three.
CODED_SPEC = replace(DENSE, hidden_size=160, num_heads=16, intermediate_size=2560, vocab_size=300)
CODED = {
    "FP8, blocks": ("FP8, blocks", False),
    "FP8, a scale for each row": ("FP8, a scale for each row", False),
    "INT4, an LM head in INT8": ("INT4", True),
    "INT4, groups of 32 with zero points": ("INT4, groups of 32 with zero points", False),
    "INT4, a scale for each row": ("INT4, a scale for each row", False),
    "MXFP4, an LM head in INT8": ("MXFP4", True),
}
CODED_SWEPT = set(CODED) - {"INT4, an LM head in INT8"}
PROMPT = [3, 70, 11, 5, 42, 9]
FIRST = 126  # of the prompt that is decoded in a long context, from an empty cache: shortly before rings go round
MAX_TOKENS = 30  # more than the context leaves


@dataclass(frozen=True)
class Answer:
    """`logits`: of the last token; `passes`: how many there were."""

    tokens: list[int]
    finish: Finish
    logits: bytes
    scores: bytes
    passes: int


class Twin:
    """A program for passes of so many tokens, on so many ranks."""

    def __init__(self, model: Model, tokens: int, folder: Path, options: Mapping[str, Any], num_ranks: int = 1) -> None:
        shapes = [
            TrialShape(
                model.spec,
                model.spec.lanes_of_rank(rank, num_ranks),
                tokens=tokens,
                num_ranks=num_ranks,
                **{"max_ctas": 5, "copies": 2, "max_slots": 6, "keeps_hashes": True, **options},
            )
            for rank in range(num_ranks)
        ]
        self.shape, self.num_ranks = shapes[0], num_ranks
        self.folder, self.first = folder, FIRST if model.spec.max_context > FIRST else 0
        self.prompt = [*[1] * self.first, *PROMPT]
        folder.mkdir()
        build_twin("decode", decode_sources(headers(self.shape)), folder, "-O1")  # it decodes hundreds of tokens
        for rank, shape in enumerate(shapes):
            for name, array in arrays_of(model.weights(shape), rank).items():
                array.tofile(folder / f"{name}.bin")

    def answer(self, drafts: Sequence[int], max_tokens: int = MAX_TOKENS, environ: Mapping[str, str] | None = None) -> Answer:
        np.array(self.prompt, np.uint32).tofile(self.folder / "prompt.bin")
        context = self.shape.spec.max_context
        np.array([*[0] * self.first, *drafts, *[0] * context][:context], np.uint32).tofile(self.folder / "drafts.bin")
        program, there, _, *sizes = command_of(self.shape)
        done = subprocess.run(
            [program, there, str(max_tokens), *sizes], cwd=self.folder,
            env={**os.environ, "DRAFTS": "1", "FIRST": f"{self.first}", **(environ or {})},
            capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, "see decode.cpp"
        first, *others = map(self._answer_of, range(self.num_ranks))
        assert all(replace(other, logits=b"") == replace(first, logits=b"") for other in others)
        return replace(first, logits=b"".join(one.logits for one in (first, *others)))

    def _answer_of(self, rank: int) -> Answer:
        """What a rank has; of the logits those of its rows."""
        ring = np.fromfile(self.folder / f"ring.{rank}.bin", np.uint64).reshape(-1, 2)
        ring = ring[ring[:, 0] != 0]
        state = np.fromfile(self.folder / f"state.{rank}.bin", DECODE_STATE.dtype, count=1)[0]
        logits = np.fromfile(self.folder / f"logits.{rank}.bin", np.float32).reshape(self.shape.tokens, -1)
        row = int(state["num_kept"]) - 1 if self.shape.tokens > 1 else 0
        return Answer(
            [int(word) & 0xFFFFFFFF for word in ring[:, 0]], Finish(int(ring[-1, 1]) & 0xFFFFFFFF), logits[row].tobytes(),
            state["hash"].tobytes(), int(state["epoch" if self.shape.tokens == 1 else "pass_epoch"]),
        )  # fmt: skip


def arrays_of(weights: DeviceWeights, rank: int = 0) -> dict[str, Any]:
    """What the program reads of a model on a rank, by file name."""
    arrays = {f"{name}.{rank}": getattr(weights, name) for name in NAMES}
    arrays |= {f"{name}.{rank}": getattr(weights.experts, attribute, None) for name, attribute in OF_EXPERTS.items()}
    found = {name: np.ascontiguousarray(np.zeros(0, np.uint16) if held is None else held) for name, held in arrays.items()}
    return found | {"embedding": weights.embedding, "rope": np.ascontiguousarray(weights.rope, np.float32)}


def drafts_of(plain: Answer, wrong: Sequence[int] = ()) -> list[int]:
    """By position what plain decoding says there, but for answer's tokens in `wrong`."""
    tokens = [token if i not in wrong else (token + 1) % 70 for i, token in enumerate(plain.tokens)]
    return [*PROMPT, *tokens]


@pytest.mark.parametrize("name", cases(SPECS, SWEPT))
def test_passes_have_the_bits_of_plain_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, options = SPECS[name]
    model = Model(spec, "bfloat16", monkeypatch, options.get("kv_dtype", ""))
    plain_twin = Twin(model, 1, tmp_path / "1", options)
    plain = plain_twin.answer([])
    assert plain.finish is Finish.LENGTH
    assert len(plain.tokens) == spec.max_context - len(plain_twin.prompt)  # as far as the context goes
    if not plain_twin.first:
        assert plain.tokens[:4] == greedy(model, plain.tokens[:3])
    warm = {"INVERSE_TEMPERATURE": str(np.float32(2).view(np.uint32))}
    plain_warm = plain_twin.answer([], 9, warm)
    for tokens in (2, 4):
        twin = Twin(model, tokens, tmp_path / str(tokens), options)
        prompt_passes = (len(PROMPT) - 1) // tokens
        for drafts, passes in (
            (drafts_of(plain), prompt_passes + -(-(plain.passes - tokens * prompt_passes) // tokens)),
            ([*PROMPT, *[71] * 40], None),  # hardly ever right
            (drafts_of(plain, wrong=(1, 4, 5, 6, 11, 13, 22)), None),
        ):
            found = twin.answer(drafts)
            assert replace(found, passes=plain.passes) == plain
            assert passes is None or found.passes == passes
        assert replace(twin.answer(drafts_of(plain_warm, wrong=(3,)), 9, warm), passes=plain_warm.passes) == plain_warm
        assert twin.answer(drafts_of(plain), 7).tokens == plain.tokens[:7]


# Two query heads for each KV head, of which a rank has two or one; sums that are rounded in halves, on ranks and within them.
LANES = replace(DENSE, num_lanes=4)
ON_RANKS: dict[str, tuple[int, ModelSpec, dict[str, Any]]] = {
    "two ranks, a lane each": (2, DENSE, {}),
    "two ranks, two lanes each": (2, LANES, {}),
    "four ranks": (4, LANES, {}),
    "two ranks, normed heads": (2, NORMED, {}),
    "two ranks, windows, fp8": (2, WINDOWS, {"kv_dtype": "fp8"}),
}
SWEPT_ON_RANKS = set(ON_RANKS) - {"two ranks, two lanes each"}


@pytest.mark.parametrize("name", cases(ON_RANKS, SWEPT_ON_RANKS))
def test_passes_on_ranks_have_the_bits_of_plain_decoding_on_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with warps that are far behind others."""
    num_ranks, spec, options = ON_RANKS[name]
    model = Model(spec, "bfloat16", monkeypatch, options.get("kv_dtype", ""))
    plain_twin = Twin(model, 1, tmp_path / "plain", options)
    plain = plain_twin.answer([])
    warm = {"INVERSE_TEMPERATURE": str(np.float32(2).view(np.uint32))}
    plain_warm = plain_twin.answer([], 9, warm)
    for tokens in (2, 4):
        twin = Twin(model, tokens, tmp_path / str(tokens), options, num_ranks)
        for drafts in (drafts_of(plain), [*PROMPT, *[71] * 40], drafts_of(plain, wrong=(1, 4, 5, 6, 11, 13, 22))):
            found = twin.answer(drafts)
            assert replace(found, passes=plain.passes) == plain
            assert found.passes < plain.passes
        assert replace(twin.answer(drafts_of(plain_warm, wrong=(3,)), 9, warm), passes=plain_warm.passes) == plain_warm
    restless = twin.answer(drafts_of(plain, wrong=(2,)), 5, {"UNREST": "1"})
    assert restless.tokens == plain.tokens[:5]


@pytest.mark.parametrize("name", cases(CODED, CODED_SWEPT))
def test_so_have_passes_of_quantised_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, has_coded_head = CODED[name]
    options = {"coding": Coding.of(FORMS[form])} | ({"head_coding": HEAD_CODING} if has_coded_head else {})
    model = CodedModel(CODED_SPEC, "bfloat16", FORMS[form], monkeypatch)
    plain = Twin(model, 1, tmp_path / "1", options).answer([])
    assert len(plain.tokens) == CODED_SPEC.max_context - len(PROMPT)
    if not has_coded_head:
        assert plain.tokens[:4] == greedy(model, plain.tokens[:3])
    for tokens in (2, 4):
        twin = Twin(model, tokens, tmp_path / str(tokens), options)
        for wrong in ((), (1, 4, 5, 6, 11, 13, 22)):
            found = twin.answer(drafts_of(plain, wrong))
            assert replace(found, passes=plain.passes) == plain
            assert (found.passes < plain.passes / tokens + 2) == (not wrong)


@pytest.mark.parametrize(
    ("name", "options", "finding"),
    [
        ("llama-3.2-1b", {"tokens": 3}, "passes of 3 tokens (1, 2 or 4)"),
        ("llama-3.2-1b", {"tokens": 2, "kv_dtype": "int4"}, "a cache of int4"),
        ("qwen3-8b", {"tokens": 2, "num_ranks": 8}, "8 ranks (1, 2 or 4)"),
        ("2b", {"tokens": 4}, "a stream of each lane; windows of 512 positions, whose rings have no room for another token"),
        ("qwen2.5-coder-7b+fp8", {"tokens": 4}, "shapes that leave 0 ring slots in shared memory; use"),
    ],
)
def test_what_passes_of_several_tokens_cannot_do_is_refused_by_name(name: str, options: dict[str, Any], finding: str) -> None:
    spec, codings = named_shape(name)
    hosted = range(spec.num_lanes // options.get("num_ranks", 1))
    with pytest.raises(ConfigError) as raised:
        TrialShape(spec, hosted, **codings, **options)
    assert finding in str(raised.value)
    assert str(raised.value).endswith("use passes of one token")


def greedy(model: Model, tokens: Sequence[int]) -> list[int]:
    """Of the oracle, behind the prompt and each of `tokens`."""
    found: list[int] = model.logits([*PROMPT, *tokens])[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    return found
