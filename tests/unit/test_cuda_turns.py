"""Requests that take turns on one GPU have the answers that they have alone: coordinator's slots, engine and monokernel's host
side as they are, on a GPU that is played.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.errors import AbortedError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.abi import MAX_STOP_IDS
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.masks import num_words
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.coordinator import kept_caches
from kog_dist.workers.coordinator.decode_slot import DecodeSlots
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.engines import cuda_caches, cuda_drafting
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.launches import COMPANY_STEPS
from kog_dist.workers.prefill.base.chunks import Work
from kog_dist.workers.prefill.prefill import Prefill
from kog_dist.workers.worker import serve
from tests.unit.asked_together import PATIENCE_S, Asked, AskedTogether
from tests.unit.played_gpu import PlayedGpu, PlayedRunner

CONTEXT, PARALLEL, CACHES, SIZES = 512, 4, 5, (16, 32)
DENSE = ModelSpec(
    hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512, vocab_size=100, max_context=CONTEXT,
    num_lanes=2, delay=0,
)  # fmt: skip
SPECS = {"dense": DENSE, "windows": replace(DENSE, sliding_window=100, window_layers=(0, 2))}
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(1.1, seed=4),
    SamplingParams(0.4, seed=5),
    SamplingParams(0.8, seed=9, repetition_penalty=1.3),
)


class Served(AskedTogether):
    """An engine in a thread, and what a coordinator does with it. `startup`: what the thread does before."""

    def __init__(
        self, engine: CudaEngine, control: ControlPage, vocab: int, window: int | None, startup: Callable[[], None],
        ready_s: float = PATIENCE_S, *, is_recurrent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(control, DecodeSlots(control, window, is_recurrent=is_recurrent), vocab)
        self.engine, self._startup = engine, startup
        self.is_ready = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        assert self.is_ready.wait(ready_s)
        assert not self.error, self.error

    def _serve(self) -> None:
        try:
            self._startup()
            self.is_ready.set()
            serve(self.engine, self.control, 0)
        except AbortedError:
            pass
        except BaseException as error:
            self.error.append(error)
            self.is_broken.set()
        finally:
            self.is_ready.set()
            self.engine.close()

    def close(self) -> None:
        self.stop([self.thread])
        self.control.close()
        assert not self.error, self.error


class Turns(Served):
    """On a GPU that is played."""

    def __init__(
        self, spec: ModelSpec, parallel: int, monkeypatch: pytest.MonkeyPatch, *, prefill: bool = True, shares: bool = False,
        kept_bytes: int = 1 << 22, kept_host_bytes: int = 0, rounds: bool = False,
    ) -> None:  # fmt: skip
        """`rounds`: see `PlayedRunner`."""
        monkeypatch.setattr(cuda_caches, "BLOCK", SIZES[0])
        drafts = not spec.window_layers
        shape = KernelShape(spec, range(spec.num_lanes))
        self.gpu = PlayedGpu(shape)
        self.gpu.install(monkeypatch)
        control = ControlPage.create(1, CONTEXT, vocab_size=spec.vocab_size, parallel=parallel)
        kernel = Monokernel(
            shape, cast(Any, weights()), processors=True, masks=control.mask_slots, drafts=drafts,
            forced=control.forced_slots if drafts else None,
            num_slots=parallel, num_caches=CACHES, company=(2, 4) if parallel > 1 and shares else (),
        )  # fmt: skip
        info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
        args = WorkerArgs(info, "model", "cuda:0", "bfloat16", True, PATIENCE_S, PATIENCE_S)
        args = replace(args, parallel=parallel, num_kv_caches=CACHES, drafts=drafts, kept_bytes=kept_bytes)
        engine = CudaEngine(replace(args, kept_host_bytes=kept_host_bytes), control)
        engine._gpu.loaded, engine._gpu.max_context, engine._drafting.with_processors = kernel, CONTEXT, drafts
        kernel.try_together()
        tried = int(bool(kernel.most_together() > 1))
        assert (self.gpu.epochs["company2"], self.gpu.epochs["company4"]) == (tried, tried), "each build is tried"
        if prefill:
            kernel.prepare_head_start()
            nets_ptr = 0 if kernel.nets is None else kernel.nets.data.ptr
            rounds_by = SIZES[0] if rounds else 0
            self.runner = cast(Any, PlayedRunner(self.gpu, kernel.kv.data.ptr, nets_ptr, rounds_by=rounds_by))
            work = Work(row_flop=1e12, most_parts=3, max_context=CONTEXT)  # so that chunks of 32 tokens have three parts
            engine._gpu.prefill = Prefill(self.runner, max_context=CONTEXT, sizes=SIZES, work=work)
        engine._caches.make(shape, kernel, engine._drafting.most_drafted)
        super().__init__(engine, control, spec.vocab_size, spec.sliding_window, lambda: None, is_recurrent=spec.is_recurrent)

    def close(self) -> None:
        super().close()
        self.gpu.stream.close()


def weights() -> Any:
    """Of nothing."""
    held = SimpleNamespace(data=SimpleNamespace(ptr=1))
    of_nets = ("delta_taps", "delta_factors", "delta_norm")
    of_all = dict.fromkeys(("tape", "embedding", "norms", "final_norm", "rope", *of_nets), held)
    return SimpleNamespace(**of_all, **dict.fromkeys(("qkv_bias", "head_norms", "out_bias", "sinks", "experts")))


@contextmanager
def turns(spec: ModelSpec, parallel: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Turns]:
    made = Turns(spec, parallel, monkeypatch, **options)
    try:
        yield made
    finally:
        made.close()


def drawn(chance: random.Random, num: int, vocab: int = 100) -> list[Asked]:
    """Mixed requests, of which some begin alike."""
    stems = [[chance.randrange(vocab) for _ in range(chance.randint(1, 300))] for _ in range(3)]
    asked = []
    for _ in range(num):
        prompt = (*chance.choice(stems), *(chance.randrange(vocab) for _ in range(chance.randint(1, 40))))
        num_stops = chance.choice((0, 0, min(vocab // 30, MAX_STOP_IDS)))
        request = DecodeRequest(
            prompt, chance.randint(1, 120), chance.choice(SAMPLINGS), tuple(range(num_stops)),
            logit_digests=chance.random() < 0.15, drafts=chance.random() < 0.6,
            prediction=tuple(chance.randrange(vocab) for _ in range(chance.randrange(10))),
        )  # fmt: skip
        asked.append(Asked(request, chance.random() < 0.2, chance.choice((None, None, None, 3))))
    return asked


@pytest.mark.parametrize(
    ("name", "prefill", "shares"),
    [("dense", True, True), ("dense", False, True), ("dense", True, False), ("windows", True, False), ("windows", False, False)],
)
def test_every_answer_is_that_of_the_request_alone(
    name: str, prefill: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """`shares`: passes have tokens of several of them, where these need no more than the kernel's own choice."""
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    chance = random.Random(5)
    asked = drawn(chance, 24)
    with turns(SPECS[name], PARALLEL, monkeypatch, prefill=prefill, shares=shares) as engine:
        engine.run(asked, chance)
        assert (engine.gpu.num_shared > 0) is shares
        assert (engine.gpu.num_drafting > 0) is (name == "dense"), "requests with grammars have drafts"
        assert not prefill or engine.runner.num_decoded_between > 0
    with turns(SPECS[name], 1, monkeypatch, prefill=prefill) as engine:
        compare(engine, asked)
    assert {one.entries[-1].finish for one in asked} >= {Finish.LENGTH, Finish.CANCELLED}


@pytest.mark.parametrize("seed", [11, 12])
def test_to_share_passes_or_to_take_turns_gives_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they change from one to the other, for the sake of drafts."""
    chance = random.Random(seed)
    monkeypatch.setattr(cuda_drafting, "gains_from_turns", lambda gains, extra: chance.random() < 0.3)
    asked = [replace(one, request=replace(one.request, drafts=True)) for one in drawn(chance, 16)]
    with turns(DENSE, PARALLEL, monkeypatch, shares=True) as engine:
        engine.run(asked, chance)
    with turns(DENSE, 1, monkeypatch) as engine:
        compare(engine, asked)


def test_prompts_that_go_token_by_token_in_company_are_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far they are, which newcomers go by, and that the rank is alive."""
    asked = [Asked(DecodeRequest(tuple(range(first, first + 90)) * 4, 5)) for first in (0, 7)]
    told = [set[int](), set[int]()]
    with turns(DENSE, 2, monkeypatch, prefill=False, shares=True) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        for slot, one in zip(slots, asked, strict=True):
            engine.slots.submit(slot, one.request, reuse_kv=False)
        while engine.slots.busy:
            for slot, seen in zip(slots, told, strict=True):
                if slot.seq is not None:
                    seen.add(engine.control.progress(slot.seq, slot.number) or 0)
            engine.hear(asked, deadline, 0.001)
        assert engine.gpu.num_shared > 100
    assert all(len(seen) > 10 for seen in told)


def compare(engine: Served, asked: Sequence[Asked], *, reuse_kv: bool = True) -> None:
    """Ask for each alone: the answers are the same, as far as nobody cancelled them."""
    for one in asked:
        alone = Asked(one.request, one.has_grammar)
        engine.run([alone], random.Random(0), reuse_kv=reuse_kv)
        if one.entries[-1].finish is Finish.CANCELLED:
            assert one.entries[-1].token_id == NO_TOKEN
            assert one.answer()[:-1] == alone.answer()[: len(one.entries) - 1]
        else:
            assert one.answer() == alone.answer()


def test_streams_of_a_prompt_wait_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt, which prefill would read meanwhile, would leave its own there."""
    asked = [Asked(DecodeRequest(tuple(range(first, first + 60)), 5)) for first in (0, 30)]
    with turns(DENSE, 2, monkeypatch) as engine:
        turn, had = engine.engine._requests._turn, list[int]()

        def counted(one: CudaRequest, *arguments: Any) -> None:
            turn(one, *arguments)
            had.append(one.slot)

        monkeypatch.setattr(engine.engine._requests, "_turn", counted)
        deadline = Deadline.after(PATIENCE_S)
        for slot, one, mask_epoch in zip(engine.slots.slots, asked, (1, 0), strict=True):
            engine.slots.submit(slot, replace(one.request, mask_epoch=mask_epoch), reuse_kv=False)
            while slot.number and had.count(slot.number) < 3:
                assert not deadline.expired()
                assert not engine.is_broken.is_set(), engine.error
                engine.slots.wait(0.001, lambda: False)
        every = np.full(num_words(engine.vocab), 0xFFFFFFFF, np.uint32)
        for index in range(5):
            engine.control.mask_slots[0].put(1 + index, every)
            while not asked[0].entries[index:]:
                assert not deadline.expired()
                engine.slots.wait(0.001, lambda: False)
                for slot, one in zip(engine.slots.slots, asked, strict=True):
                    one.entries += slot.read()
        while engine.slots.busy:
            assert not deadline.expired()
            engine.slots.wait(0.001, lambda: False)
            asked[1].entries += engine.slots.slots[1].read()
    with turns(DENSE, 1, monkeypatch) as engine:
        for one in asked:
            alone = Asked(one.request)
            engine.run([alone], random.Random(1))
            assert one.answer() == alone.answer()


def test_a_cancel_ends_one_of_those_that_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Asked(DecodeRequest((first, 7), 400)) for first in (1, 2)]
    with turns(DENSE, 2, monkeypatch, shares=True) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        for slot, one in zip(slots, asked, strict=True):
            engine.slots.submit(slot, one.request, reuse_kv=False)
        while engine.slots.busy:
            engine.hear(asked, deadline)
            if engine.gpu.num_shared > 20:
                slots[0].cancel()
        assert engine.gpu.num_shared < 300
    assert [one.entries[-1].finish for one in asked] == [Finish.CANCELLED, Finish.LENGTH]


def test_who_comes_does_not_wait_for_the_end_of_those_that_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Asked(DecodeRequest((first, 7), 480)) for first in (1, 2, 3)]
    with turns(DENSE, 3, monkeypatch, shares=True) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        for slot, one in zip(slots[:2], asked, strict=False):
            engine.slots.submit(slot, one.request, reuse_kv=False)
        while engine.slots.busy and not asked[2].entries:
            if engine.gpu.num_shared > 20 and not slots[2].busy:
                engine.slots.submit(slots[2], asked[2].request, reuse_kv=False)
            engine.hear(asked, deadline)
        assert all(one.entries[-1].finish is Finish.NONE for one in asked)
        for slot in slots:
            slot.cancel()
        while engine.slots.busy:
            engine.hear(asked, deadline)


def test_between_two_parts_of_prompts_are_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who decodes waits for a part, for one pass of each who has some of its own, and for the others' shared ones: who has
    just begun, too.
    """
    samplings = (SamplingParams(0.8, repetition_penalty=1.3), SamplingParams(), SamplingParams())
    long = [DecodeRequest((first, 7), 480, sampling) for first, sampling in enumerate(samplings)]
    come = [DecodeRequest(tuple(range(first, first + 65)), 40) for first in (3, 20)]
    asked = [Asked(request) for request in (*long, *come)]
    done = list[tuple[str, Sequence[int], int]]()
    with turns(DENSE, 5, monkeypatch, shares=True) as engine:
        kernel: Any = engine.engine._gpu.kernel
        launch, together, queue = kernel.launch, kernel.launch_together, engine.runner.queue

        def launched(num_steps: int) -> None:
            done.append(("alone", [kernel._slots.index(kernel._slot)], num_steps))
            launch(num_steps)

        def launched_together(slots: Sequence[int], num_steps: int) -> None:
            done.append(("together", slots, num_steps))
            together(slots, num_steps)

        def queued(*arguments: Any) -> Any:
            done.append(("part", (), 0))
            return queue(*arguments)

        monkeypatch.setattr(kernel, "launch", launched)
        monkeypatch.setattr(kernel, "launch_together", launched_together)
        monkeypatch.setattr(engine.runner, "queue", queued)
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots

        def submit(which: slice) -> None:
            for slot, one in zip(slots[which], asked[which], strict=True):
                while slot not in engine.slots.free():
                    engine.hear(asked, deadline)
                engine.slots.submit(slot, one.request, reuse_kv=False)

        submit(slice(0, 3))
        while not all(one.entries for one in asked[:3]):
            engine.hear(asked, deadline)
        submit(slice(3, 5))
        while not all(len(one.entries) > 20 for one in asked[3:]):
            engine.hear(asked, deadline)
        for slot in slots:
            slot.cancel()
        while engine.slots.busy:
            engine.hear(asked, deadline)
    parts = [number for number, (name, *_) in enumerate(done) if name == "part"]
    assert len(parts) == 2 * (2 * 3 + 1), "two chunks of three parts each, and a small one"
    for first, second in itertools.pairwise(parts):
        between = done[first + 1 : second]
        assert all(steps == 1 for name, _, steps in between if name == "alone")
        assert len({slots[0] for name, slots, _ in between if name == "alone"}) == sum(name == "alone" for name, *_ in between)
        assert all(steps <= COMPANY_STEPS for name, _, steps in between if name == "together")
    begins = next(number for number, (name, slots, _) in enumerate(done) if name == "alone" and slots[0] in (3, 4))
    behind = next((name, slots) for name, slots, _ in done[begins:] if name != "alone")
    assert behind[0] == "together", "it goes on before the next part"
    assert done[begins][1][0] in behind[1]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_engine_that_waits_for_grammars_leaves_at_once(is_aborted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is told; a launch that failed is an error, too, not a wait for its end."""
    with turns(DENSE, 2, monkeypatch, shares=True) as engine:
        deadline = Deadline.after(PATIENCE_S)
        for number, slot in enumerate(engine.slots.slots):
            asked = DecodeRequest((number, 7), 400, mask_epoch=1000 * (number + 1) if is_aborted else 0)
            engine.slots.submit(slot, asked, reuse_kv=False)
        if is_aborted:
            while any(engine.control.stages_ns(0, slot.number)[RankStage.READ] == 0 for slot in engine.slots.slots):
                assert not deadline.expired()
                engine.slots.wait(0.001, lambda: False)
            engine.control.set_abort(AbortCause.SHUTDOWN)
            engine.thread.join(2.0)  # a mask is waited for 5 s
            assert not engine.thread.is_alive()
            return
        while engine.gpu.num_shared < 10:
            assert not deadline.expired()
            engine.slots.wait(0.001, lambda: False)
        engine.gpu.stream.error.append(RuntimeError("an illegal memory access"))
        engine.thread.join(5.0)
        assert not engine.thread.is_alive()
        assert "an illegal memory access" in str(engine.error)
        engine.error.clear()
        engine.gpu.stream.error.clear()


def test_nobody_copies_what_a_fault_has_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was posted before may say so still."""
    prompt = tuple(range(40))
    with turns(DENSE, 2, monkeypatch) as engine:
        engine.run([Asked(DecodeRequest(prompt, 30))], random.Random(1))
        first = engine.slots._caches._kept  # type: ignore[union-attr]
        held = [number for number, kept in enumerate(first) if len(kept.tokens) > 1]
        request = DecodeRequest((*prompt, 5, 6), 20)
        use = KvUse((held[0] + 1) % CACHES, held[0], 30)
        engine.engine._caches._cleared[held[0]] = 10**6
        taken = engine.engine._requests._taken(7, request.at(use, 0))
        assert (taken.held, taken.reads) == (0, True)
        engine.engine._caches._cleared[held[0]] = 6
        assert engine.engine._requests._taken(7, request.at(use, 0)).held == 30
