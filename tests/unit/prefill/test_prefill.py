"""Prefill is the same function as decoding token by token, however it is cut; it obeys a stop and admits what it cannot do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.collectives.cpu import CpuCommunicator
from kog_dist.decode.cpu.exchange_calls import RankExchange
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.prefill.base.arrays import Array, address, float32_of
from kog_dist.workers.prefill.base.chunks import Chunk
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.exchange.lane_sums import CommunicatorExchange, mailbox
from kog_dist.workers.prefill.lanes.layers import num_shared_streams
from tests.multi.test_bits import Board, ThreadExchange
from tests.unit.prefill.models import SMALL, VARIANTS, Rank, interpreter, layout_of, relative_error, token_ids

PROMPT = 141  # tokens; beyond the ring of windowed layers
Make = Callable[[dict[str, Any]], Checkpoint]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Checkpoints with random weights, by what differs from SMALL."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(overrides: dict[str, Any]) -> Checkpoint:
        key = repr(overrides)
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            spec = ModelSpec(**{**SMALL, **overrides})
            write_checkpoint(folder, spec, random_tensors(spec, 7), manifest=False)
            made[key] = open_checkpoint(folder)
        return made[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield checkpoint
    torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_function_as_token_by_token(make: Make, variant: str) -> None:
    checkpoint = make(VARIANTS[variant])
    rank, ids = Rank(checkpoint), token_ids(checkpoint.spec, PROMPT)
    assert rank.run(ids[:-1]) == PROMPT - 1
    slow = interpreter(checkpoint, "bfloat16")
    for position, token in enumerate(ids[:-1]):
        slow.step(token, position, None)
    fast = rank.interpreter(PROMPT - 1)
    for layer in range(checkpoint.spec.num_layers):
        first = rank.layout.first_kept(layer, PROMPT - 1)
        for found, wanted in ((fast.memory.keys, slow.memory.keys), (fast.memory.values, slow.memory.values)):
            a, b = (part[layer][0][:, :, first : PROMPT - 1] for part in (found, wanted))
            assert (a != b).mean() < 0.02, f"layer {layer}: rounding falls on another side too often"
            assert relative_error(a, b) < 1e-3
    of_last = slow.step(ids[-1], PROMPT - 1, SamplingParams(), gather_logits=True).logits
    assert of_last is not None
    assert rank.run(ids, PROMPT - 3) == PROMPT
    assert relative_error(last_logits(rank), of_last) < 1e-3
    assert rank.run(ids[:-1]) == PROMPT - 1
    token = ids[-1]
    for position in range(PROMPT - 1, PROMPT + 4):  # decoding goes on, through windows that end in the prompt
        outputs = [engine.step(token, position, SamplingParams(), gather_logits=True) for engine in (fast, slow)]
        logits = [output.logits for output in outputs]
        assert logits[0] is not None
        assert logits[1] is not None
        assert relative_error(logits[0], logits[1]) < 1e-3
        token = outputs[1].token_id


@pytest.mark.parametrize("variant", ["delayed", "all blocking", "one lane, no windows"])
def test_queries_of_the_last_layer_may_be_made_for_the_last_token_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:  # fmt: skip
    checkpoint = make(VARIANTS[variant])
    early, late = (Rank(checkpoint, dtype=np.float16) for _ in range(2))
    ids = token_ids(checkpoint.spec, PROMPT)
    assert early.run(ids) == PROMPT
    monkeypatch.setattr("kog_dist.workers.prefill.lanes.layers.LATE_SIZE", 16)
    assert late.run(ids) == PROMPT
    assert np.array_equal(late.cache, early.cache)
    assert relative_error(late.buffers.last_streams, early.buffers.last_streams) < 1e-5


def test_streams_are_kept_once_while_lanes_have_the_same(make: Make) -> None:
    counts = {variant: num_shared_streams(make(overrides).spec) for variant, overrides in VARIANTS.items()}
    assert counts == {
        "delayed": 5, "delay 1, norm scales per lane": 0, "delay beyond the layers": 1, "no early communication": 1,
        "no attention communication": 1, "all blocking": 8, "biases, normed heads": 8, "one lane, no windows": 8,
        "many query heads per KV head": 5,
    }  # fmt: skip
    checkpoint = make({})
    once, each = (Rank(checkpoint, dtype=np.float16) for _ in range(2))
    each.layers._num_shared = 0
    ids = token_ids(checkpoint.spec, PROMPT)
    assert once.run(ids) == each.run(ids) == PROMPT
    assert np.array_equal(once.cache, each.cache)
    assert np.array_equal(once.buffers.last_streams, each.buffers.last_streams)


def test_a_step_back_over_a_ring_finds_all_positions(make: Make) -> None:
    """Where windowed layers keep them: positions that came from the cache, and of which a later prompt has only the first."""
    checkpoint = make({})
    rank, fresh = (Rank(checkpoint, whole_windows=True) for _ in range(2))
    ids = token_ids(checkpoint.spec, 240)
    other = [*ids[:60], *reversed(ids[60:80])]
    assert not rank.layout.has_rings
    assert rank.run(ids) == 240
    rank.prefill.forget(0)
    for kept in (rank.buffers.keys, rank.buffers.values):
        kept.fill(0)
    assert rank.run(ids, 232) == 240
    assert rank.run(other, 60) == fresh.run(other) == 80
    assert relative_error(rank.buffers.last_streams, fresh.buffers.last_streams) < 1e-3
    for layer in range(checkpoint.spec.num_layers):
        pairs = (one.layout.load(one.cache, layer, 0, 80) for one in (rank, fresh))
        for part, wanted in zip(*pairs, strict=True):
            assert relative_error(float32_of(part), float32_of(wanted)) < 1e-3


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_products_in_binary16_stay_within_the_limit(make: Make, kv_dtype: str) -> None:
    checkpoint = make({})
    rank, ids = Rank(checkpoint, dtype=np.float16, kv_dtype=kv_dtype), token_ids(checkpoint.spec, PROMPT)
    rank.run(ids[:-1])
    output = rank.interpreter(PROMPT - 1).step(ids[-1], PROMPT - 1, SamplingParams(), gather_logits=True)
    rank.run(ids)
    oracle = Laneformer.from_checkpoint(checkpoint.folder, torch.float64).eval()
    oracle.round_keys_and_values(getattr(torch, kv_dtype))
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids]))[0, -1].numpy()
    assert output.logits is not None
    assert relative_error(output.logits, wanted) < 2e-3
    assert relative_error(last_logits(rank), wanted) < 2e-3


def last_logits(rank: Rank) -> Array:
    """What the LM head makes of the streams that prefill leaves; the rank hosts all lanes."""
    model = Laneformer.from_checkpoint(rank.checkpoint.folder, torch.float64).eval()
    streams = torch.from_numpy(rank.buffers.last_streams).expand(rank.spec.num_lanes, -1)  # as many, or one for all
    with torch.no_grad():
        return np.asarray(model.logits(streams[:, None, None].double())[0, 0].numpy())


def test_the_same_bits_however_often_it_is_stopped(make: Make) -> None:
    checkpoint = make({})
    ids = token_ids(checkpoint.spec, PROMPT)
    whole = Rank(checkpoint, dtype=np.float16)
    whole.run(ids)
    cut = Rank(checkpoint, dtype=np.float16)
    position, num_runs = 0, 0
    while position < PROMPT:
        asked = iter((False, True))
        position = cut.prefill.run(ids, position, should_stop=lambda asked=asked: next(asked))  # type: ignore[misc]
        num_runs += 1
    assert num_runs == 9
    assert np.array_equal(whole.cache, cut.cache)
    assert np.array_equal(whole.buffers.last_streams, cut.buffers.last_streams)
    others = Rank(checkpoint, dtype=np.float16)
    others.run([*ids[:64], *ids[30:60]])  # a conversation that leaves the first one at the end of a chunk
    others.run(ids, 64)
    assert np.array_equal(whole.cache, others.cache)


def test_a_prefix_from_the_cache_is_used_wherever_it_ends(make: Make) -> None:
    checkpoint = make({})
    ids = token_ids(checkpoint.spec, PROMPT)
    whole = Rank(checkpoint)
    whole.run(ids)
    for start in (1, 59, 129, 140):
        caches = []
        for num_held in (start, start // 2):  # the others are fetched from the cache
            rank = Rank(checkpoint)
            rank.run(ids[:start])
            rank.prefill.forget(num_held)
            rank.buffers.keys[:, num_held:start], rank.buffers.values[:, num_held:start] = 9.0, 9.0
            assert rank.run(ids, start) == PROMPT
            caches.append(rank.cache)
        assert relative_error(float32_of(caches[0]), float32_of(whole.cache)) < 1e-3
        assert np.array_equal(caches[0], caches[1])


def test_padding_is_never_stored(make: Make) -> None:
    checkpoint = make({})
    ids = token_ids(checkpoint.spec, PROMPT)
    rank = Rank(checkpoint)
    rank.run(ids[:129])
    empty = Rank(checkpoint)
    empty.run(ids[:129])
    empty.run(ids[:130], 129)  # seven of eight rows are padding
    for layer in range(checkpoint.spec.num_layers):
        for part, other in zip(rank.layout.parts(rank.cache, layer), rank.layout.parts(empty.cache, layer), strict=True):
            differing = (part != other).sum()
            assert 0 < differing <= part[:, 0, 0, 0].size, "one position of every head"


def test_a_stop_keeps_what_was_computed(make: Make) -> None:
    checkpoint = make({})
    ids = token_ids(checkpoint.spec, PROMPT)
    rank, seen = Rank(checkpoint), list[int]()
    reached = rank.prefill.run(ids, 0, should_stop=lambda: len(seen) >= 2, on_progress=seen.append)
    assert seen == [16, 32, 48], "the third one was queued when the second one ended"
    assert reached == 48
    assert rank.run(ids, reached) == PROMPT
    assert Rank(checkpoint).prefill.run(ids, 0, should_stop=lambda: True) == 0
    assert rank.prefill.run(ids, PROMPT, should_stop=lambda: False) == PROMPT


@pytest.mark.parametrize(("most_rows", "wanted"), [(16, 16), (24, 24), (31, 24), (32, 32), (4096, 32)])
def test_a_stop_waits_for_few_rows(make: Make, monkeypatch: pytest.MonkeyPatch, most_rows: int, wanted: int) -> None:
    monkeypatch.setattr("kog_dist.workers.prefill.prefill.ROWS_QUEUED", most_rows)
    checkpoint = make({})
    rank = Rank(checkpoint)
    runner: Any = rank.prefill._runner
    run_chunk = runner.queue
    under_way, most = list[int](), 0

    def queue(chunk: Chunk, part: int) -> Callable[[], bool]:
        nonlocal most
        run_chunk(chunk, part)
        under_way.append(chunk.size)
        most = max(most, sum(under_way))
        polls = iter(range(5))

        def has_ended() -> bool:
            if next(polls) == 4:
                under_way.pop(0)
                return True
            return False

        return has_ended

    monkeypatch.setattr(runner, "queue", queue)
    assert rank.run(token_ids(checkpoint.spec, 133)) == 133, "eight chunks of 16, and one of 8"
    assert most == wanted


def test_values_out_of_range_store_nothing(make: Make) -> None:
    checkpoint = make({})
    ids = token_ids(checkpoint.spec, PROMPT)
    rank = Rank(checkpoint, dtype=np.float16)
    rank.run(ids[:20])
    before, wqkv = rank.cache.copy(), rank.matrices[2].wqkv
    np.multiply(wqkv, 60000, out=wqkv)
    assert rank.run(ids, 20) == 20
    assert np.array_equal(rank.cache, before)
    assert bool(np.isfinite(rank.buffers.values).all())
    np.divide(wqkv, 60000, out=wqkv)
    np.multiply(rank.matrices[-1].w2, 60000, out=rank.matrices[-1].w2)  # which only the prompt's last token needs
    assert rank.run(ids, 20) == 20
    assert np.array_equal(rank.cache, before)
    np.divide(rank.matrices[-1].w2, 60000, out=rank.matrices[-1].w2)
    assert rank.run(ids, 20) == PROMPT, "the next request is unharmed"


def check_ranks(checkpoint: Checkpoint, world_size: int, run: Callable[[int, Callable[[RankExchange], Rank]], Rank]) -> None:
    """`run` makes a communicator of a rank and calls what it is given; the ranks' keys and values are those of one rank."""
    spec, ids = checkpoint.spec, token_ids(checkpoint.spec, 75)
    alone = Rank(checkpoint)
    alone.run(ids)

    def prefilled(index: int, comm: RankExchange) -> Rank:
        lanes = spec.lanes_of_rank(index, world_size)
        rank = Rank(checkpoint, lanes=lanes, exchange=CommunicatorExchange(spec, 16, comm))
        rank.run(ids[:40])
        rank.run(ids, 40)
        return rank

    with ThreadPoolExecutor(world_size) as pool:
        ranks = list(pool.map(lambda index: run(index, partial(prefilled, index)), range(world_size)))
    for rank in ranks:
        heads = slice(rank.lanes[0] * spec.lane_kv_heads, (rank.lanes[-1] + 1) * spec.lane_kv_heads)
        for layer in range(spec.num_layers):
            first = rank.layout.first_kept(layer, 75)
            kept = [one.layout.load(one.cache, layer, first, 75) for one in (rank, alone)]
            for found, wanted in zip(*kept, strict=True):
                assert relative_error(float32_of(found), float32_of(wanted[:, heads])) < 1e-3
        streams = alone.buffers.last_streams
        if not spec.has_one_stream:
            streams = streams[rank.lanes[0] : rank.lanes[-1] + 1]
        assert relative_error(rank.buffers.last_streams, streams) < 1e-3


@pytest.mark.parametrize(("variant", "world_size"), [("delayed", 4), ("no attention communication", 2), ("all blocking", 2)])
def test_ranks_that_share_the_lanes(make: Make, variant: str, world_size: int) -> None:
    board = Board(world_size)
    check_ranks(make(VARIANTS[variant]), world_size, lambda index, prefilled: prefilled(ThreadExchange(board, index)))


def test_ranks_with_the_communicator_of_cpu_ranks(make: Make) -> None:
    checkpoint = make({})
    page, meeting = ControlPage.create(2, 16), LocalRendezvous.create(2)

    def run(index: int, prefilled: Callable[[RankExchange], Rank]) -> Rank:
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), index, aborted=page.aborted)
        comm = CpuCommunicator.create(
            [mailbox(checkpoint.spec, 16)], rendezvous=rendezvous, control=page, deadline=Deadline.after(30), timeout_s=30.0
        )
        try:
            rank = prefilled(comm)
            comm.barrier()
        finally:
            comm.close()
            rendezvous.close()
        return rank

    check_ranks(checkpoint, 2, run)
    meeting.close()
    page.close()


def test_what_does_not_fit_is_refused(make: Make) -> None:
    checkpoint = make({})
    rank, ids = Rank(checkpoint), token_ids(checkpoint.spec, 257)
    with pytest.raises(ConfigError, match="prefill from position 0 to 257 is not within the model's context of 256"):
        rank.run(ids)
    with pytest.raises(ConfigError, match="prefill from position 9 to 5"):
        rank.run(ids[:5], 9)
    assert rank.run(ids[:256]) == 256, "padding reaches beyond the context"
    odd = ModelSpec(**{**SMALL, "hidden_size": 60, "num_heads": 6, "num_kv_heads": 6, "num_lanes": 2})
    with pytest.raises(ConfigError, match=r"it has 60 values in a stream \(a multiple of 8\)"):
        Buffers(layout_of(odd, 2), np.float16, 8, "cpu")


def test_memory_is_counted() -> None:
    spec = ModelSpec(**SMALL)
    buffers = Buffers(layout_of(spec, 4), np.float16, 16, "cpu")
    small, large = buffers.rows(8), buffers.rows(16)
    assert address(small.stream) == address(large.stream), "chunks of different sizes share the memory"
    kept = 2 * spec.num_layers * (256 + 16) * 8 * spec.head_dim * 2
    assert kept < buffers.num_bytes < kept + 2**20
    assert np.prod(large.partials[0][0].shape) == 4 * 16 * 64
