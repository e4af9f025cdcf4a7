"""Engines on GPUs with a model whose every token changes a state: requests go on behind a state that stands where their prompt is
kept, and make the copies that the coordinator asks for. The GPU is played.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kog_dist.bench.fakes.tiny_delta_model import ON_GPUS, WITH_EXPERTS, write_tiny_delta_model
from kog_dist.decode.request import DecodeRequest, KvCopy, KvCopyKind, KvUse
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.coordinator import kept_caches, kept_states
from kog_dist.workers.cuda import kv_blocks, load
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_blocks import KvBlocks
from kog_dist.workers.engines import cuda, cuda_start
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.cuda_states import CudaStates
from kog_dist.workers.prefill.base.chunks import Chunk
from tests.unit.asked_together import PATIENCE_S, Asked
from tests.unit.played_gpu import PlayedGpu
from tests.unit.test_cuda_turns import CONTEXT, PARALLEL, Turns, compare, drawn, turns, weights
from tests.unit.test_kinds_twin import NET, SMALL, spec_of

STEP = 32
NETS = spec_of(NET, SMALL, vocab_size=100, max_context=CONTEXT)
KINDS = KvCopyKind


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "STEP", STEP)
    monkeypatch.setattr(kept_caches, "_WORTH", 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[KvCopyKind]:
    """Copies that were made, by kind."""
    found, copy = Counter[KvCopyKind](), KvBlocks.copy

    def counted(blocks: KvBlocks, kv: KvUse, stream_ptr: int) -> None:
        found.update(one.kind for one in kv.copies)
        copy(blocks, kv, stream_ptr)

    monkeypatch.setattr(KvBlocks, "copy", counted)
    return found


def num_missed(engine: Turns) -> int:
    states = engine.engine._caches.states
    assert states is not None
    return states.num_missed


@pytest.mark.parametrize(
    ("kept_bytes", "host_bytes", "prefill"),
    [
        (1 << 19, 0, False),
        (1 << 19, 1 << 22, False),
        (1 << 22, 0, False),
        (0, 0, False),
        (1 << 19, 1 << 22, True),
        (1 << 22, 0, True),
    ],
)
def test_every_answer_is_that_of_the_request_alone(
    kept_bytes: int, host_bytes: int, prefill: bool, made: Counter[KvCopyKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept, and whoever runs beside it: with few copies of states, with many, and with none; where they have room on
    the host more are found. Prefill rounds otherwise
    than the kernel, and where chunks are not divided between its blocks.
    """
    chance = random.Random(5)
    asked = drawn(chance, 24)
    options: dict[str, Any] = {"prefill": prefill, "kept_bytes": kept_bytes, "kept_host_bytes": host_bytes, "rounds": True}
    with turns(NETS, PARALLEL, monkeypatch, **options) as engine:
        engine.run(asked, chance)
        assert num_missed(engine) == 0
        assert engine.gpu.num_shared == 0, "they take turns"
        assert (made[KINDS.SAVE_STATE] > 20) is bool(kept_bytes)
        assert max(kept_bytes, host_bytes) < 1 << 22 or made[KINDS.LOAD_STATE] > 2
        assert (made[KINDS.MOVE_STATE] > 5) is bool(host_bytes)
    with turns(NETS, 1, monkeypatch, prefill=prefill, kept_bytes=0, rounds=True) as engine:
        compare(engine, asked, reuse_kv=False)
    assert {one.entries[-1].finish for one in asked} >= {Finish.LENGTH, Finish.CANCELLED}


def test_a_conversation_that_others_have_driven_out_comes_back_from_the_host(
    made: Counter[KvCopyKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read anew behind its last copy, in whatever memory that is; without room on the host it is read anew as a whole."""
    prompts = [[*range(first, 100), *range(first)] for first in range(40)]
    num_cached = []
    for host_bytes in (0, 1 << 24):
        with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=1 << 20, kept_host_bytes=host_bytes) as engine:
            first = Asked(DecodeRequest(prompts[0], 40))
            for one in (first, *(Asked(DecodeRequest(prompt, 2)) for prompt in prompts[1:])):
                engine.run([one], random.Random(1))
            later = Asked(DecodeRequest([*prompts[0], *(entry.token_id for entry in first.entries), 5], 20))
            before = engine.gpu.num_passes
            engine.run([later], random.Random(1))
            num_cached.append(len(later.request.prompt) + 19 - (engine.gpu.num_passes - before))
            assert num_missed(engine) == 0
            assert (made[KINDS.MOVE_STATE] > 30) is bool(host_bytes)
    assert num_cached == [0, 139], "the last token of its answer was not in the cache"
    with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=0) as engine:
        compare(engine, [later], reuse_kv=False)


@pytest.mark.parametrize("prefill", [False, True])
def test_launches_with_drafts_end_where_copies_are_made(
    prefill: bool, made: Counter[KvCopyKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the prompt, and whoever goes on behind a copy has the answer of the request alone."""
    begun = list[str]()
    first = [*range(20), *range(60)]
    with turns(NETS, 1, monkeypatch, prefill=prefill) as engine:
        monkeypatch.setattr(engine.gpu, "meet", lambda what: begun.append(what[0]))
        asked = [Asked(DecodeRequest(first, 100, drafts=True))]
        engine.run(asked, random.Random(1))
        said = [entry.token_id for entry in asked[0].entries]
        asked.append(Asked(DecodeRequest([*first, *said[:70], 7], 20, drafts=True)))
        engine.run(asked[1:], random.Random(1))
        assert num_missed(engine) == 0
    assert {"small", "large"} & set(begun)
    assert "plain" not in begun
    assert made[KINDS.SAVE_STATE] >= 4
    assert made[KINDS.LOAD_STATE] == 1
    with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=0) as engine:
        compare(engine, asked, reuse_kv=False)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_conversation_reads_reads_what_is_new(
    parallel: int, prefill: bool, made: Counter[KvCopyKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn begins behind the end of the last one, or behind the last whole step in front of where it was left. Of a prompt
    prefill reads all, and copies are behind whole blocks of it.
    """
    first, chunks = [*range(20), *range(60)], list[int]()
    with turns(NETS, parallel, monkeypatch, prefill=prefill) as engine:
        if prefill:
            queue = engine.runner.queue

            def queued(chunk: Chunk, part: int = 0) -> Any:
                chunks.append(chunk.end - chunk.start)
                return queue(chunk, part)

            monkeypatch.setattr(engine.runner, "queue", queued)
        asked = [Asked(DecodeRequest(first, 50))]
        engine.run(asked, random.Random(1))
        said = [entry.token_id for entry in asked[0].entries]
        for more, num_cached in (
            ([*first, *said, 5], 129),  # the last token of the answer is not in the cache yet
            ([*first, *said[:30], 7, 8], 96),
            ([*first, 9], 64 if prefill else 80 - 1),
            (first, 64 if prefill else 80 - 1),
        ):
            asked.append(Asked(DecodeRequest(more, 20)))
            before, num_read = engine.gpu.num_passes, sum(chunks)
            engine.run(asked[-1:], random.Random(1))
            num_new = len(more) - num_cached
            assert sum(chunks) - num_read == (num_new if prefill else 0)
            assert engine.gpu.num_passes - before == (20 if prefill else num_new + 19)
        assert num_missed(engine) == 0
        assert made[KINDS.LOAD_STATE] >= 3
        assert bool(chunks) is prefill
    with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=0) as engine:
        compare(engine, asked, reuse_kv=False)


def test_a_cancel_ends_a_prompt_that_goes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request is served meanwhile, and what is read by then counts."""
    long, short = [Asked(DecodeRequest([first] * 400, 5)) for first in (3, 4)][:1], Asked(DecodeRequest([1, 2], 5))
    with turns(NETS, 2, monkeypatch, prefill=False) as engine:
        deadline, slots = Deadline.after(PATIENCE_S), engine.slots.slots
        engine.slots.submit(slots[0], long[0].request, reuse_kv=True)
        while engine.gpu.num_passes < 50:
            engine.hear([*long, short], deadline)
        engine.slots.submit(slots[1], short.request, reuse_kv=True)
        while slots[1].busy:
            engine.hear([*long, short], deadline)
        assert not long[0].entries
        slots[0].cancel()
        while engine.slots.busy:
            engine.hear([*long, short], deadline)
        assert (long[0].entries[-1].finish, long[0].entries[-1].token_id) == (Finish.CANCELLED, NO_TOKEN)
        assert engine.gpu.num_passes < 300, "of 400"
        again = Asked(DecodeRequest(long[0].request.prompt, 5))
        before = engine.gpu.num_passes
        engine.run([again], random.Random(1))
        assert engine.gpu.num_passes - before < 370
        assert num_missed(engine) == 0
    with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=0) as engine:
        compare(engine, [again, short], reuse_kv=False)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_fault_leaves_nothing_that_anybody_goes_on_behind(
    parallel: int, made: Counter[KvCopyKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that run go on; the next ones begin anew."""
    prompt = list(range(70))
    with turns(NETS, parallel, monkeypatch, prefill=False) as engine:
        asked = [Asked(DecodeRequest(prompt, 60)), Asked(DecodeRequest([9, 8], 200))][:parallel]
        kernel, gpu = engine.engine._gpu.kernel, engine.gpu
        recover = kernel.recover

        def recovered() -> None:
            recover()
            if parallel == 1:  # it begins to count anew
                gpu.epochs = dict.fromkeys(gpu.epochs, 0)

        monkeypatch.setattr(kernel, "recover", recovered)
        gpu.fault_at = 100
        engine.run(asked, random.Random(2))
        assert [one.entries[-1].finish for one in asked] == [Finish.NUMERICAL_FAULT, Finish.LENGTH][:parallel]
        made.clear()
        again = Asked(DecodeRequest(prompt, 60))
        engine.run([again], random.Random(2))
        assert made[KINDS.LOAD_STATE] == 0
        assert num_missed(engine) == 0
    with turns(NETS, 1, monkeypatch, prefill=False, kept_bytes=0) as engine:
        compare(engine, [again, *asked[1:]], reuse_kv=False)


def test_a_request_goes_on_behind_the_state_of_another_cache_or_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coordinator says may be older than a fault: then nothing is taken from there, and its copies are made later."""
    prompt = tuple(range(40))
    with turns(NETS, 2, monkeypatch, prefill=False) as engine:
        engine.run([Asked(DecodeRequest(prompt, 30))], random.Random(1))
        books = engine.slots._caches
        assert books is not None
        (source,) = (number for number, kept in enumerate(books._kept) if len(kept.tokens) > 1)
        num_cached, cache = len(books._kept[source].tokens), (source + 1) % 5
        request = DecodeRequest((*books._kept[source].tokens, 5, 6), 20)
        save = KvCopy(KINDS.SAVE_STATE, 7, num_cached)

        def taken(source: int, num_cached: int, *copies: KvCopy, seq: int = 7) -> tuple[int, int]:
            one = engine.engine._requests._taken(seq, request.at(KvUse(cache, source, num_cached, copies), 0))
            return one.held, len(one.saves)

        assert taken(source, num_cached, save) == (num_cached, 0), "it is made at once"
        gpu, kernel = engine.gpu, cast(Any, engine.engine._gpu.kernel)
        gpu.stream.synchronize()
        num_bytes = kv_blocks.net_bytes(gpu.shape)
        nets_ptr = kernel.nets.data.ptr
        assert [end.tolist() for end in gpu.state(nets_ptr + cache * num_bytes)] == [
            end.tolist() for end in gpu.state(nets_ptr + source * num_bytes)
        ]
        assert taken(cache, num_cached, KvCopy(KINDS.LOAD_STATE, 7, num_cached)) == (num_cached, 0)
        assert num_missed(engine) == 0
        assert taken(source, num_cached - 1) == (0, 0), "the state has moved on"
        assert taken(cache, num_cached, KvCopy(KINDS.LOAD_STATE, 6, num_cached)) == (0, 0), "nobody has put one there"
        assert taken(cache, num_cached + 1, KvCopy(KINDS.LOAD_STATE, 7, num_cached + 1)) == (0, 0)
        assert num_missed(engine) == 3
        engine.engine._caches._cleared[source] = 10
        assert taken(source, num_cached, save) == (0, 1), "its cache was emptied"
        assert taken(cache, num_cached, KvCopy(KINDS.LOAD_STATE, 7, num_cached)) == (0, 0), "the copy is to be made again"
        assert taken(source, num_cached, save, seq=11) == (num_cached, 0)


def test_copies_are_made_of_a_state_that_stands_there() -> None:
    states, use = CudaStates(2), KvUse(1, 1)
    saves = [KvCopy(KINDS.SAVE_STATE, slot, place) for slot, place in ((0, 8), (1, 9))]
    block = KvCopy(KINDS.SAVE, 0, 0)
    states.goes(1)
    assert states.saved(replace(use, copies=(block, *saves))) == (block,), "it moves"
    states.stands(1, 9)
    assert states.saved(replace(use, copies=(*saves, block))) == (saves[1], block)
    assert states.use(KvUse(0, 0, 9, (KvCopy(KINDS.LOAD_STATE, 1, 9),)), is_gone=False).num_cached == 9
    assert states.use(KvUse(0, 0, 8, (KvCopy(KINDS.LOAD_STATE, 0, 8),)), is_gone=False).num_cached == 0
    moves = [KvCopy(KINDS.MOVE_STATE, slot, place) for slot, place in ((1, 5), (0, 6), (0, 5))]
    assert states.saved(replace(use, copies=tuple(moves[:2]))) == (moves[0],), "nothing stands in slot 0"
    assert states.use(KvUse(0, 0, 9, (KvCopy(KINDS.LOAD_STATE, 5, 9),)), is_gone=False).num_cached == 9
    assert states.use(KvUse(0, 0, 9, (KvCopy(KINDS.LOAD_STATE, 1, 9),)), is_gone=False).num_cached == 0, "it has moved"
    assert states.saved(replace(use, copies=(moves[2],))) == ()
    assert states.use(KvUse(0, 0, 9, (KvCopy(KINDS.LOAD_STATE, 5, 9),)), is_gone=False).num_cached == 0, "another was to be there"


@pytest.mark.parametrize(("prefill", "changes"), [("off", {}), ("auto", {}), ("off", WITH_EXPERTS)])
def test_a_start_leaves_out_what_there_is_not_and_says_what_it_keeps(
    prefill: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a published folder; its weights are of nothing."""
    write_tiny_delta_model(tmp_path, **ON_GPUS, **changes)
    spec = open_checkpoint(tmp_path).spec
    gpu = PlayedGpu(KernelShape(spec, range(spec.num_lanes)))
    gpu.install(monkeypatch)
    monkeypatch.setattr(load, "load_weights", lambda *args, **options: weights())
    monkeypatch.setattr(cuda, "use_device", lambda device: None)
    monkeypatch.setattr(cuda_start, "free_memory", lambda: None)
    monkeypatch.setattr("kog_dist.workers.prefill.gpu.obstacle_on_gpu", lambda: "the GPU is a played one")
    control = ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size, parallel=2)
    info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
    args = WorkerArgs(
        info, str(tmp_path), "cuda:0", "bfloat16", True, PATIENCE_S, PATIENCE_S, prefill=prefill, parallel=2,
        num_kv_caches=3, kept_bytes=1 << 22,
    )  # fmt: skip
    engine = CudaEngine(args, control)
    engine.startup()
    layout = control.kv_layout()
    slots, states = kv_blocks.pool_slots(gpu.shape, 1 << 22)
    assert (layout.num_caches, layout.num_slots, layout.num_states, layout.block_tokens) == (3, slots, states, 128)
    assert min(slots, states) > 4
    request = DecodeRequest(tuple(range(9)), 5, ignore_eos=True, drafts=True)
    assert engine.run(1, request) is Finish.LENGTH
    engine.close()
    gpu.stream.close()
    control.close()
    told = capsys.readouterr().err
    cause = "the model has experts beside delta nets" if changes else "the GPU is a played one"
    assert told.count(f"prompts go token by token, since prefill cannot start: {cause}") == (prefill == "auto")
