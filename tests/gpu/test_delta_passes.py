"""Passes of several tokens with gated delta nets on a GPU, at the width of real models: tokens, logits and states have the bits
of plain decoding, whatever is drafted and whoever drafts; states stand where the request does, wherever a launch ends.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coding import Coding
from kog_dist.decode.request import DecodeRequest
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_weights
from tests.gpu.test_delta_nets import FP8, SEED
from tests.unit.asked_together import Asked
from tests.unit.delta_configs import few_layers

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]

# By name: published shape, number of codes, tokens of passes. Four of 27B in FP8 have no room in shared memory.
SHAPES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "Qwen3.5-4B": ("Qwen3.5-4B", "", (2, 4)),
    "Qwen3.5-9B": ("Qwen3.5-9B", "", (2, 4)),
    "Qwen3.5-27B": ("Qwen3.5-27B", "", (2, 4)),
    "Qwen3.5-27B, INT4": ("Qwen3.5-27B", "INT4", (2, 4)),
    "Qwen3.5-27B, FP8": ("Qwen3.5-27B", "E4M3", (2,)),
    "Qwen3.5-4B, FP8": ("Qwen3.5-4B", "E4M3", (2, 4)),
    "Qwen3.5-35B-A3B": ("Qwen3.5-35B-A3B", "", (2, 4)),
    "Qwen3.5-35B-A3B, FP8": ("Qwen3.5-35B-A3B", "E4M3", (2, 4)),
    "Qwen3.5-35B-A3B, INT4": ("Qwen3.5-35B-A3B", "INT4", (4,)),
    "Qwen3-Coder-Next, FP8": ("Qwen3-Coder-Next", "E4M3", (4,)),
}
NUM_PROMPT, NUM_TOKENS = 61, 96
SAMPLINGS = {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.7, seed=3)}
WRONG_SHARES = {"all right": 0.0, "some wrong": 0.3, "most wrong": 0.7, "all wrong": 1.0}


def options_of(name: str) -> dict[str, Any]:
    """Of KernelShape."""
    model, number, _ = SHAPES[name]
    coding = Coding.of(WeightFormat(number, 1, 128, "BF16")) if number else None
    return {"spec": few_layers(model, **({"quantization_config": FP8} if number else {})), "coding": coding, "keeps_hashes": True}


def shape_of(name: str, **options: Any) -> KernelShape:
    own = options_of(name)
    return KernelShape(hosted_lanes=range(own["spec"].num_lanes), **own, **options)


def options_of_builds() -> Iterator[dict[str, Any]]:
    """Of KernelShape, for all that these tests build but the engine."""
    for name, (_, _, sizes) in SHAPES.items():
        yield from ({**options_of(name), "tokens": tokens} for tokens in (1, *sizes))
        yield {**options_of(name), "drafts": True}


def prompt_of(kernel: Monokernel) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, NUM_PROMPT).tolist()
    return ids


def answer(
    kernel: Monokernel, sampling: SamplingParams, drafts: Sequence[int] = (), *, num_tokens: int = NUM_TOKENS, steps: int = 64
) -> tuple[list[int], bytes, bytes, int]:
    """Tokens, the logits of the last one, the state behind them, and the number of passes."""
    if drafts:
        kernel.expect(NUM_PROMPT, drafts)
    counted = "pass_epoch" if kernel.shape.tokens > 1 else "epoch"
    before = int(kernel.state()[counted])
    kernel.begin(prompt_of(kernel), num_tokens, sampling)
    for _ in range(0, NUM_PROMPT + num_tokens, steps):
        kernel.launch(steps)
    kernel.finish()
    tokens = [kernel.token(index) for index in range(num_tokens)]
    assert kernel.nets is not None
    passes = int(kernel.state()[counted]) - before
    return [one.token_id for one in tokens if one is not None], kernel.logits.get().tobytes(), kernel.nets.get().tobytes(), passes


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", SHAPES)
def test_passes_have_the_bits_of_plain_decoding(name: str, sampling: str) -> None:
    """The state, too, which the end of a launch takes to where the request is; with launches of few passes as well."""
    plain = Monokernel(shape_of(name), random_weights(shape_of(name), SEED))
    wanted = answer(plain, SAMPLINGS[sampling])
    assert len(wanted[0]) == NUM_TOKENS
    vocab = plain.shape.spec.vocab_size
    for per_pass in SHAPES[name][2]:
        kernel, counts = Monokernel(shape_of(name, tokens=per_pass), plain.weights), dict[str, int]()
        for way, share in WRONG_SHARES.items():
            chance = np.random.default_rng(7)
            drafts = [(token + int(chance.random() < share)) % vocab for token in wanted[0]]
            for steps in (64, 3):
                found = answer(kernel, SAMPLINGS[sampling], drafts, steps=steps)
                assert found[:3] == wanted[:3], (per_pass, way, steps)
                counts[way] = found[3]
        assert counts["all right"] == -(-(NUM_PROMPT - 1 + NUM_TOKENS) // per_pass)
        assert sorted(counts.values()) == list(counts.values())
        kernel.close()
    plain.close()


@pytest.mark.parametrize("name", SHAPES)
def test_builds_that_take_turns_give_the_answer_of_plain_decoding(name: str) -> None:
    """Each goes on behind the state that the other has left; launches stop where a copy of the state would be made."""
    shape = shape_of(name)
    plain = Monokernel(shape, random_weights(shape, SEED))
    wanted = answer(plain, SamplingParams())
    kernel = Monokernel(shape, plain.weights, drafts=True)
    vocab = shape.spec.vocab_size
    predicted = [(token + (index % 9 == 5)) % vocab for index, token in enumerate(wanted[0])][:50]
    for stop in (NUM_PROMPT - 20, NUM_PROMPT + 30, NUM_PROMPT + 31):
        kernel.begin(prompt_of(kernel), NUM_TOKENS, SamplingParams(), prediction=predicted)
        for _ in range(NUM_PROMPT + NUM_TOKENS):
            kernel.launch(7, stop_position=stop)
        kernel.finish()
        assert int(kernel.state()["position"]) == stop
        for _ in range(NUM_PROMPT + NUM_TOKENS):
            kernel.launch(7)
        kernel.finish()
        tokens = [kernel.token(index) for index in range(NUM_TOKENS)]
        assert [one.token_id for one in tokens if one is not None] == wanted[0]
        assert kernel.nets is not None
        assert kernel.nets.get().tobytes() == wanted[2]
    assert sum(one.drafted.num_right for one in tokens if one is not None) > 20
    kernel.close()
    plain.close()


@pytest.mark.parametrize("ffn", ["dense", "experts"])
def test_an_engine_says_with_drafts_what_it_says_without(ffn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind copies of states, in turns with another request."""
    pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")
    from kog_dist.bench.fakes.tiny_delta_model import WITH_EXPERTS, write_tiny_delta_model
    from kog_dist.workers.coordinator import kept_states
    from tests.gpu.test_delta_engine import EXPERTS, NARROW, SIZES, STEP, ids, said, served

    monkeypatch.setattr(kept_states, "STEP", STEP)
    write_tiny_delta_model(tmp_path, **SIZES, **(WITH_EXPERTS | EXPERTS | NARROW if ffn == "experts" else {}))
    prompts = [ids(count, count) * 3 for count in (40, 130, 300)]
    for parallel in (1, 2):
        with closing(served(tmp_path, parallel)) as engine:
            plain = [Asked(DecodeRequest(prompt, 200, ignore_eos=True)) for prompt in prompts]
            drafted = [Asked(replace(one.request, drafts=True, prediction=tuple(said(one)))) for one in ask(engine, plain)]
            assert [said(one) for one in ask(engine, drafted)] == [said(one) for one in plain]
            assert sum(entry.drafted.num_right for one in drafted for entry in one.entries) > 100
            longer = [[*one.request.prompt, *said(one)[:90], 7] for one in plain]
            again = [Asked(DecodeRequest(prompt, 60, ignore_eos=True)) for prompt in longer]
            others = [Asked(replace(one.request, drafts=True)) for one in again]
            assert [said(one) for one in ask(engine, others)] == [said(one) for one in ask(engine, again)]


def ask(engine: Any, asked: Sequence[Asked]) -> Sequence[Asked]:
    """The same, answered."""
    engine.run(asked, random.Random(1))
    return asked
