"""Requests that CPU engines run together have the answers that they have alone, whoever comes, goes and is cancelled then."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.draft_lengths import SIZES
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import AbortedError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import ControlPage, KvLayout, RankState
from kog_dist.runtime.ring import NO_TOKEN, Finish, TokenEntry
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.coordinator import kept_caches, kept_states
from kog_dist.workers.coordinator.decode_slot import DecodeSlots
from kog_dist.workers.engines import cpu_blocks
from kog_dist.workers.engines.cpu import CpuEngine
from kog_dist.workers.engines.cpu_blocks import CpuBlocks
from kog_dist.workers.worker import serve
from tests.multi.test_bits import Board, ThreadExchange
from tests.multi.test_company import left_in
from tests.multi.test_fault_drafters import _Comm
from tests.unit.asked_together import PATIENCE_S, Asked, AskedTogether
from tests.unit.delta_models import published

CONTEXT, PARALLEL, CACHES = 128, 4, 5
NUM_BLOCKS, BLOCK_TOKENS, NUM_STATES, STEP = 30, 8, 7, 8  # room for less than is made
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(1.1, seed=4),
    SamplingParams(0.8, seed=9, top_k=50, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
    SamplingParams(logprobs=0),
)


class Together(AskedTogether):
    """Ranks in threads, and what a coordinator does with them."""

    has_hints = False  # so that what is looked up is right at times

    def __init__(self, folder: Path, world_size: int, parallel: int) -> None:
        checkpoint = open_checkpoint(folder, context=CONTEXT)
        plan = make_plan(checkpoint.spec, world_size, num_tokens=SIZES[-1])
        vocab = checkpoint.spec.vocab_size
        control = ControlPage.create(world_size, CONTEXT, vocab_size=vocab, parallel=parallel)
        super().__init__(control, DecodeSlots(control, None, is_recurrent=checkpoint.spec.is_recurrent), vocab)
        board, self.threads, self.engines = Board(world_size), list[threading.Thread](), list[Any]()
        for rank in range(world_size):
            weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
            exchange = ThreadExchange(board, rank) if world_size > 1 else None
            engine = CpuEngine.__new__(CpuEngine)
            stub = cast(Any, engine)
            stub._control, stub._rank, stub._pass_tokens = self.control, rank, 16
            stub._interpreter = Interpreter(plan, rank, weights, exchange, num_kv_caches=CACHES, is_checked=True)
            stub._args = cast(Any, type("Args", (), {"step_timeout_s": PATIENCE_S}))
            stub._comm, stub._costs = _Comm(exchange), [1.0 + 0.05 * (size - 1) for size in SIZES]
            stub._heartbeat = ExitStack()
            stub._heartbeat.progress = lambda: None
            stub._blocks = CpuBlocks(stub._interpreter.memory, NUM_BLOCKS, NUM_STATES)
            self.control.set_kv_layout(rank, KvLayout(CACHES, 0, stub._blocks._blocks.shape[-2], NUM_BLOCKS, 0, NUM_STATES))
            self.engines.append(engine)
            self.threads.append(threading.Thread(target=self._serve, args=(engine, rank, board)))
            self.threads[-1].start()

    def _serve(self, engine: CpuEngine, rank: int, board: Board) -> None:
        try:
            serve(engine, self.control, rank)
        except AbortedError:
            pass
        except BaseException as error:
            self.error.append(error)
            self.is_broken.set()
            raise
        finally:
            board.fail()

    def left(self) -> dict[tuple[str, bytes], list[bytes]]:
        """Behind one more request, before whose end all ranks have done what they were told: keys, values and states of caches,
        and copies of states, on all ranks, by their kind and tokens.
        """
        self.run([Asked(DecodeRequest((1,), 1), has_grammar=False)], random.Random(0))
        books, found = self.slots._caches, dict[tuple[str, bytes], list[bytes]]()
        assert books is not None
        for cache, kept in enumerate(books._kept):
            if len(kept.tokens) > 1:
                parts = [left_in(engine._interpreter, cache, len(kept.tokens)) for engine in self.engines]
                found["cache", kept.tokens.tobytes()] = [part for of_rank in parts for part in of_rank]
        for slot, copy in enumerate(books.states._copies):
            if copy.position > 1:
                layers = [layer for engine in self.engines for layer in engine._blocks._states]
                found["copy", copy.digest] = [part[slot].tobytes() for layer in layers for part in layer]
        return found

    def close(self) -> None:
        self.stop(self.threads)
        self.control.close()


@contextmanager
def together(folder: Path, world_size: int, parallel: int) -> Iterator[Together]:
    ranks = Together(folder, world_size, parallel)
    try:
        yield ranks
    finally:
        ranks.close()


def drawn(chance: random.Random, vocab: int, num: int) -> list[Asked]:
    """Mixed requests, of which some begin alike."""
    stems = [[chance.randrange(vocab) for _ in range(chance.randint(1, 50))] for _ in range(3)]
    asked = []
    for _ in range(num):
        prompt = (*chance.choice(stems), *(chance.randrange(vocab) for _ in range(chance.randint(1, 12))))
        sampling = chance.choice(SAMPLINGS)
        has_grammar = chance.random() < 0.3
        request = DecodeRequest(
            prompt, chance.randint(1, 40), sampling, tuple(range(chance.choice((0, 0, 6)))), logit_digests=True,
            drafts=chance.random() < 0.5, prediction=tuple(chance.randrange(vocab) for _ in range(10)),
        )  # fmt: skip
        asked.append(Asked(request, has_grammar, chance.choice((None, None, None, 3))))
    for last in asked[-CACHES:]:
        last.cancel_at = None  # what they leave is compared
    return asked


@pytest.fixture(params=["tiny", "delta nets"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_states, "STEP", STEP)
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    monkeypatch.setattr(cpu_blocks, "BLOCK_TOKENS", BLOCK_TOKENS)
    if request.param == "tiny":
        write_tiny_model(tmp_path, replace(TINY, max_context=CONTEXT))
    else:
        published("qwen3_5", tmp_path)
    return tmp_path


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_answer_is_that_of_the_request_alone(world_size: int, folder: Path) -> None:
    chance = random.Random(world_size)
    with together(folder, world_size, PARALLEL) as ranks:
        asked = drawn(chance, ranks.vocab, 24)
        ranks.run(asked, chance)
        left = ranks.left()
    left_alone = dict[tuple[str, bytes], list[bytes]]()
    with together(folder, world_size, 1) as ranks:
        for one in asked:
            alone = Asked(one.request, one.has_grammar)
            ranks.run([alone], chance)
            left_alone |= ranks.left()
            if one.entries[-1].finish is Finish.CANCELLED:
                assert one.entries[-1].token_id == NO_TOKEN
                assert one.answer()[:-1] == alone.answer()[: len(one.entries) - 1]
            else:
                assert one.answer() == alone.answer()
    common = left.keys() & left_alone.keys()
    assert {kind for kind, _ in common} == {kind for kind, _ in left}, "of each kind some"
    assert {key: left[key] for key in common} == {key: left_alone[key] for key in common}
    finishes = {one.entries[-1].finish for one in asked}
    assert finishes >= {Finish.LENGTH, Finish.CANCELLED}
    assert any(entry.drafted.num_right for one in asked for entry in one.entries), "drafts were right in company"


def test_a_newcomer_goes_on_behind_what_a_running_request_has(folder: Path) -> None:
    with together(folder, 1, 2) as ranks:
        first, second = ranks.slots.slots
        prompt = tuple(range(5, 65))
        ranks.slots.submit(first, DecodeRequest(prompt, 60), reuse_kv=True)
        deadline = Deadline.after(PATIENCE_S)
        while not first.read():
            assert not deadline.expired()
            ranks.slots.wait(0.01, lambda: False)
        use = ranks.slots.submit(second, DecodeRequest((*prompt, 7), 5, logit_digests=True), reuse_kv=True).kv
        has_states = ranks.slots.kept_states.num_slots > 0
        assert use.num_cached == len(prompt) - has_states, "a copy behind the end of the first one's prompt"
        assert use.source == first.cache != use.cache
        found: list[TokenEntry] = []
        while second.busy or first.busy:
            assert not deadline.expired()
            ranks.slots.wait(0.01, lambda: False)
            found += second.read()
            first.read()
        alone = Asked(DecodeRequest((*prompt, 7), 5, logit_digests=True), has_grammar=False)
        ranks.run([alone], random.Random(1))
        assert [(entry.token_id, entry.digest) for entry in found] == [(entry.token_id, entry.digest) for entry in alone.entries]
        assert all(ranks.control.state(rank) in (RankState.READY, RankState.RUNNING) for rank in range(1))
