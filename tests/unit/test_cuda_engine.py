"""The CUDA engine's part on the host, with a kernel that is played by Python."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import named_spec
from kog_dist.decode.pass_drafts import PassDrafts, in_units
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.decode.sampling import token_logprobs
from kog_dist.errors import AbortedError, LaunchError, PlanError, RequestFailed
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.ring import NO_TOKEN, NOT_DRAFTED, Drafted, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.draft_builds import NOWHERE, PASS_TOKENS, PassCosts, drafts_processors
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS, KernelShape
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines import launches
from kog_dist.workers.engines.choice_check import ChoiceCheck
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.cuda_device import device_index, translated_errors

MAX_CONTEXT, VOCAB, LAYERS = 400, 1000, 3


@dataclass(frozen=True)
class Entry:
    token_id: int
    finish: Finish
    drafted: Drafted = NOT_DRAFTED


class Event:
    done = True


class Stream:
    ptr = 0

    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


class Logits:
    """The logits of the newest token: as many as there are token ids, the best that of the token, then its neighbours."""

    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel

    def __len__(self) -> int:
        return VOCAB

    def get(self, stream: object = None) -> Any:
        return logits_of(self.kernel.entries[-1].token_id)


def logits_of(token_id: int) -> Any:
    return -np.abs(np.arange(VOCAB) - token_id - np.float32(0.1)).astype(np.float32)


def choices_at(position: int) -> Any:
    """(LAYERS, thread blocks): of two experts, 8 bits each, the same in all thread blocks."""
    words = [[(position + layer) % 7 | 9 << 8] for layer in range(LAYERS)]
    return np.repeat(np.array(words, np.uint64), 4, axis=1)


class ScriptedKernel:
    """Runs every launch at once; the token after position p is 100 + p, or comes again. Ends as the real one does."""

    def __init__(self) -> None:
        self.stream, self.logits = Stream(self), Logits(self)
        self.launches: list[int] = []
        self.entries: list[Entry] = []
        self.cancelled = self.aborted = self.closed = False
        self.processed: ProcessedRequest | None = None
        self.asked: set[int] = set()  # for log-probabilities
        self.recovered = 0
        self.begun: list[tuple[int, int]] = []  # length of the prompt, first position
        self.fault_at = self.silent_from = 10**9
        self.failure: Exception | None = None  # of a launch
        self.period = 10**9
        self.drafts: PassDrafts | None = None  # of the request
        self.passes: list[int] = []  # their tokens, of a request with drafts
        self.measured, self.costs = PassCosts(0.1, 0.05), PassCosts(100.0)  # of passes: as they are found, and as they are set

    def rouse(self) -> None:
        pass

    def use(self, slot: int) -> None:
        pass

    def most_together(self) -> int:
        return 1

    def launch_together(self, slots: Sequence[int], num_steps: int) -> None:
        raise AssertionError("nobody shares passes")

    def copy_beginning(self, source: int, cache: int, num_positions: int) -> None:
        pass

    def copy_state(self, source: int, cache: int) -> None:
        raise AssertionError("there is no state")

    def begin(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...] = (),
        *,
        first_position: int = 0,
        processed: ProcessedRequest | None = None,
        streams: Any = None,
        prediction: Sequence[int] | None = None,
        cache: int = 0,
    ) -> None:
        self.processed, self.streams, self.passes, self.drafts = processed, streams, [], None
        if prediction is not None:
            num_left = len(prompt) - first_position
            costs = {"extra": in_units(self.costs.extra), "edge": in_units(self.costs.edge)}
            self.drafts = PassDrafts(prompt, prediction, max_tokens, PASS_TOKENS, num_left=num_left, **costs)
        self.prompt, self.max_tokens, self.stop_ids, self.position = tuple(prompt), max_tokens, stop_ids, first_position
        self.begun.append((len(prompt), first_position))
        self.entries, self.launches, self.ended = [], [], False

    def launch(self, num_steps: int, *, stop_position: int = NOWHERE) -> None:
        self.launches.append(num_steps)
        if self.drafts is None:
            self.decode(num_steps)
            return
        for per_pass in (1, PASS_TOKENS):  # the builds take turns
            for _ in range(num_steps):
                if self.ended or self.drafts.per_pass != per_pass:
                    break
                self.verify(self.drafts)

    def verify(self, drafts: PassDrafts) -> None:
        """A pass."""
        self.passes.append(drafts.per_pass)
        if self.position + drafts.per_pass < len(self.prompt):  # it is within the prompt
            self.decode(drafts.per_pass)
            return
        self.decode(len(self.prompt) - 1 - self.position)
        first, draft = len(self.entries), drafts.draft if drafts.per_pass > 1 else []
        for token_id in [*draft, None]:
            self.decode(1)
            if len(self.entries) == first or self.ended or self.entries[-1].token_id != token_id:
                break
        if new := self.entries[first:]:
            drafted = Drafted(len(draft), len(new) - 1, drafts.is_predicted) if draft else NOT_DRAFTED
            self.entries[-1] = replace(self.entries[-1], drafted=drafted)
            drafts.took([entry.token_id for entry in new])

    def decode(self, num_tokens: int) -> None:
        """One after the other."""
        for _ in range(num_tokens):
            if self.ended:
                return
            self.position += 1
            if self.position < len(self.prompt):
                continue
            index, token_id = len(self.entries), 100 + (self.position - 1) % self.period
            if index >= self.silent_from:
                continue
            finish = Finish.NONE
            if self.cancelled:
                finish = Finish.CANCELLED
            elif self.position - 1 == self.fault_at:
                finish = Finish.NUMERICAL_FAULT
            elif token_id in self.stop_ids:
                finish = Finish.STOP
            elif index + 1 == self.max_tokens:
                finish = Finish.LENGTH
            has_token = finish not in (Finish.CANCELLED, Finish.NUMERICAL_FAULT)
            self.entries.append(Entry(token_id if has_token else NO_TOKEN, finish))
            self.ended = finish is not Finish.NONE

    def state(self) -> Any:
        return {"position": self.position}

    def choices(self, first: int, end: int) -> Any:
        return np.stack([choices_at(position) for position in range(first, end)])

    def token(self, index: int) -> Entry | None:
        return self.entries[index] if index < len(self.entries) else None

    def logprobs(self, index: int) -> TokenLogprobs | None:
        if (
            index not in self.asked or self.processed is None or self.processed.sampling.logprobs is None
        ):  # they come later than the token
            self.asked.add(index)
            return None
        token_id = self.entries[index].token_id
        return token_logprobs(logits_of(token_id), token_id, self.processed.sampling.logprobs)

    def close(self) -> None:
        self.closed = True

    def cancel(self) -> None:
        self.cancelled = True

    def leave_early(self) -> None:
        raise AssertionError("its requests take no turns")

    def try_together(self) -> None:
        raise AssertionError("its requests take no turns")

    def abort(self) -> None:
        self.aborted = True

    def is_idle(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return True

    def finish(self) -> None:
        pass

    def measure_drafts(self) -> PassCosts:
        return self.measured

    def set_draft_costs(self, costs: PassCosts) -> None:
        self.costs = costs

    def recover(self) -> None:
        self.recovered += 1


@pytest.fixture
def control() -> Any:
    page = ControlPage.create(1, MAX_CONTEXT)
    yield page
    page.close()


@pytest.fixture
def kernel() -> ScriptedKernel:
    return ScriptedKernel()


@pytest.fixture
def engine(control: ControlPage, kernel: ScriptedKernel) -> CudaEngine:
    info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
    engine = CudaEngine(WorkerArgs(info, "model", "cuda:0", "bfloat16", True, 10.0, 10.0), control)
    engine._gpu.loaded, engine._gpu.max_context = kernel, MAX_CONTEXT
    return engine


def request(num_prompt: int = 3, max_tokens: int = 200, **options: Any) -> DecodeRequest:
    return DecodeRequest(prompt=tuple(range(num_prompt)), max_tokens=max_tokens, **options)


def answer(control: ControlPage, seq: int = 1) -> list[Any]:
    entries: list[Any] = []
    while (entry := control.ring.get(seq, len(entries))) is not None:
        entries.append(entry)
        if entry.finish is not Finish.NONE:
            break
    return entries


def test_tokens_go_to_the_ring_in_chunks(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    assert engine.run(1, request(max_tokens=300)) is Finish.LENGTH
    entries = answer(control)
    assert [entry.token_id for entry in entries] == list(range(102, 402))
    assert [entry.finish for entry in entries] == [Finish.NONE] * 299 + [Finish.LENGTH]
    assert kernel.launches == [256, 46]  # two prompt steps and 300 tokens


def test_a_host_that_lags_behind_queues_launches(
    kernel: ScriptedKernel, engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds every token there; the kernel would run out of launches if it looked at them only when it waits."""
    monkeypatch.setattr(launches, "ANSWER_STEPS", 64)
    queued: dict[int, int] = {}  # launches, by the token that is asked for
    token = kernel.token

    def noted(index: int) -> Entry | None:
        queued.setdefault(index, len(kernel.launches))
        return token(index)

    monkeypatch.setattr(kernel, "token", noted)
    assert engine.run(1, request(num_prompt=1, max_tokens=200)) is Finish.LENGTH
    assert kernel.launches == [64, 64, 64, 8]
    assert (queued[0], queued[40]) == (2, 4)


def test_an_answer_ends_at_the_end_of_the_context(control: ControlPage, engine: CudaEngine) -> None:
    assert engine.run(1, request(num_prompt=MAX_CONTEXT - 5, max_tokens=300)) is Finish.LENGTH
    assert len(answer(control)) == 5


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 8), (True, 20)])
def test_stop_ids(control: ControlPage, engine: CudaEngine, ignore_eos: bool, length: int) -> None:
    finish = engine.run(1, request(max_tokens=20, stop_ids=(109,), ignore_eos=ignore_eos))
    assert finish is (Finish.LENGTH if ignore_eos else Finish.STOP)
    assert len(answer(control)) == length


def digest(token_id: int) -> bytes:
    return hashlib.sha256(logits_of(token_id).astype("<f4").tobytes()).digest()


def test_every_digest_is_of_its_own_token(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    engine.run(1, request(num_prompt=70, max_tokens=9, logit_digests=True))
    assert [entry.digest for entry in answer(control)] == [digest(169 + index) for index in range(9)]
    assert kernel.launches == [64, 5, *[1] * 9]


def test_cancel_ends_the_request(control: ControlPage, engine: CudaEngine, kernel: ScriptedKernel) -> None:
    kernel.silent_from = 0
    control.cancel(1)
    kernel_cancel = kernel.cancel

    def cancel() -> None:
        kernel_cancel()
        kernel.silent_from = 10**9

    kernel.cancel = cancel  # type: ignore[method-assign]
    assert engine.run(1, request(num_prompt=300)) is Finish.CANCELLED
    assert [entry.token_id for entry in answer(control)] == [NO_TOKEN]


def test_a_fault_is_no_token_and_the_kernel_forgets_its_state(
    control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine
) -> None:
    kernel.fault_at = 6
    assert engine.run(1, request()) is Finish.NUMERICAL_FAULT
    assert [entry.token_id for entry in answer(control)] == [102, 103, 104, 105, NO_TOKEN]
    assert kernel.recovered == 1
    assert control.progress(1) == 0


# ---- drafts ----
@pytest.fixture
def drafting(engine: CudaEngine, kernel: ScriptedKernel) -> CudaEngine:
    """The engine with drafts, and a kernel that repeats itself."""
    engine._gpu.args, kernel.period, kernel.costs = replace(engine._gpu.args, drafts=True), 9, kernel.measured
    return engine


ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 50},
    "in the middle of a pass": {"max_tokens": 51},
    "seeded": {"sampling": SamplingParams(temperature=0.7, seed=3)},
    "a stop": {"stop_ids": (105,)},
    "an ignored stop": {"stop_ids": (105,), "ignore_eos": True},
    "a long prompt": {"num_prompt": 210},
    "the end of the context": {"num_prompt": MAX_CONTEXT - 30, "max_tokens": 100},
    "a prediction": {"prediction": (104, 105, 106, 107, 108, 100)},
    "a wrong prediction": {"prediction": (7, 8, 9)},
    "a kept prefix": {"num_prompt": 60, "kv": KvUse(num_cached=59)},
}


@pytest.mark.parametrize("name", ENDS)
def test_answers_are_the_same_with_drafts(control: ControlPage, kernel: ScriptedKernel, drafting: CudaEngine, name: str) -> None:
    finish = drafting.run(1, request(**ENDS[name]))
    plain = answer(control, 1)
    assert drafting.run(2, request(**ENDS[name], drafts=True)) is finish
    drafted = answer(control, 2)
    assert [(entry.token_id, entry.finish) for entry in drafted] == [(entry.token_id, entry.finish) for entry in plain]
    assert all(entry.drafted == NOT_DRAFTED for entry in plain)
    assert control.progress(2) == kernel.position == len(request(**ENDS[name]).prompt) + len(plain) - 1
    assert [entry.drafted for entry in drafted] == [entry.drafted for entry in kernel.entries]
    if name != "a stop":  # it comes before anything is repeated
        assert PASS_TOKENS in kernel.passes
        assert sum(entry.drafted.num_right for entry in drafted) > len(drafted) // 3
        assert len(kernel.passes) < len(drafted) + len(request(**ENDS[name]).prompt)


def test_launches_go_on_while_passes_change(control: ControlPage, kernel: ScriptedKernel, drafting: CudaEngine) -> None:
    """Each gives a token at least, however often the builds take turns: here no draft is right, so that they do so."""
    kernel.period = 10**9
    drafting.run(1, request(num_prompt=1, max_tokens=300, drafts=True, prediction=(1, 2, 3)))
    assert len(answer(control)) == 300
    assert {1, PASS_TOKENS} == set(kernel.passes)
    assert len(kernel.launches) > 3
    assert kernel.launches[2:] == [256] * (len(kernel.launches) - 2)


def test_a_cancel_ends_a_request_with_drafts(control: ControlPage, kernel: ScriptedKernel, drafting: CudaEngine) -> None:
    kernel.cancelled = True
    assert drafting.run(1, request(drafts=True)) is Finish.CANCELLED
    assert [entry.token_id for entry in answer(control)] == [NO_TOKEN]


def test_a_kernel_with_drafts_that_gives_no_token_is_an_error(kernel: ScriptedKernel, drafting: CudaEngine) -> None:
    kernel.silent_from = 5
    with pytest.raises(RequestFailed, match="the kernel ended without token 5 of request 1"):
        drafting.run(1, request(max_tokens=20, drafts=True))


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(frequency_penalty=0.5)},
        {"sampling": SamplingParams(temperature=1.0, top_p=0.9)},
        {"sampling": SamplingParams(logprobs=2)},
        {"logit_digests": True},
    ],
)
def test_requests_that_passes_cannot_take_decode_without_drafts_and_the_log_says_so_once(
    kernel: ScriptedKernel, drafting: CudaEngine, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for seq in (1, 2):
        drafting.run(seq, request(max_tokens=5, drafts=True, **options))
        assert kernel.drafts is None
    assert capfd.readouterr().err.count("decode without drafts on GPUs") == 1


@pytest.mark.parametrize(
    "sampling", [SamplingParams(frequency_penalty=0.5), SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(logprobs=2)]
)
def test_requests_with_processors_have_drafts_on_one_rank(
    kernel: ScriptedKernel, drafting: CudaEngine, sampling: SamplingParams
) -> None:
    spec = named_spec("llama-3.2-1b@600")
    shapes = [KernelShape(spec, spec.lanes_of_rank(0, num), num_ranks=num) for num in (1, 2)]
    assert [drafts_processors(shape) for shape in shapes] == [True, False]
    drafting._drafting.with_processors = True
    drafting.run(1, request(max_tokens=5, drafts=True, sampling=sampling))
    assert kernel.drafts is not None
    assert kernel.processed is not None
    drafting.run(2, request(max_tokens=5, drafts=True, logit_digests=True, sampling=sampling))
    assert kernel.drafts is None


def test_a_request_without_drafts_has_none(kernel: ScriptedKernel, drafting: CudaEngine) -> None:
    drafting.run(1, request(max_tokens=5))
    assert kernel.drafts is None


def test_an_engine_without_drafts_has_none(kernel: ScriptedKernel, engine: CudaEngine) -> None:
    engine.run(1, request(max_tokens=5, drafts=True, prediction=(1, 2)))
    assert kernel.drafts is None


# ---- KV cache ----
def test_a_cached_prefix_is_not_decoded_again(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    engine.run(1, request(num_prompt=100, max_tokens=10))
    assert control.progress(1) == 109
    engine.run(2, request(num_prompt=150, max_tokens=10, kv=KvUse(num_cached=109)))
    assert kernel.begun == [(100, 0), (150, 109)]
    assert kernel.launches == [50]  # 40 of the prompt, and the answer
    assert (control.progress(2), kernel.position) == (159, 159)


def test_progress_of_the_prefill_is_written(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    seen: list[int | None] = []
    launch = kernel.launch

    def watched(num_steps: int, **options: Any) -> None:
        seen.append(control.progress(1))
        launch(num_steps, **options)

    kernel.launch = watched  # type: ignore[method-assign]
    engine.run(1, request(num_prompt=300, max_tokens=1, kv=KvUse(num_cached=20)))
    assert seen == [20, 20, 20, 20, 148]  # two launches are queued at a time; these end at once


def test_a_cancelled_request_says_how_far_it_came(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    kernel.cancelled = True
    assert engine.run(1, request(num_prompt=70)) is Finish.CANCELLED
    assert control.progress(1) == kernel.position == 70


# ---- choices of experts ----
@pytest.fixture
def checked(engine: CudaEngine) -> CudaEngine:
    engine._gpu.choices = ChoiceCheck(0, 2, lambda own: [own])
    return engine


@pytest.mark.parametrize("options", [{}, {"logit_digests": True}, {"sampling": SamplingParams(logprobs=1)}])
def test_launches_are_no_longer_than_choices_are_kept(
    control: ControlPage, kernel: ScriptedKernel, checked: CudaEngine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All positions are compared, each before another launch could overwrite its choices, and before its token is handed out."""
    compared: list[int] = []
    launched: list[int] = []
    choices, launch = kernel.choices, kernel.launch

    def noted(first: int, end: int) -> Any:
        assert end == kernel.position
        assert end - first <= CHOICE_POSITIONS
        assert len(answer(control)) == max(first - 19, 0)
        compared.extend(range(first, end))
        return choices(first, end)

    def after_all(num_steps: int) -> None:
        assert len(compared) == sum(launched), "the launch before has not been compared"
        launched.append(num_steps)
        launch(num_steps)

    monkeypatch.setattr(kernel, "choices", noted)
    monkeypatch.setattr(kernel, "launch", after_all)
    assert checked.run(1, request(num_prompt=20, max_tokens=6, **options)) is Finish.LENGTH
    assert [entry.token_id for entry in answer(control)] == list(range(119, 125))
    assert launched == [8, 8, 3, *[1] * 6]
    assert compared == list(range(25))


def test_only_what_is_decoded_is_compared(control: ControlPage, kernel: ScriptedKernel, checked: CudaEngine) -> None:
    checked.run(1, request(num_prompt=100, max_tokens=10))
    checked.run(2, request(num_prompt=150, max_tokens=10, kv=KvUse(num_cached=109)))
    assert kernel.launches == [8] * 5 + [1] * 10
    kernel.cancelled = True
    assert checked.run(3, request(num_prompt=20)) is Finish.CANCELLED


@pytest.mark.parametrize("position", [5, 21])
def test_a_wrong_choice_ends_a_request_without_its_token(
    control: ControlPage, kernel: ScriptedKernel, checked: CudaEngine, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = kernel.choices

    def wrong(first: int, end: int) -> Any:
        words = choices(first, end)
        if first <= position < end:
            words[position - first, 1, 2] = 0
        return words

    monkeypatch.setattr(kernel, "choices", wrong)
    with pytest.raises(PlanError, match=rf"^thread block 2 chose experts 0, 0 in layer 1 at position {position} on rank 0, "):
        checked.run(1, request(num_prompt=20))
    assert [entry.token_id for entry in answer(control)] == list(range(119, 100 + position))


def test_an_abort_ends_a_request_that_waits_to_compare(
    control: ControlPage, kernel: ScriptedKernel, checked: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_idle() -> bool:  # a launch that does not end
        control.set_abort(AbortCause.RANK_DIED, 0)
        return False

    monkeypatch.setattr(kernel, "is_idle", is_idle)
    with pytest.raises(AbortedError, match=r"^rank 0 left request 1 because"):
        checked.run(1, request())
    assert kernel.aborted
    assert answer(control) == []


# ---- requests with processors ----
def test_the_kernel_chooses_for_a_request_with_processors(
    control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine
) -> None:
    sampling = SamplingParams(temperature=1.0, logit_bias=((105, 50.0),), top_p=0.5, logprobs=0)
    assert engine.run(1, request(sampling=sampling)) is Finish.LENGTH
    assert kernel.processed == ProcessedRequest(sampling, 0)
    assert kernel.launches == [202]  # as many in a launch as for any other request
    assert [entry.token_id for entry in answer(control)] == list(range(102, 302))
    assert control.progress(1) == 202
    engine.run(2, request(sampling=SamplingParams(top_p=0.5)))
    assert kernel.processed is None, "greedy decoding needs no filters"


def test_digests_go_with_a_request_with_processors(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    engine.run(1, request(max_tokens=3, sampling=SamplingParams(logprobs=1), logit_digests=True))
    assert [entry.digest for entry in answer(control)] == [digest(102), digest(103), digest(104)]
    assert kernel.launches == [2, 1, 1, 1]


def test_a_kernel_that_ends_without_log_probabilities_is_an_error(
    kernel: ScriptedKernel, engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "logprobs", lambda index: None)
    with pytest.raises(RequestFailed, match="without logprobs of token 0 of request 1"):
        engine.run(1, request(sampling=SamplingParams(logprobs=0)))


def test_log_probabilities_are_those_of_the_logits(control: ControlPage, engine: CudaEngine) -> None:
    assert engine.run(1, request(max_tokens=3, sampling=SamplingParams(logprobs=2), stop_ids=(103,))) is Finish.STOP
    first, last = answer(control)
    assert (first.token_id, last.token_id) == (102, 103)
    assert first.logprobs == token_logprobs(logits_of(102), 102, 2)
    assert last.logprobs == token_logprobs(logits_of(103), 103, 2)


def test_a_cancel_ends_a_request_with_processors(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    kernel.cancelled = True
    assert engine.run(1, request(sampling=SamplingParams(logprobs=0))) is Finish.CANCELLED
    assert [entry.token_id for entry in answer(control)] == [NO_TOKEN]


def test_an_abort_publishes_nothing(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    control.set_abort(AbortCause.RANK_DIED, 0)
    with pytest.raises(AbortedError, match="rank 0 left request 1"):
        engine.run(1, request())
    assert kernel.aborted
    assert answer(control) == []


def test_a_kernel_that_ends_without_its_tokens_is_an_error(kernel: ScriptedKernel, engine: CudaEngine) -> None:
    kernel.silent_from = 5
    with pytest.raises(RequestFailed, match="the kernel ended without token 5 of request 1"):
        engine.run(1, request())


class CUDARuntimeError(Exception):
    __module__ = "cupy_backends.cuda.api.runtime"


def test_a_launch_that_failed_is_an_error_at_once(
    kernel: ScriptedKernel, engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events are never done, so that they alone would be waited for until the rank counts as hung."""
    monkeypatch.setattr(Event, "done", False)
    kernel.silent_from, kernel.failure = 5, CUDARuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(LaunchError, match="cuda:0 failed: CUDARuntimeError: cudaErrorIllegalAddress; start the engine again"):
        engine.run(1, request())


def test_errors_of_the_libraries_become_ours() -> None:
    for text, wanted in (
        ("driver version is insufficient", "no NVIDIA driver"),
        ("cudaErrorLaunchFailure", "start the engine again"),
    ):
        with pytest.raises(LaunchError, match=wanted), translated_errors("cuda:1"):
            raise CUDARuntimeError(text)
    with pytest.raises(ZeroDivisionError), translated_errors("cuda:1"):
        raise ZeroDivisionError


def test_the_gpu_is_roused_before_a_request_while_the_rank_beats(
    kernel: ScriptedKernel, engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    beating: list[bool] = []
    monkeypatch.setattr(kernel, "rouse", lambda: beating.append(engine._gpu.heartbeat._is_entered))
    engine.rouse()
    assert beating == [True], "the driver may take long, and the launcher must not take that for a hang"
    assert not engine._gpu.heartbeat._is_entered


def test_device_names() -> None:
    assert [device_index(name) for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
