"""A pass that verifies drafts leaves what its tokens leave one after the other: ids, logits, keys and values, on any ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter, StepOutput
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.decode.sampling import Candidate, Sampler
from kog_dist.errors import PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.multi.test_bits import SPECS, SWEPT, ThreadExchange, run_ranks
from tests.multi.test_passes import LONG, saved
from tests.sweeps import cases
from tests.unit.delta_models import VOCAB, published

PROMPT, NUM_GENERATED = [3, 17, 4, 90, 41], 20
GREEDY = SamplingParams()
PENALISED = SamplingParams(0.9, seed=5, top_k=40, frequency_penalty=0.6, repetition_penalty=1.2, min_tokens=9)
DRAWN = SamplingParams(1.2, seed=7)

Drafter = Callable[[Sequence[int]], Sequence[int]]  # of the answer so far


class Answer(NamedTuple):
    """What a request leaves: ids, logits of each, and the caches and states of all ranks."""

    token_ids: list[int]
    logits: list[bytes]
    caches: list[bytes]


def nothing(_: Sequence[int]) -> Sequence[int]:
    return ()


def answer(
    folder: Path, world_size: int, sampling: SamplingParams, draft: Drafter = nothing, *, kv_dtype: str = "float32"
) -> tuple[Answer, int]:
    """The answer to PROMPT, and in how many passes it came."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size, num_tokens=8)
    check(plan)

    def work(rank: int, exchange: ThreadExchange) -> tuple[list[int], list[bytes], list[bytes], int]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
        engine = Interpreter(plan, rank, weights, exchange, kv_dtype=kv_dtype)
        sampler = Sampler(checkpoint.spec.vocab_size, PROMPT, sampling, (0, 50))

        def choose(logits: np.ndarray, position: int) -> Candidate:
            best = sampler.choose(logits, position)
            sampler.accept(best.token_id)
            return best

        engine.read(PROMPT[:-1], 0)
        ids, logits, passes = [PROMPT[-1]], [], 0
        while len(ids) <= NUM_GENERATED:
            position = len(PROMPT) + len(ids) - 2
            drafted = draft(ids[1:])[: NUM_GENERATED - len(ids)]
            chooses = rank == 0 and sampling.has_processors
            outputs = engine.verify(
                (ids[-1], *drafted), position, sampling, gather_logits=True, choose=choose if chooses else None
            )  # fmt: skip
            assert [output.token_id for output in outputs[:-1]] == list(drafted[: len(outputs) - 1])
            assert engine.num_positions == position + len(outputs)
            ids += [output.token_id for output in outputs]
            logits += [output.logits.tobytes() for output in outputs if output.logits is not None]
            passes += 1
        held = slice(len(PROMPT) + NUM_GENERATED - 1)
        engine.go_back(held.stop)  # drafts of the last pass change a state only when the next begins, or the answer ends
        caches = [layer[0][:, :, held].tobytes() for layer in (*engine.memory.keys, *engine.memory.values)]
        caches += [array.tobytes() for layer in engine.memory.states for array in layer[0]]
        return ids[1:], logits, caches, passes

    ranks = run_ranks(world_size, work)
    assert all(other[0] == ranks[0][0] for other in ranks), "all ranks follow one answer"
    return Answer(ranks[0][0], ranks[0][1], [cache for rank in ranks for cache in rank[2]]), ranks[0][3]


def drafters(right: Sequence[int], vocab_size: int) -> dict[str, Drafter]:
    """Always right, always wrong, and any mixture, in drafts of all lengths."""
    rng = random.Random(5)

    def mixed(said: Sequence[int]) -> Sequence[int]:
        draft = random.Random(len(said)).choices(range(vocab_size), k=len(said) % 8)
        keeps = random.Random(len(said) + 50).randrange(9)
        return [*right[len(said) : len(said) + keeps], *draft][: len(draft)]

    wrong = rng.randrange(1, vocab_size)
    return {
        "right": lambda said: right[len(said) : len(said) + 7],
        "wrong": lambda said: [(token + wrong) % vocab_size for token in right[len(said) : len(said) + 4]],
        "mixed": mixed,
    }


@pytest.mark.parametrize("name", cases(SPECS, SWEPT))
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    folder = saved(spec, tmp_path)
    plain, num_passes = answer(folder, 1, DRAWN)
    assert num_passes == NUM_GENERATED == len(plain.logits)
    several = {2: answer(folder, 2, DRAWN)[0], 4: answer(folder, 4, DRAWN)[0]}
    for kind, draft in drafters(plain.token_ids, spec.vocab_size).items():
        found, num_passes = answer(folder, 1, DRAWN, draft)
        assert found == plain, kind
        assert num_passes == {"right": 3, "wrong": NUM_GENERATED}.get(kind, num_passes)
    for world_size, one_by_one in several.items():
        kind = "mixed" if world_size == 2 else "right"
        assert answer(folder, world_size, DRAWN, drafters(plain.token_ids, spec.vocab_size)[kind])[0] == one_by_one
        assert one_by_one.logits == plain.logits


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_5, tied, three layers"])
def test_states_of_delta_nets(name: str, tmp_path: Path) -> None:
    """A refused draft leaves nothing in a state; one that is accepted changes it once."""
    published(name, tmp_path)
    for sampling in (DRAWN, PENALISED):
        plain, _ = answer(tmp_path, 1, sampling)
        for kind, draft in drafters(plain.token_ids, VOCAB).items():
            found, num_passes = answer(tmp_path, 1, sampling, draft)
            assert found == plain, kind
            assert num_passes == {"right": 3, "wrong": NUM_GENERATED}.get(kind, num_passes)
        for world_size in (2, 4):
            several = answer(tmp_path, world_size, sampling)[0]
            assert several.logits == plain.logits
            assert answer(tmp_path, world_size, sampling, drafters(plain.token_ids, VOCAB)["mixed"])[0] == several


def test_states_of_delta_nets_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    published("qwen3_5_moe", tmp_path)
    plain, _ = answer(tmp_path, 2, GREEDY)
    assert answer(tmp_path, 2, GREEDY, drafters(plain.token_ids, VOCAB)["mixed"])[0] == plain


def test_a_state_can_go_back_within_the_last_pass_alone(tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    right = answer(tmp_path, 1, GREEDY)[0].token_ids

    def engine() -> Interpreter:
        made = Interpreter(
            make_plan(checkpoint.spec, 1, num_tokens=8), 0, checkpoint.rank_weights(range(checkpoint.spec.num_lanes)), None,
            num_kv_caches=2,
        )  # fmt: skip
        made.read(PROMPT[:-1], 0)
        return made

    def states(of: Interpreter) -> list[bytes]:
        return [array.tobytes() for layer in of.memory.states for array in layer[0]]

    end = len(PROMPT)
    for num_kept in range(1, 7):
        drafting, plain = engine(), engine()
        drafting.verify((PROMPT[-1], *right[:7]), end - 1, GREEDY)
        assert drafting.num_positions == end + 7
        drafting.go_back(end - 1 + num_kept)
        for idx, token in enumerate((PROMPT[-1], *right[: num_kept - 1])):
            plain.step(token, end - 1 + idx, GREEDY)
        assert states(drafting) == states(plain), num_kept
        with pytest.raises(PlanError, match="cannot"):
            drafting.verify((5,), end - 2, GREEDY)
    drafting.verify((right[5], *right[6:9]), end + 5, GREEDY)  # a pass in another cache overwrites what its drafts were made of
    drafting.use_cache(1, 1, 0)
    drafting.verify((3, 5, 6), 0, GREEDY)
    for idx in range(6, 9):
        plain.step(right[idx - 1], end - 1 + idx, GREEDY)
    plain.step(right[8], end + 8, GREEDY)
    assert states(drafting) == states(plain)
    with pytest.raises(PlanError, match="a pass of 9 tokens has more drafts than the plan, whose passes have 8"):
        drafting.verify([1] * 9, drafting.num_positions, GREEDY)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize(("kv_dtype", "dtype"), [("fp8", "bfloat16"), ("int4", "float16"), ("bfloat16", "float32")])
def test_choices_that_look_back(sampling: SamplingParams, kv_dtype: str, dtype: str, tmp_path: Path) -> None:
    """Penalties count what the same pass has accepted; a window slides within it."""
    folder = saved(LONG, tmp_path, dtype)
    for world_size in (1, 2):
        plain, _ = answer(folder, world_size, sampling, kv_dtype=kv_dtype)
        for kind, draft in drafters(plain.token_ids, LONG.vocab_size).items():
            assert answer(folder, world_size, sampling, draft, kv_dtype=kv_dtype)[0] == plain, kind


def test_without_a_library_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    folder = saved(SPECS["experts_with_biases"], tmp_path)
    plain, _ = answer(folder, 2, GREEDY)
    assert answer(folder, 2, GREEDY, drafters(plain.token_ids, 104)["mixed"])[0] == plain


def verified(
    folder: Path, world_size: int, drafts: Sequence[int], damage: Callable[..., None], **options: object
) -> list[list[StepOutput]]:
    """What each rank makes of one pass, `damage` having been done to each."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size, num_tokens=8)

    def work(rank: int, exchange: ThreadExchange) -> list[StepOutput]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes)
        damage(rank, weights)
        given = {name: value(rank) for name, value in options.items()}  # type: ignore[operator]
        return Interpreter(plan, rank, weights, exchange).verify((PROMPT[0], *drafts), 0, GREEDY, gather_logits=True, **given)

    found: list[list[StepOutput]] = run_ranks(world_size, work)
    return found


def unharmed(*_: object) -> None:
    pass


def test_a_stop_ends_the_pass_at_the_same_token_everywhere(tmp_path: Path) -> None:
    folder = saved(SPECS["delay_0"], tmp_path)
    right = answer(folder, 1, GREEDY)[0].token_ids
    for outputs in verified(folder, 2, right[:3], unharmed, stop=lambda rank: rank == 0):
        assert [output.stopped for output in outputs] == [True]
    offered = outputs[0].token_id  # by rank 1, which does not know of it
    for outputs in verified(folder, 2, [offered, offered], unharmed, stop=lambda rank: rank == 0):
        assert [output.stopped for output in outputs] == [True], "not even where a draft is what others would have chosen"
    for outputs in verified(folder, 2, [], unharmed, stop=lambda rank: rank == 1):
        assert [output.stopped for output in outputs] == [False], "rank 0 alone decides"

    def choices(rank: int) -> Callable[..., Candidate | None] | None:
        told = iter([Candidate(-3.0, 12), Candidate(-1.0, 13), None])
        return (lambda *_: next(told)) if rank == 0 else None

    for outputs in verified(folder, 2, [12, 13, 14], unharmed, choose=choices):
        assert [(o.token_id, o.finite, o.stopped) for o in outputs[:-1]] == [(12, True, False), (13, True, False)]
        assert outputs[-1].stopped, "nothing can be chosen behind the third token"


def test_logits_that_are_not_finite_end_it_where_they_are(tmp_path: Path) -> None:
    """Of a draft that was refused nobody hears."""
    spec = SPECS["delay_0"]
    folder = saved(spec, tmp_path)

    def breaks(token_id: int) -> Callable[..., None]:
        def damage(_: int, weights: object) -> None:
            weights.embedding[token_id] = math.nan  # type: ignore[attr-defined]

        return damage

    (outputs,) = verified(folder, 1, [], unharmed)
    first = outputs[0].token_id
    broken = (first + 1) % spec.vocab_size
    for found in verified(folder, 2, [first, 5], breaks(first)):
        assert [output.finite for output in found] == [True, False]
        assert found[0].token_id == first
    for found in verified(folder, 2, [broken, 5], breaks(broken)):
        assert [(output.token_id, output.finite) for output in found] == [(first, True)]


def test_drafts_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    engine = Interpreter(make_plan(LONG, 1), 0, open_checkpoint(saved(LONG, tmp_path)).rank_weights(range(8)), None)
    with pytest.raises(PlanError, match="token id 104 is outside"):
        engine.verify([1, LONG.vocab_size], 0, GREEDY)
    engine.read([1] * 90, 0)
    with pytest.raises(PlanError, match="position 96 exceeds the model's context of 96"):
        engine.verify([1] * 7, 90, GREEDY)
    with pytest.raises(PlanError, match="rank 0 cannot choose by itself"):
        engine.verify([1, 2], 90, GREEDY, choose=partial(Sampler(104, [1], GREEDY).choose))
    assert engine.num_positions == 90
