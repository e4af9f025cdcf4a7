"""Requests that begin alike go on behind copies of a state, and get what they would get alone; books and ranks agree where."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.decode import kept_states
from kog_dist.decode.interpreter import Interpreter
from kog_dist.decode.kept_states import copies_of, still_there
from kog_dist.decode.plan import make_plan
from kog_dist.decode.request import DecodeRequest
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import KvLayout
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.engines.cpu import CpuEngine
from kog_dist.workers.kept_caches import KeptCaches
from tests.unit.delta_models import VOCAB, published
from tests.unit.test_cpu_prompts import StubControl, engine_of


@pytest.mark.parametrize(
    ("num_cached", "num_prompt", "copies"),
    [
        (0, 1, {1: 0}), (0, 512, {1: 511}), (0, 513, {1: 512}), (0, 514, {0: 512, 1: 513}), (512, 514, {1: 513}),
        (511, 1600, {0: 1536, 1: 1599}), (1599, 1600, {1: 1599}),
    ],
)  # fmt: skip
def test_where_copies_are_made(num_cached: int, num_prompt: int, copies: dict[int, int]) -> None:
    assert copies_of(num_cached, num_prompt) == copies
    assert still_there({0: 512, 1: 600}, 599) == {0: 512}


class Model:
    """An engine of one rank with two KV caches, and its books."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes))
        self.interpreter = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None, num_kv_caches=2)
        self.books = KeptCaches(KvLayout(2), None, is_recurrent=True)
        self.engine: CpuEngine
        self.num_read = 0

    def ask(self, prompt: list[int], num_tokens: int, *, reuse: bool = True, cancel_after: int = 99) -> list[bytes]:
        """Logits of each token of an answer; none if it is cancelled after so many passes of its prompt."""
        control = StubControl(cancel_after)
        self.engine, _ = engine_of(control)
        cast(Any, self.engine)._interpreter, cast(Any, self.engine)._pass_tokens = self.interpreter, 4
        use = self.books.take(prompt, reuse=reuse)
        self.interpreter.use_cache(use.cache, use.source, use.num_cached)
        self.num_read = len(prompt) - use.num_cached
        tokens, logits = list(prompt), list[bytes]()
        if self.engine._prefill(1, DecodeRequest(tuple(prompt), num_tokens, kv=use)):
            for _ in range(num_tokens):
                output = self.interpreter.step(tokens[-1], len(tokens) - 1, SamplingParams(), gather_logits=True)
                assert output.logits is not None
                logits.append(output.logits.tobytes())
                tokens.append(output.token_id)
        position = self.interpreter.num_positions
        self.books.give_back(tokens, position, position)
        return logits


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(kept_states, "STEP", 8)
    published("qwen3_5, tied, three layers", tmp_path)
    return Model(tmp_path)


def test_requests_in_any_order_get_what_they_would_get_alone(model: Model, tmp_path: Path) -> None:
    """Prompts that share beginnings, answers that are gone behind, cancels within prompts."""
    chosen, alone = random.Random(4), Model(tmp_path)
    stems = [[chosen.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    num_saved = 0
    for _ in range(60):
        stem = chosen.choice(stems)
        prompt = stem[: chosen.randint(1, 40)] + [chosen.randrange(VOCAB) for _ in range(chosen.randint(0, 3))]
        cancel_after = chosen.choice([99, 99, 99, 1, 2])
        found = model.ask(prompt, 2, cancel_after=cancel_after)
        num_saved += len(prompt) - model.num_read
        if found:
            assert found == alone.ask(prompt, 2, reuse=False)
    assert num_saved > 200


def test_turns_of_an_agent_read_little_anew(model: Model) -> None:
    """Each turn repeats the one before but for the last two tokens of its prompt, which a template writes otherwise."""
    chosen = random.Random(2)
    prompt, anew = [chosen.randrange(VOCAB) for _ in range(30)], []
    for _ in range(6):
        model.ask(prompt, 3)
        anew.append(model.num_read)
        prompt = prompt[:-2] + [chosen.randrange(VOCAB) for _ in range(12)]
    assert anew[0] == 30
    assert max(anew[1:]) <= 12 + 8 + 2, "what is new, and at most a step and what changed"


def test_a_stop_string_goes_back_to_the_end_of_the_prompt(model: Model) -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 20)]
    first = model.ask(prompt, 6)
    assert model.ask(prompt, 6) == first
    assert model.num_read == 1, "the last of the prompt, which is decoded"
    model.ask([*prompt, 5, 6], 1)
    assert model.num_read == 3
    assert model.ask(prompt, 6) == first
    assert model.num_read == 4, "the copy behind two steps; that behind the prompt's end is the longer one's"
