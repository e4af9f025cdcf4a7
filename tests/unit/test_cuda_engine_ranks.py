"""The CUDA engine on several ranks, a thread each: scripted kernels that keep step, and a played cupy between hosts."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.cuda import CudaCommunicator
from kog_dist.collectives.mailbox import place
from kog_dist.decode.plan.validate import check
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.sampling import token_logprobs
from kog_dist.errors import AbortedError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.control import AbortCause, ControlPage, RankState
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda import build, load, monokernel
from kog_dist.workers.cuda.draft_builds import NOWHERE, PASS_TOKENS, PassCosts
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines import cuda, cuda_peers, cuda_programs
from kog_dist.workers.engines.cuda import CudaEngine
from tests.patience import in_time
from tests.unit import fake_cupy
from tests.unit.fake_cupy import FakeRuntime
from tests.unit.prefill.test_engine_with_prefill import ScriptedPrefill
from tests.unit.test_cuda_engine import LAYERS, ScriptedKernel, answer, choices_at

MAX_CONTEXT, STEP_TIMEOUT_S, JOIN_S = 2048, 5.0, 30.0
WITH_EXPERTS = ModelSpec(
    hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=48, vocab_size=400, max_context=256,
    num_lanes=4, delay=0, experts=ExpertsSpec(10, 2),
)  # fmt: skip
ONE_STREAM = replace(WITH_EXPERTS, experts=None)
DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"


class RankKernel(ScriptedKernel):
    """One rank's kernel. A step is run when all ranks have launched it; launches behind the end of an answer need no peer.

    Of a request with drafts a launch is of both builds, of which the one whose turn it is not ends at once. Each rank finds that
    passes cost something else.
    """

    def __init__(self, shape: Any, all_ranks: Ranks) -> None:
        super().__init__()
        self.shape, self.all_ranks = shape, all_ranks
        self.num_begun = self.pending = self.num_run = 0
        self.chunks: list[int] = []
        self.turns = deque[list[int]]()  # of launches with drafts: tokens of a pass of the build, and passes left
        self.measured = PassCosts(0.05 + 0.3 * shape.hosted_lanes[0], 0.05)
        self.ended = True
        self.has_invalid_streams = False  # as prefill leaves them when it gives up: launches behind it do nothing
        first, last = shape.head.vocab_rows
        self.logits: Any = _Slice(self, first, last)
        self.stream: Any = SimpleNamespace(record=self._record, synchronize=lambda: None)

    def _record(self) -> Any:
        return _Event(self, self.num_run + self.pending)

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
        assert self.is_idle(), "a launch is under way"
        with self.all_ranks.lock:
            super().begin(
                prompt, max_tokens, sampling, stop_ids, first_position=first_position, processed=processed, streams=streams,
                prediction=prediction,
            )  # fmt: skip
            self.cancelled, self.chunks = False, []
            self.ended = streams is not None and self.has_invalid_streams
            self.all_ranks.happened.append("begin")
            self.num_begun += 1

    def launch(self, num_steps: int, *, stop_position: int = NOWHERE) -> None:
        with self.all_ranks.lock:
            self.chunks.append(num_steps)
            self.all_ranks.happened.append("launch")
            builds = (1,) if self.drafts is None else (1, PASS_TOKENS)
            self.pending += num_steps * len(builds)
            self.turns += [[per_pass, num_steps] for per_pass in builds if self.drafts is not None]
            self.all_ranks.advance()

    def logprobs(self, index: int) -> TokenLogprobs | None:
        assert self.processed is not None
        assert self.processed.sampling.logprobs is not None
        token_id = self.entries[index].token_id
        return token_logprobs(logits_of(self.shape.spec.vocab_size, token_id), token_id, self.processed.sampling.logprobs)

    def step(self) -> None:
        if self.drafts is None:
            self.decode(1)
        elif not self.ended:
            self.turns[0][1] -= 1
            self.verify(self.drafts)
        self.pending, self.num_run = self.pending - 1, self.num_run + 1

    def end_launches(self) -> None:
        """Leave the launches of which no pass is to run any more, by what this rank knows."""
        while self.turns and (
            self.ended or not self.turns[0][1] or self.drafts is None or self.drafts.per_pass != self.turns[0][0]
        ):
            left = self.turns.popleft()[1]
            self.pending, self.num_run = self.pending - left, self.num_run + left

    def is_idle(self) -> bool:
        return self.pending == 0

    def abort(self) -> None:
        with self.all_ranks.lock:
            self.aborted, self.pending = True, 0


class _Event:
    def __init__(self, kernel: RankKernel, num_steps: int) -> None:
        self._kernel, self._num_steps = kernel, num_steps

    @property
    def done(self) -> bool:
        return self._kernel.num_run >= self._num_steps


class _Slice:
    def __init__(self, kernel: RankKernel, first: int, last: int) -> None:
        self._kernel, self._rows = kernel, slice(first, last)

    def __len__(self) -> int:
        return self._rows.stop - self._rows.start

    def get(self, *, stream: Any) -> Any:
        assert self._kernel.is_idle(), "the logits may still change"
        return logits_of(self._kernel.shape.spec.vocab_size, self._kernel.entries[-1].token_id)[self._rows].copy()


def logits_of(vocab_size: int, token_id: int) -> Any:
    return -np.abs(np.arange(vocab_size) - token_id - np.float32(0.1)).astype(np.float32)


class Ranks:
    """Engines, kernels and the shared pages of all ranks, and what happened at their start."""

    def __init__(self, world_size: int, model: Path = DEMO, max_context: int = MAX_CONTEXT, **options: Any) -> None:
        """`options`: of WorkerArgs."""
        self.world_size, self.lock, self.model, self.options = world_size, threading.RLock(), model, options
        self.page = ControlPage.create(world_size, max_context)
        self.meeting: Segment = LocalRendezvous.create(world_size)
        self.kernels: dict[int, RankKernel] = {}
        self.happened: list[str] = []
        self.engines = [self._engine(rank) for rank in range(world_size)]

    def _engine(self, rank: int) -> CudaEngine:
        info = RankInfo(rank, self.world_size, rank, "test", control_fd=self.page.fd, rendezvous_fd=os.dup(self.meeting.fd))
        times = (JOIN_S, STEP_TIMEOUT_S)
        args = WorkerArgs(info, str(self.model), f"cuda:{rank}", "bfloat16", False, *times, **self.options)
        return CudaEngine(args, ControlPage.from_fd(os.dup(self.page.fd)))

    def advance(self) -> None:
        """Run the steps that all ranks have launched. Called with the lock."""
        kernels = [self.kernels[rank] for rank in sorted(self.kernels)]
        while len(kernels) == self.world_size and len({k.num_begun for k in kernels}) == 1:
            for kernel in kernels:
                kernel.end_launches()
            if not all(k.pending and not k.aborted for k in kernels):
                break
            assert len({k.turns[0][0] if k.turns else 0 for k in kernels}) == 1, "ranks run other builds than their peers"
            for kernel in kernels:
                kernel.cancelled = kernels[0].cancelled
                kernel.step()
        for kernel in kernels:
            while kernel.ended and kernel.pending:
                kernel.step()

    def on_all(self, body: Callable[[CudaEngine], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Call `body` with each rank's engine at the same time: results, or what was raised. A rank that fails aborts all."""
        ranks = range(self.world_size) if ranks is None else ranks
        results: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = body(self.engines[rank])
            except Exception as error:
                if not isinstance(error, AbortedError):
                    self.happened.append(f"{rank}: {traceback.format_exc()}")
                results[rank] = error
                self.page.set_abort(AbortCause.RANK_DIED, rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), f"a rank hangs; {self.happened}"
        return [results[rank] for rank in ranks]

    def start(self) -> None:
        assert self.on_all(lambda engine: engine.startup()) == [None] * self.world_size, self.happened

    def answer(self, seq: int, request: DecodeRequest) -> list[Any]:
        """The entries of a request that all ranks ended alike."""
        finishes = self.on_all(lambda engine: engine.run(seq, request))
        entries = answer(self.page, seq)
        assert finishes == [entries[-1].finish] * self.world_size, (finishes, self.happened)
        positions = {kernel.position for kernel in self.kernels.values()}
        assert len(positions) == 1, "the kernels stand at different tokens"
        return entries

    def close(self) -> None:
        self.on_all(lambda engine: engine.close())
        for engine in self.engines:
            engine._gpu.control.close()
        self.meeting.close()
        self.page.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return fake_cupy.install(monkeypatch)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(request.param)
    play_kernels(made, runtime, monkeypatch)
    yield made
    made.close()


@pytest.fixture(params=[2, 4])
def checked(
    request: pytest.FixtureRequest, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Ranks]:
    """Ranks with a model with experts, two of ten for each token, that compare which ones they choose."""
    write_checkpoint(tmp_path, WITH_EXPERTS, random_tensors(WITH_EXPERTS, seed=11))
    made = Ranks(request.param, tmp_path, WITH_EXPERTS.max_context, check_experts=True)
    play_kernels(made, runtime, monkeypatch)
    yield made
    made.close()


def play_kernels(made: Ranks, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what compiles, loads and runs."""

    def monokernel_of(
        shape: Any, weights: Any, *, rank: int, wait_limit_us: int, heap: Any, processors: bool, masks: Any, drafts: bool,
        forced: Any, num_slots: int, num_caches: int, company: Any,
    ) -> RankKernel:  # fmt: skip
        assert heap.rank == rank
        assert drafts == made.options.get("drafts", False)
        assert processors
        assert forced is None, "of several ranks nobody drafts for processors"
        names = [mailbox.spec.name for mailbox in heap_boxes[rank]]
        assert ("pass_candidates" in names) is drafts
        assert (num_slots, num_caches, tuple(company)) == (1, 1, ())
        assert [of_slot.vocab_size for of_slot in masks] == [made.page.masks.vocab_size]
        assert len(runtime.memory) == made.world_size
        made.happened.append("kernel")
        made.kernels[rank] = RankKernel(shape, made)
        return made.kernels[rank]

    heap_boxes, create = dict[int, Any](), CudaCommunicator.create

    def created(boxes: Any, **options: Any) -> Any:
        heap_boxes[options["rendezvous"].rank] = place(boxes, made.world_size)
        return create(boxes, **options)

    monkeypatch.setattr(CudaCommunicator, "create", created)
    one_at_a_time = threading.Lock()  # what a process has alone, threads share

    def checked(plan: Any) -> None:
        with one_at_a_time:
            check(plan)

    monkeypatch.setattr(cuda, "check", checked)
    monkeypatch.setattr(build, "build", lambda headers, source: made.happened.append("build"))
    monkeypatch.setattr(cuda_programs, "prebuild", lambda programs: made.happened.append(f"{len(list(programs))} ahead"))
    monkeypatch.setattr(load, "load_weights", lambda shape, checkpoint, on_share: made.happened.append("weights"))
    monkeypatch.setattr(monokernel, "Monokernel", monokernel_of)


def request(num_prompt: int = 3, max_tokens: int = 200, **options: Any) -> DecodeRequest:
    return DecodeRequest(prompt=tuple(range(num_prompt)), max_tokens=max_tokens, **options)


# ---- startup ----
def test_ranks_start_together_and_give_everything_back(ranks: Ranks, runtime: FakeRuntime) -> None:
    ranks.start()
    count = ranks.world_size
    compiled = [f"{2 * count} ahead", *["build"] * 2 * count]
    assert ranks.happened[: len(compiled)] == compiled, "rank 0 compiles all before anyone loads"
    assert ranks.happened.count("kernel") == ranks.happened.count("weights") == count
    assert ranks.happened[-count:] == ["launch"] * count, "nobody's kernel waits for a rank that still loads"
    assert ranks.page.kv_layout().num_caches == 1
    assert {ranks.page.state(rank) for rank in range(count)} == {RankState.LINKING}
    assert [len(kernel.entries) for kernel in ranks.kernels.values()] == [1] * count
    ranks.on_all(lambda engine: engine.close())
    assert runtime.memory == {}


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_gpus_of_two_kinds_are_refused(ranks: Ranks, runtime: FakeRuntime) -> None:
    runtime.gpu_names[1] = b"OTHER GPU"
    for error in ranks.on_all(lambda engine: engine.startup()):
        assert isinstance(error, AbortedError) or str(error).startswith("the ranks do not agree on the kind of GPU: 1 differs")
    assert ranks.kernels == {}


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_kernels_from_other_sources_are_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(f"decode-{number}.cubin" for number in range(8))
    monkeypatch.setattr(build, "cubin_name", lambda headers, source: next(names))
    errors = ranks.on_all(lambda engine: engine.startup())
    assert any("the ranks do not agree on the kernel" in str(error) for error in errors)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_whose_trial_tokens_differ_do_not_serve(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = cuda_peers.CudaPeers.compare_trials
    monkeypatch.setattr(cuda_peers.CudaPeers, "compare_trials", lambda peers, token: compare(peers, token + peers._rank))
    errors = ranks.on_all(lambda engine: engine.startup())
    assert any("different tokens on trial (100, 101, in the order of ranks)" in str(error) for error in errors), errors


# ---- requests ----
def test_rank_0_hands_out_what_all_decode(ranks: Ranks) -> None:
    ranks.start()
    entries = ranks.answer(1, request(stop_ids=(250,)))
    assert [entry.token_id for entry in entries] == list(range(102, 251))
    assert entries[-1].finish is Finish.STOP
    assert ranks.page.progress(1) == 151
    assert len(ranks.answer(2, request(num_prompt=300, max_tokens=20))) == 20
    assert {tuple(kernel.chunks) for kernel in ranks.kernels.values()} == {(64, 64, 64, 64, 63)}


def test_digests_are_of_all_logits(ranks: Ranks) -> None:
    ranks.start()
    entries = ranks.answer(1, request(max_tokens=4, logit_digests=True))
    vocab_size = ranks.kernels[0].shape.spec.vocab_size
    whole = [logits_of(vocab_size, 102 + index).astype("<f4").tobytes() for index in range(4)]
    assert [entry.digest for entry in entries] == [hashlib.sha256(raw).digest() for raw in whole]


def test_a_cancel_that_only_rank_0_heeds_ends_the_answer_on_all(ranks: Ranks) -> None:
    ranks.start()
    cancelled: list[int] = []
    for rank, kernel in ranks.kernels.items():
        kernel.silent_from = 10  # no answer can end by itself

        def cancel(kernel: RankKernel = kernel, rank: int = rank) -> None:
            cancelled.append(rank)
            with ranks.lock:
                kernel.cancelled = True
                for each in ranks.kernels.values():
                    each.silent_from = 10**9
                ranks.advance()

        kernel.cancel = cancel  # type: ignore[method-assign]
    ranks.page.cancel(1)
    entries = ranks.answer(1, request(max_tokens=1000))
    assert cancelled == [0]
    assert (entries[-1].token_id, entries[-1].finish) == (NO_TOKEN, Finish.CANCELLED)
    for kernel in ranks.kernels.values():
        kernel.silent_from = 10**9
    assert len(ranks.answer(2, request(max_tokens=5))) == 5


def test_all_kernels_choose_alike_and_rank_0_reports(ranks: Ranks) -> None:
    ranks.start()
    processed = request(max_tokens=6, sampling=SamplingParams(logit_bias=((105, 50.0),), logprobs=2))
    entries = ranks.answer(1, processed)
    vocab_size = ranks.kernels[0].shape.spec.vocab_size
    assert [entry.token_id for entry in entries] == list(range(102, 108))
    assert {kernel.processed for kernel in ranks.kernels.values()} == {ProcessedRequest(processed.sampling)}
    assert [entry.logprobs for entry in entries] == [token_logprobs(logits_of(vocab_size, i), i, 2) for i in range(102, 108)]
    assert len(ranks.answer(2, request(max_tokens=5))) == 5
    assert {kernel.processed for kernel in ranks.kernels.values()} == {None}


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_cancel_before_the_first_mask_ends_the_answer_on_all(ranks: Ranks) -> None:
    ranks.start()
    ranks.page.cancel(1)  # hosts wait no longer for a mask that never comes; rank 0's kernel tells the others
    for kernel in ranks.kernels.values():
        kernel.silent_from = 0
    cancel = ranks.kernels[0].cancel

    def cancel_all() -> None:
        with ranks.lock:
            cancel()
            for each in ranks.kernels.values():
                each.silent_from = 10**9
            ranks.advance()

    ranks.kernels[0].cancel = cancel_all  # type: ignore[method-assign]
    entries = ranks.answer(1, request(mask_epoch=8, max_tokens=1000))
    assert (entries[-1].token_id, entries[-1].finish) == (NO_TOKEN, Finish.CANCELLED)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("options", [{}, {"sampling": SamplingParams(logprobs=1)}])
def test_all_ranks_forget_after_a_numerical_fault(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.start()
    for kernel in ranks.kernels.values():
        kernel.fault_at = 6
    assert [entry.token_id for entry in ranks.answer(1, request(**options))] == [102, 103, 104, 105, NO_TOKEN]
    assert [kernel.recovered for kernel in ranks.kernels.values()] == [1, 1]
    for kernel in ranks.kernels.values():
        kernel.fault_at = 10**9
    assert len(ranks.answer(2, request(max_tokens=5))) == 5


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("gives_up", [False, True])
def test_all_kernels_take_what_prefill_gives_up(ranks: Ranks, gives_up: bool) -> None:
    """What was queued behind prefill does nothing; then all begin a second time, and their launches meet again."""
    ranks.start()
    for rank, engine in enumerate(ranks.engines):
        engine._gpu.prefill = prefill = ScriptedPrefill()
        prefill.gives_up = ranks.kernels[rank].has_invalid_streams = gives_up
    for seq in (1, 2):
        entries = ranks.answer(seq, request(num_prompt=100, max_tokens=5))
        assert [entry.token_id for entry in entries] == [199, 200, 201, 202, 203]
    for kernel in ranks.kernels.values():
        assert kernel.begun[1:] == ([(100, 99), (100, 0)] if gives_up else [(100, 99)]) * 2, "behind the trial"
        assert (kernel.streams is None) is gives_up


# ---- drafts ----
@pytest.fixture(params=[2, 4])
def drafting(
    request: pytest.FixtureRequest, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Ranks]:
    """Ranks with a dense model and drafts, whose kernels repeat themselves."""
    write_checkpoint(tmp_path, ONE_STREAM, random_tensors(ONE_STREAM, seed=11))
    made = Ranks(request.param, tmp_path, ONE_STREAM.max_context, drafts=True)
    play_kernels(made, runtime, monkeypatch)
    yield made
    made.close()


def test_ranks_with_drafts_run_the_same_builds_by_rank_0s_costs(drafting: Ranks) -> None:
    drafting.start()
    kernels = drafting.kernels.values()
    assert {kernel.costs for kernel in kernels} == {drafting.kernels[0].measured}
    assert len({kernel.measured for kernel in kernels}) == drafting.world_size
    assert drafting.happened[:2] == [f"{drafting.world_size * (2 + 2)} ahead", "build"]
    assert drafting.happened.count("build") == drafting.world_size * (2 + 2), "both sources, and both builds with drafts"
    for period in (9, 10**9):
        for kernel in kernels:
            kernel.period = period
        plain = drafting.answer(2 * period, request(num_prompt=5, max_tokens=90))
        for number, prediction in enumerate(((), (104, 105, 106, 107, 100), (1, 2, 3)), 1):
            entries = drafting.answer(
                2 * period + number, request(num_prompt=5, max_tokens=90, drafts=True, prediction=prediction)
            )
            assert [entry.token_id for entry in entries] == [entry.token_id for entry in plain]
            assert len({tuple(kernel.passes) for kernel in kernels}) == 1
            assert {1, PASS_TOKENS} >= set(drafting.kernels[0].passes)
            num_right = sum(entry.drafted.num_right for entry in entries)
            assert num_right > 30 if period == 9 else num_right <= 4


@pytest.mark.parametrize("drafting", [2], indirect=True)
def test_ranks_that_do_not_all_draft_do_not_begin(drafting: Ranks) -> None:
    other = drafting.engines[1]._gpu
    other.args = replace(other.args, drafts=False)
    errors = drafting.on_all(lambda engine: engine.startup())
    assert any("the ranks do not agree on the use of drafts" in str(error) for error in errors), errors


# ---- choices of experts ----
def test_equal_choices_change_nothing(checked: Ranks) -> None:
    checked.start()
    assert all(kernel.shape.checks_experts for kernel in checked.kernels.values())
    entries = checked.answer(1, request(num_prompt=20, max_tokens=5))
    assert [entry.token_id for entry in entries] == list(range(119, 124))
    assert {tuple(kernel.chunks) for kernel in checked.kernels.values()} == {(8, 8, 3, *[1] * 5)}
    assert len(checked.answer(2, request(max_tokens=3))) == 3


@pytest.mark.parametrize("position", [0, 12, 21])
def test_a_wrong_choice_of_one_rank_ends_all_with_one_sentence(checked: Ranks, position: int) -> None:
    checked.start()
    odd = checked.world_size - 1
    kernel = checked.kernels[odd]
    choices = kernel.choices

    def wrong(first: int, end: int) -> Any:
        words = choices(first, end)
        if first <= position < end:
            words[position - first, 2:] = 3 | 8 << 8
        return words

    kernel.choices = wrong  # type: ignore[method-assign]
    errors = checked.on_all(lambda engine: engine.run(1, request(num_prompt=20)))
    sentences = {str(error) for error in errors if not isinstance(error, AbortedError)}
    usual = f"{int(choices_at(position)[2, 0]) & 0xFF}, 9"
    assert sentences == {
        f"rank {odd} chose experts 3, 8 in layer 2 at position {position}, but rank 0 {usual}: the ranks do not compute "
        f"the same; start again, and report it if it comes back"
    }, checked.happened
    assert [entry.token_id for entry in answer(checked.page, 1)] == list(range(119, 100 + position))


@pytest.mark.parametrize("checked", [2], indirect=True)
def test_a_wrong_choice_on_trial_is_no_start(checked: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kernel: RankKernel, first: int, end: int) -> Any:
        return np.full((end - first, LAYERS, 4), kernel.shape.hosted_lanes[0], np.uint64)

    monkeypatch.setattr(RankKernel, "choices", wrong)
    errors = checked.on_all(lambda engine: engine.startup())
    assert any("rank 1 chose experts 2, 0 in layer 0 at position 0, but rank 0 0, 0:" in str(error) for error in errors), errors


@pytest.mark.parametrize("checked", [2], indirect=True)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_does_not_wait_for_ever_for_the_choices_of_another(
    checked: Ranks, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer ran the step, but its host does not come: the launcher says so, or else the time of a step ends it."""
    checked.start()
    waits, first = threading.Event(), checked.engines[0]
    assert first._gpu.choices is not None
    gather = first._gpu.choices._gather

    def gathered(own: bytes) -> list[bytes]:
        waits.set()
        return gather(own)

    monkeypatch.setattr(first._gpu.choices, "_gather", gathered)
    monkeypatch.setattr(first._gpu.peers, "_args", replace(first._gpu.args, step_timeout_s=JOIN_S if is_told else 0.2))

    def run(engine: CudaEngine) -> Finish:
        if engine is first:
            return engine.run(1, request())
        kernel = checked.kernels[1]
        kernel.begin((0, 1, 2), 1, SamplingParams())
        kernel.launch(2)
        assert waits.wait(JOIN_S)
        if is_told:
            checked.page.set_abort(AbortCause.RANK_DIED, 1)
        return Finish.NONE

    error, finish = checked.on_all(run)
    assert finish is Finish.NONE, checked.happened
    if is_told:
        assert isinstance(error, AbortedError)
    else:
        assert str(error) == (
            "rank 0 waited 0.2 s to compare choices of experts and rank 1 did not come; look at its last words, or raise "
            "--step-timeout"
        )
    assert answer(checked.page, 1) == []


# ---- a peer that is gone ----
@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("options", [{}, {"sampling": SamplingParams(logprobs=1)}, {"logit_digests": True}])
def test_a_rank_whose_peer_is_gone_leaves_when_it_is_told(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.start()
    aborted_at: list[float] = []

    def tell() -> None:
        deadline_s = time.monotonic() + JOIN_S
        while not ranks.kernels[0].pending and time.monotonic() < deadline_s:
            time.sleep(0.001)
        aborted_at.append(time.monotonic())
        ranks.page.set_abort(AbortCause.RANK_DIED, 1)

    thread = threading.Thread(target=tell)
    thread.start()
    (error,) = ranks.on_all(lambda engine: engine.run(1, request(**options)), ranks=[0])
    left_after_s = time.monotonic() - aborted_at[0]
    thread.join()
    assert isinstance(error, AbortedError)
    assert str(error) == "rank 0 left request 1 because the engine is being stopped"
    assert in_time(left_after_s, 1.0)
    assert ranks.kernels[0].aborted
    assert answer(ranks.page, 1) == []
    begin_s = time.monotonic()
    ranks.on_all(lambda engine: engine.close(), ranks=[0])  # its peer never comes
    assert in_time(time.monotonic() - begin_s, 3.0)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_rank_0_does_not_wait_for_ever_for_logits(ranks: Ranks) -> None:
    """The peer ran its step, but its host is gone before it sends its slice."""
    ranks.start()

    def run(engine: CudaEngine) -> Finish:
        if engine is ranks.engines[1]:
            kernel = ranks.kernels[1]
            kernel.begin((0, 1, 2), 1, SamplingParams())
            kernel.launch(3)
            deadline_s = time.monotonic() + JOIN_S
            while not kernel.entries and time.monotonic() < deadline_s:
                time.sleep(0.001)
            ranks.page.set_abort(AbortCause.RANK_DIED, 1)
            return Finish.NONE
        return engine.run(1, request(logit_digests=True))

    error, _ = ranks.on_all(run)
    assert isinstance(error, AbortedError)
    assert answer(ranks.page, 1) == []
