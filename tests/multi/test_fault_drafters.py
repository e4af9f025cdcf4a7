"""Whatever is drafted: an answer, its bits and its end are those without drafts. All kinds of sampling, ends and cancels."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.draft_lengths import SIZES
from kog_dist.decode.drafts import Draft, Drafter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.request import DecodeRequest
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import ControlPage, EpochWaits
from kog_dist.runtime.masks import num_words
from kog_dist.runtime.ring import NO_TOKEN, Drafted, Finish, TokenEntry
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.engines import cpu
from kog_dist.workers.engines.cpu import CpuEngine
from tests.multi.test_bits import Board, ThreadExchange

VOCAB: Final = TINY.vocab_size
PROMPT: Final = (5, 9, 200, 17, 5, 9, 200)
MOST: Final = 22
DRAWN: Final = SamplingParams(1.1, seed=4)
SAMPLINGS: Final = {
    "greedy": SamplingParams(),
    "drawn": DRAWN,
    "top k": replace(DRAWN, top_k=5),
    "top p": replace(DRAWN, top_p=0.5),
    "min p": replace(DRAWN, min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.9),
    "frequency": replace(DRAWN, frequency_penalty=1.4),
    "bias": replace(DRAWN, logit_bias=((5, 3.0), (9, -9.0))),
    "log-probabilities": SamplingParams(logprobs=3),
    "all": replace(
        DRAWN, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2, min_tokens=6
    ),
}


class FaultDrafter:
    """Drafts as `drafted` says, which is given what was said so far and how many tokens are wanted; of a random length."""

    def __init__(self, drafted: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._drafted, self._said, self._chance = drafted, list[int](), random.Random(3)

    def outlook(self, most: int, forced: Sequence[int] = ()) -> Sequence[float]:
        return [1.0] * max(most, 0)

    def draft(self, most: int, forced: Sequence[int] = ()) -> Draft:
        size = self._chance.choice([size for size in SIZES if size <= max(most, 0) + 1])
        found = self._drafted(self._said, size - 1)
        return Draft(found, is_predicted=self._chance.random() < 0.5)

    def took(self, token_ids: Sequence[int]) -> None:
        self._said += token_ids


def fault_drafters(answer: Sequence[int]) -> dict[str, Callable[[], Drafter]]:
    """By what they do. Each rank has its own."""

    def right(said: Sequence[int], num: int) -> list[int]:
        found = [*answer[len(said) : len(said) + num]]
        return found + [0] * (num - len(found))

    def wrong(said: Sequence[int], num: int) -> list[int]:
        return [(token + 1) % VOCAB for token in right(said, num)]

    def at_random(said: Sequence[int], num: int) -> list[int]:
        return random.Random(len(said)).choices(range(VOCAB), k=num)

    def mixed(said: Sequence[int], num: int) -> list[int]:
        chance = random.Random(len(said) + 70)
        return [token if chance.random() < 0.7 else chance.randrange(VOCAB) for token in right(said, num)]

    kinds = {"right": right, "wrong": wrong, "at random": at_random, "mixed": mixed}
    return {name: partial(FaultDrafter, drafted) for name, drafted in kinds.items()}


class _Comm:
    """What a CPU engine wants of a communicator besides what its interpreter does."""

    def __init__(self, exchange: ThreadExchange | None) -> None:
        self.waits, self._exchange = EpochWaits(), exchange

    def all_gather(self, mailbox: str, slot: int, epoch: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
        assert self._exchange is not None
        self._exchange.publish(mailbox, slot, epoch, values)
        return self._exchange.collect(mailbox, slot, epoch, values)


@dataclass
class Engines:
    """CPU engines of all ranks in threads of this process, which share a control page."""

    control: ControlPage
    ranks: list[CpuEngine]
    board: Board

    def run(self, request: DecodeRequest) -> list[TokenEntry]:
        """The entries of an answer; all ranks end alike."""
        seq = self.control.submit(request)

        def of_rank(rank: int) -> Finish:
            try:
                return self.ranks[rank].run(seq, self.control.read_request(seq))
            except BaseException:
                self.board.fail()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            ends = list(pool.map(of_rank, range(len(self.ranks))))
        entries: list[TokenEntry] = []
        while not entries or entries[-1].finish is Finish.NONE:
            entry = self.control.ring.get(seq, len(entries))
            assert entry is not None
            entries.append(entry)
        assert ends == [entries[-1].finish] * len(ends)
        for rank in range(len(self.ranks)):
            self.control.set_read(rank, seq)
        return entries

    def constrained(self, request: DecodeRequest, epoch: int) -> list[TokenEntry]:
        """The same with masks that depend on all that was said, as a grammar process writes them."""

        def mask_behind(said: Sequence[int]) -> NDArray[np.uint32]:
            allowed = np.random.default_rng(sum(said) + len(said)).random(32 * num_words(VOCAB)) < 0.5
            return np.packbits(allowed, bitorder="little").view(np.uint32)

        def follow(seq: int) -> None:
            said: list[int] = []
            while True:
                self.control.masks.put(epoch + len(said), mask_behind(said))
                entry = self.control.ring.wait(seq, len(said), Deadline.after(20.0), poll_s=0.001)
                if entry is None or entry.finish is not Finish.NONE:
                    return
                said.append(entry.token_id)

        runner = threading.Thread(target=follow, args=(self.control.doorbell() + 1,))
        runner.start()
        entries = self.run(replace(request, mask_epoch=epoch))
        runner.join(30.0)
        assert not runner.is_alive()
        return entries


def _engine(control: ControlPage, rank: int, interpreter: Interpreter, exchange: ThreadExchange | None) -> CpuEngine:
    engine = CpuEngine.__new__(CpuEngine)
    stub = cast(Any, engine)
    stub._control, stub._rank, stub._interpreter, stub._pass_tokens = control, rank, interpreter, 64
    stub._args = cast(Any, type("Args", (), {"step_timeout_s": 20.0}))
    stub._comm, stub._costs = _Comm(exchange), [1.0] * len(SIZES)
    stub._heartbeat = ExitStack()
    stub._heartbeat.progress = lambda: None
    return engine


@contextmanager
def engines(folder: Path, world_size: int) -> Any:
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size, num_tokens=SIZES[-1])
    control = ControlPage.create(world_size, checkpoint.spec.max_context, vocab_size=VOCAB)
    board, ranks = Board(world_size), []
    for rank in range(world_size):
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
        exchange = ThreadExchange(board, rank) if world_size > 1 else None
        ranks.append(_engine(control, rank, Interpreter(plan, rank, weights, exchange), exchange))
    yield Engines(control, ranks, board)
    control.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, replace(TINY, max_context=64))
    with engines(folder, request.param) as found:
        yield found


def without_moments(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
    return [replace(entry, seq=0, stamp_ns=0, drafted=Drafted()) for entry in entries]


def ids_of(entries: Sequence[TokenEntry]) -> list[int]:
    return [entry.token_id for entry in entries]


def check_all(
    started: Engines, monkeypatch: pytest.MonkeyPatch, run: Callable[[DecodeRequest], list[TokenEntry]], request: DecodeRequest,
    answer: Sequence[int],
) -> None:  # fmt: skip
    """That a request has the same answer with each drafter; `answer`: of which they know."""
    plain = without_moments(run(request))
    for name, drafter in fault_drafters(answer).items():
        monkeypatch.setattr(cpu, "LookupDrafter", lambda *_, drafter=drafter: drafter())
        found = run(replace(request, drafts=True))
        assert without_moments(found) == plain, name
        drafted, right = (sum(getattr(entry.drafted, of) for entry in found) for of in ("num_tokens", "num_right"))
        if len(plain) > 12:
            assert drafted > 10
            assert {"right": right > len(plain) // 2, "wrong": not right}.get(name, True), (name, right)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_kind_of_sampling(name: str, started: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    request = DecodeRequest(PROMPT, MOST, SAMPLINGS[name], logit_digests=True)
    check_all(started, monkeypatch, started.run, request, ids_of(started.run(request)))


@pytest.mark.parametrize("name", ["greedy", "drawn", "all"])
def test_every_end_within_what_was_accepted(name: str, started: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token, the limit, and the end of the context, wherever a pass has them."""
    request = DecodeRequest(PROMPT, MOST, SAMPLINGS[name])
    answer = ids_of(started.run(request))
    for at in (at for at in (0, 1, 4, 9) if at >= request.sampling.min_tokens):
        stopping = replace(request, stop_ids=(answer[at],))
        assert started.run(stopping)[-1].finish is Finish.STOP
        check_all(started, monkeypatch, started.run, stopping, answer)
        check_all(started, monkeypatch, started.run, replace(stopping, ignore_eos=True), answer)
    for most in (1, 2, 3, 8):
        check_all(started, monkeypatch, started.run, replace(request, max_tokens=most), answer)
    long = replace(request, max_tokens=1000)
    check_all(started, monkeypatch, started.run, long, ids_of(started.run(long)))


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_masks_that_depend_on_every_token(name: str, started: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    request, epochs = DecodeRequest(PROMPT, MOST, SAMPLINGS[name]), iter(range(1, 1_000_000, 100))

    def run(asked: DecodeRequest) -> list[TokenEntry]:
        return started.constrained(asked, next(epochs) + 100_000 * list(SAMPLINGS).index(name))

    answer = ids_of(run(request))
    for asked in (request, replace(request, stop_ids=(answer[9],)), replace(request, max_tokens=7)):
        check_all(started, monkeypatch, run, asked, answer)


@pytest.mark.parametrize("kind", ["right", "wrong", "at random", "mixed"])
def test_a_cancel_leaves_a_beginning_and_the_next_answer_whole(
    kind: str, started: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    request = DecodeRequest(PROMPT, MOST, DRAWN)
    plain = started.run(request)
    answer = ids_of(plain)
    drafter_of = fault_drafters(answer)[kind]
    control = started.control

    class Cancelling:
        """Has the client cancel behind the eighth token."""

        def __init__(self) -> None:
            self._drafter, self._num = drafter_of(), 0

        def outlook(self, most: int, forced: Sequence[int] = ()) -> Sequence[float]:
            return self._drafter.outlook(most, forced)

        def draft(self, most: int, forced: Sequence[int] = ()) -> Draft:
            return self._drafter.draft(most, forced)

        def took(self, token_ids: Sequence[int]) -> None:
            self._drafter.took(token_ids)
            self._num += len(token_ids)
            if self._num > 8:
                control.cancel(control.doorbell())

    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Cancelling())
    *said, last = started.run(replace(request, drafts=True))
    assert ids_of(said) == answer[: len(said)]
    assert (last.token_id, last.finish) == (NO_TOKEN, Finish.CANCELLED)
    assert 8 < len(said) < MOST
    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: drafter_of())
    assert without_moments(started.run(replace(request, drafts=True))) == without_moments(plain)
