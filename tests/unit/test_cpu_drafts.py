"""Requests of a CPU rank with drafts: what the ring gets is what it gets without, whoever drafts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.cpu.passes import most_tokens, most_verified
from kog_dist.decode.draft_lengths import SIZES
from kog_dist.decode.drafts import Draft
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.launch.inspection import dry_run
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import ControlPage, EpochWaits
from kog_dist.runtime.masks import num_words
from kog_dist.runtime.ring import NO_TOKEN, Drafted, Finish, TokenEntry
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.engines import cpu
from kog_dist.workers.engines.cpu import CpuEngine
from kog_dist.workers.engines.pass_costs import pass_costs
from tests.unit.delta_models import VOCAB, published

PROMPT = (5, 9, 200, 17, 5, 9, 200)
CONTEXT = 64


class Page:
    """An engine of one rank in this process, with a control page of its own."""

    def __init__(self, interpreter: Interpreter) -> None:
        spec = interpreter.plan.spec
        self.control = ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size)
        self.engine = CpuEngine.__new__(CpuEngine)
        stub = cast(Any, self.engine)
        stub._control, stub._rank, stub._interpreter, stub._pass_tokens = self.control, 0, interpreter, 64
        stub._args = cast(Any, type("Args", (), {"step_timeout_s": 5.0}))
        stub._comm = cast(Any, type("Comm", (), {"waits": EpochWaits()}))
        stub._heartbeat = cast(
            Any, type("Beat", (), {"progress": lambda: None, "__enter__": lambda _: None, "__exit__": lambda *_: None})()
        )
        stub._heartbeat.progress = lambda: None
        stub._costs = [1.0 + 0.05 * (size - 1) for size in SIZES]

    def run(self, request: DecodeRequest) -> tuple[list[TokenEntry], int]:
        """The entries of an answer, and how many positions the KV cache is said to hold."""
        seq = self.control.submit(request)
        finish = self.engine.run(seq, self.control.read_request(seq))
        entries: list[TokenEntry] = []
        while not entries or entries[-1].finish is Finish.NONE:
            entry = self.control.ring.get(seq, len(entries))
            assert entry is not None
            entries.append(entry)
        assert finish is entries[-1].finish
        self.control.set_read(0, seq)
        return entries, self.control.progress(seq) or 0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, replace(TINY, max_context=CONTEXT))
    yield from page_of(folder)


@pytest.fixture(scope="module")
def delta_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Of a model with delta nets."""
    folder = tmp_path_factory.mktemp("delta")
    published("qwen3_5", folder)
    yield from page_of(folder)


def page_of(folder: Path) -> Iterator[Page]:
    checkpoint = open_checkpoint(folder, context=CONTEXT)
    plan = make_plan(checkpoint.spec, 1, num_tokens=16)
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), keeps_halves=host_library.library() is not None)
    page = Page(Interpreter(plan, 0, weights, None, num_kv_caches=1))
    yield page
    page.control.close()


class Foretold:
    """Drafts of an answer that is known: right, or with mistakes at random places, in random lengths."""

    def __init__(self, answer: Sequence[int], share_of_mistakes: float, vocab_size: int = TINY.vocab_size) -> None:
        self.vocab_size = vocab_size
        self.answer, self.share, self.chance, self.said = answer, share_of_mistakes, random.Random(3), 0

    def outlook(self, most: int, forced: Sequence[int] = ()) -> Sequence[float]:
        return [1.0] * max(most, 0)

    def draft(self, most: int, forced: Sequence[int] = ()) -> Draft:
        size = self.chance.choice([size for size in SIZES if size <= most + 1]) if most > 0 else 1
        right = [*self.answer[self.said : self.said + size - 1]]
        right += [0] * (size - 1 - len(right))
        return Draft(
            [token if self.chance.random() >= self.share else (token + 1) % self.vocab_size for token in right], self.share < 1
        )

    def took(self, token_ids: Sequence[int]) -> None:
        self.said += len(token_ids)


REQUESTS = {
    "greedy": DecodeRequest(PROMPT, 30),
    "drawn": DecodeRequest(PROMPT, 30, SamplingParams(1.1, seed=4)),
    "all that is looked at": DecodeRequest(
        PROMPT, 25, SamplingParams(0.8, seed=9, top_k=50, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
        logit_digests=True,
    ),
    "log-probabilities": DecodeRequest(PROMPT, 20, SamplingParams(logprobs=0)),
    "one token": DecodeRequest(PROMPT, 1),
    "two tokens": DecodeRequest(PROMPT, 2),
    "to the end of the context": DecodeRequest(PROMPT, 1000),
}  # fmt: skip


def without_moments(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
    return [replace(entry, seq=0, stamp_ns=0, drafted=Drafted()) for entry in entries]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_ring_gets_the_same(name: str, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    request = REQUESTS[name]
    plain, held = page.run(request)
    assert not any(entry.drafted.num_tokens for entry in plain)
    answer = [entry.token_id for entry in plain]
    for share in (0.0, 0.3, 1.0):
        monkeypatch.setattr(cpu, "LookupDrafter", lambda *_, share=share: Foretold(answer, share))
        entries, positions = page.run(replace(request, drafts=True))
        assert (without_moments(entries), positions) == (without_moments(plain), held)
        counts = [entry.drafted for entry in entries if entry.drafted.num_tokens]
        right = sum(count.num_right for count in counts)
        assert len(answer) < 3 or counts
        assert share > 0 or all(count.num_right == count.num_tokens and count.is_predicted for count in counts)
        assert share < 1 or not right
    monkeypatch.undo()
    entries, positions = page.run(replace(request, drafts=True, prediction=answer))
    assert (without_moments(entries), positions) == (without_moments(plain), held)
    assert len(answer) < 3 or any(entry.drafted.is_predicted and entry.drafted.num_right for entry in entries)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_end_token_within_a_run_of_right_drafts_ends_it(share: float, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [entry.token_id for entry in page.run(DecodeRequest(PROMPT, 30, SamplingParams(1.1, seed=4)))[0]]
    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Foretold(answer, share))
    for end in range(1, 20):
        request = DecodeRequest(PROMPT, 30, SamplingParams(1.1, seed=4), stop_ids=(answer[end],))
        entries, positions = page.run(replace(request, drafts=True))
        num = answer.index(answer[end]) + 1
        assert [entry.token_id for entry in entries] == answer[:num]
        assert entries[-1].finish is Finish.STOP
        assert positions == len(PROMPT) - 1 + num, "what came behind the end is not kept"


def test_a_request_goes_on_behind_right_drafts_alone(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of refused drafts are never read: behind a kept answer the bits are those without any cache."""
    first = DecodeRequest(PROMPT, 12, SamplingParams(0.9, seed=2))
    answer = [entry.token_id for entry in page.run(first)[0]]
    prompt = (*PROMPT, *answer, 33)
    wanted = without_moments(page.run(DecodeRequest(prompt, 9, logit_digests=True))[0])
    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Foretold(answer, 0.4))
    _, held = page.run(replace(first, drafts=True))
    kept = DecodeRequest(prompt, 9, logit_digests=True, kv=KvUse(num_cached=held))
    assert without_moments(page.run(kept)[0]) == wanted


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_state_ends_where_the_answer_ends(share: float, delta_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that go beyond an end token leave a state behind the end, and the next turn goes on there, bit by bit."""
    prompt = tuple(token % VOCAB for token in PROMPT)
    first = DecodeRequest(prompt, 24, SamplingParams(1.1, seed=4), logit_digests=True)
    plain = delta_page.run(first)
    answer = [entry.token_id for entry in plain[0]]
    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Foretold(answer, share, VOCAB))
    for end in range(1, 24, 3):
        ended = replace(first, stop_ids=(answer[end],))
        num = answer.index(answer[end]) + 1
        entries, held = delta_page.run(replace(ended, drafts=True))
        assert without_moments(entries)[:-1] == without_moments(plain[0])[: num - 1]
        assert (entries[-1].token_id, entries[-1].finish, held) == (answer[num - 1], Finish.STOP, len(prompt) - 1 + num)
        prompt_of_next = (*prompt, *answer[:num], 33, 7)
        kept = DecodeRequest(prompt_of_next, 5, logit_digests=True, kv=KvUse(num_cached=held))
        found = delta_page.run(kept)
        assert without_moments(found[0]) == without_moments(delta_page.run(replace(kept, kv=KvUse()))[0])


def test_a_cancel_ends_it_with_the_pass(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [entry.token_id for entry in page.run(REQUESTS["greedy"])[0]]

    class Cancelling(Foretold):
        def took(self, token_ids: Sequence[int]) -> None:
            super().took(token_ids)
            if self.said > 8:
                page.control.cancel(page.control.doorbell())

    monkeypatch.setattr(cpu, "LookupDrafter", lambda *_: Cancelling(answer, 0.2))
    entries, _ = page.run(replace(REQUESTS["greedy"], drafts=True))
    assert [entry.token_id for entry in entries[:-1]] == answer[: len(entries) - 1]
    assert (entries[-1].token_id, entries[-1].finish) == (NO_TOKEN, Finish.CANCELLED)
    assert 8 < len(entries) - 1 < 30


def test_the_lookup_drafts_what_the_prompt_says(page: Page) -> None:
    """Beside a prediction that cannot come, and one that is the answer."""
    plain, _ = page.run(REQUESTS["greedy"])
    answer = [entry.token_id for entry in plain]
    quoting = DecodeRequest(
        (*answer[:20], *PROMPT), 20, drafts=True, prediction=tuple(random.Random(1).choices(range(200), k=30))
    )
    assert without_moments(page.run(quoting)[0]) == without_moments(page.run(replace(quoting, drafts=False))[0])


def test_masks_follow_the_drafts(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar process writes the mask of a token when the one in front of it is in the ring."""
    control, vocab = page.control, TINY.vocab_size

    def mask_behind(said: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
        allowed = np.random.default_rng(sum(said) + len(said)).random(32 * num_words(vocab)) < 0.5
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def follow(seq: int, epoch: int) -> None:
        said: list[int] = []
        control.masks.put(epoch, mask_behind(said))
        while (entry := control.ring.wait(seq, len(said), Deadline.after(20.0), poll_s=0.001)) is not None:
            if entry.finish is not Finish.NONE:
                return
            said.append(entry.token_id)
            control.masks.put(epoch + len(said), mask_behind(said))

    def answered(request: DecodeRequest, epoch: int) -> list[TokenEntry]:
        runner = threading.Thread(target=follow, args=(control.doorbell() + 1, epoch))
        runner.start()
        entries, _ = page.run(replace(request, mask_epoch=epoch))
        runner.join(30.0)
        assert not runner.is_alive()
        return entries

    for nth, request in enumerate((REQUESTS["drawn"], REQUESTS["all that is looked at"])):
        plain = answered(request, 1000 * nth + 1)
        assert len(plain) > 20
        answer = [entry.token_id for entry in plain]
        for of, share in enumerate((0.0, 0.3, 1.0), start=1):
            monkeypatch.setattr(cpu, "LookupDrafter", lambda *_, share=share, answer=answer: Foretold(answer, share))
            found = answered(replace(request, drafts=True), 1000 * nth + 100 * of + 1)
            assert without_moments(found) == without_moments(plain)
            assert share == 1.0 or sum(entry.drafted.num_right for entry in found) > 5
        for end in (3, 8, 14):  # an end token that is a right draft
            monkeypatch.setattr(cpu, "LookupDrafter", lambda *_, answer=answer: Foretold(answer, 0.0))
            found = answered(replace(request, drafts=True, stop_ids=(answer[end],)), 1000 * nth + 500 + 30 * end)
            assert [entry.token_id for entry in found] == answer[: answer.index(answer[end]) + 1]
            assert found[-1].finish is Finish.STOP


@pytest.mark.parametrize("name", ["greedy", "drawn", "all that is looked at"])
def test_forced_tokens_are_drafted(name: str, page: Page) -> None:
    """Told as a grammar process tells them: at once, too late, not at all, and once wrong, which nobody believes again."""
    control, request = page.control, REQUESTS[name]
    everything = np.full(num_words(TINY.vocab_size), 0xFFFFFFFF, np.uint32)
    plain, _ = page.run(request)
    answer = [entry.token_id for entry in plain]
    epochs = iter(range(10_000, 20_000, 100))

    def answered(forced: Callable[[int], Sequence[int] | None]) -> list[TokenEntry]:
        epoch = next(epochs)

        def follow(seq: int) -> None:
            for index in range(len(answer)):
                if (told := forced(index)) is not None:
                    control.forced.put(epoch + index, told)
                control.masks.put(epoch + index, everything)
                entry = control.ring.wait(seq, index, Deadline.after(20.0), poll_s=0.001)
                if entry is None or entry.finish is not Finish.NONE:
                    return

        runner = threading.Thread(target=follow, args=(control.doorbell() + 1,))
        runner.start()
        entries, _ = page.run(replace(request, mask_epoch=epoch, drafts=True))
        runner.join(30.0)
        assert not runner.is_alive()
        assert without_moments(entries) == without_moments(plain)
        return entries

    def num_right(entries: Sequence[TokenEntry]) -> int:
        return sum(entry.drafted.num_right for entry in entries)

    assert num_right(answered(lambda index: answer[index : index + 40])) > 15
    assert num_right(answered(lambda index: answer[index : index + 2] if index % 3 else None)) > 3
    assert num_right(answered(lambda index: [])) == num_right(answered(lambda index: None))
    answered(lambda index: [answer[index], 0, 0])


class Alone:
    """A rendezvous of one rank."""

    def all_gather_bytes(self, payload: bytes, _: object) -> list[bytes]:
        return [payload]


@pytest.mark.parametrize("trial_s", [0.001, 0.1, 1.0])
def test_costs_are_measured_at_the_start(trial_s: float, page: Page) -> None:
    interpreter = cast(Any, page.engine)._interpreter
    costs = pass_costs(interpreter, trial_s, cast(Any, Alone()), cast(Any, None))
    assert len(costs) == len(SIZES)
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    one = replace(interpreter.plan, num_tokens=1)
    alone = cast(Any, type("Alone", (), {"plan": one}))  # has nothing to time
    assert pass_costs(alone, trial_s, cast(Any, Alone()), cast(Any, None)) == list(SIZES)
    assert most_verified(one) == SIZES[-1]
    assert most_tokens(one) == 64


def test_a_dry_run_says_whether_tokens_are_drafted() -> None:
    def told(speculate: str) -> str:
        text = dry_run(LaunchConfig(device="cpu", ranks=1, speculate=speculate))
        (line,) = (line for line in text.splitlines() if line.startswith("drafts "))
        return line.removeprefix("drafts").strip()

    assert told("auto") == "speculate auto: lookup, up to 15 in a pass"
    assert told("off") == "speculate off; a request may ask for them"
