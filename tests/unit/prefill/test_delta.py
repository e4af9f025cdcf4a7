"""Prefill of models with delta nets and gated attention: its array code is the interpreter's, and states are kept whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coding import Coding
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.layers import DeltaNet, Experts, LayerSpec
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.chunks import MOST_FLOP, Chunk, Work, sizes_within, work_of
from kog_dist.workers.prefill.base.delta_blocks import BLOCK
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, dense_buffer_bytes
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.delta.plain import DeltaInputs, advance
from kog_dist.workers.prefill.delta.state_layout import StateLayout
from kog_dist.workers.prefill.exchange.lane_sums import CommunicatorExchange
from kog_dist.workers.prefill.memory import matrix_bytes
from tests.multi.test_bits import Board, ThreadExchange
from tests.unit.delta_configs import CONFIGS
from tests.unit.prefill.delta_rank import StoredRank, Wanted
from tests.unit.prefill.models import layout_of, relative_error, token_ids
from tests.unit.test_kinds_twin import SPECS, spec_of

LONG = {name: replace(spec, max_context=256) for name, spec in SPECS.items()}
NETS = LONG["delta nets"]
LONG["a shared expert"] = SHARED = ModelSpec.of_layers(
    [LayerSpec(layer.mixer, Experts(32, ExpertsSpec(6, 2), shared_width=64), layer.norm) for layer in NETS.layers],
    hidden_size=64,
    vocab_size=76,
    max_context=256,
    num_lanes=4,
)


@pytest.mark.parametrize("name", LONG)
def test_prompts_have_the_logits_and_states_of_the_interpreter(name: str) -> None:
    rank = StoredRank(LONG[name])
    ids = token_ids(rank.spec, 150)
    wanted = Wanted(rank, ids, behind=(70, 143))
    for end, start in ((70, 0), (143, 70), (150, 0), (2, 0)):  # several chunks, padded ones; behind what was there; again
        assert rank.run(ids[:end], start, cache=1) == end
        assert relative_error(rank.logits(), wanted.logits[end - 1]) < 1e-3, (start, end)
        for found, of_net in zip(rank.states_of(end, cache=1), wanted.states.get(end, []), strict=False):
            for got, kept in zip(found, of_net, strict=True):
                assert relative_error(got, kept) < 1e-3, (start, end)
    assert not rank.states[: len(rank.states) // 2].any(), "another sequence's"


def test_a_step_at_a_time_is_the_rule() -> None:
    """Blocks against the definition, with decays that are slow, fast, and none at all."""
    random = np.random.default_rng(1)
    size, heads = 3 * BLOCK + 5, 4
    query, key = (random.standard_normal((1, size, 2, 16)) for _ in range(2))
    query, key = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (query, key))
    value, beta = random.standard_normal((1, size, heads, 8)), random.random((1, size, heads))
    logs = np.stack([np.full(size, -1e-6), -random.random(size), np.full(size, -30.0), np.zeros(size)], axis=-1)[None]
    state = random.standard_normal((1, heads, 16, 8))
    outputs, behind = advance(state, DeltaInputs(query, key, value, logs, beta))
    for head in range(heads):
        own = state[0, head].copy()
        for at in range(size):
            own *= np.exp(logs[0, at, head])
            k, q = key[0, at, head // 2], query[0, at, head // 2]
            own += np.outer(k, beta[0, at, head] * (value[0, at, head] - k @ own))
            assert np.allclose(outputs[0, at, head], q @ own, atol=1e-5), (head, at)
        assert np.allclose(behind[0, head], own, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [200, 193])
def test_where_chunks_are_divided_between_blocks_changes_no_bit(num_tokens: int) -> None:
    """Also where the last one has a single token."""
    ids = token_ids(NETS, num_tokens)
    ranks = [StoredRank(NETS, sizes=sizes, dtype=np.float16) for sizes in ((64,), (64, 128), (256,))]
    for rank in ranks:
        assert rank.run(ids) == len(ids)
    for end, start in ((128, 0), (192, 128), (num_tokens, 192)):
        assert ranks[0].run(ids[:end], start) == end, "behind a kept state"
    for other in ranks[1:]:
        for found, wanted in zip(ranks[0].states_of(num_tokens), other.states_of(num_tokens), strict=True):
            assert all(map(np.array_equal, found, wanted))
        assert np.array_equal(ranks[0].cache, other.cache)
        assert np.array_equal(ranks[0].buffers.last_streams, other.buffers.last_streams)


def test_a_chunk_that_is_given_up_leaves_states_as_they_were() -> None:
    cut = StoredRank(NETS, work=Work(row_flop=MOST_FLOP / 48, most_parts=4, max_context=256))
    ids, asked = token_ids(NETS, 150), iter([False] * 5 + [True])
    whole = StoredRank(NETS)
    assert whole.run(ids[:64]) == 64
    runner: Any = cut.prefill._runner
    queue, parts = runner.queue, list[tuple[int, int]]()

    def noting(chunk: Chunk, part: int) -> Callable[[], bool]:
        parts.append((chunk.start, part))
        return queue(chunk, part)  # type: ignore[no-any-return]

    runner.queue = noting
    reached = cut.prefill.run(ids, 0, should_stop=lambda: next(asked))
    assert parts == [(0, part) for part in range(3)] + [(64, part) for part in range(2)]
    assert reached == 64
    assert np.array_equal(cut.states, whole.states)
    assert cut.run(ids, reached) == whole.run(ids, 64) == len(ids)
    assert np.array_equal(cut.states, whole.states)
    assert np.array_equal(cut.buffers.last_streams, whole.buffers.last_streams)


def test_a_value_out_of_range_leaves_states_as_they_were() -> None:
    rank = StoredRank(NETS, dtype=np.float16)
    ids = token_ids(NETS, 40)
    assert rank.run(ids[:20]) == 20
    before = rank.states.copy()
    rank.matrices[1].delta_taps[:, -1] = 1e6
    assert rank.run(ids, 20) == 0
    assert np.array_equal(rank.states, before)


@pytest.mark.parametrize("name", ["delta nets", "delta nets, odd shapes"])
def test_ranks_that_share_the_lanes(name: str) -> None:
    """Where heads have other slices than on one rank: states and the last stream are the same, but for roundings of sums."""
    spec, board, num_ranks = LONG[name], Board(2), 2
    ids, alone = token_ids(spec, 75), StoredRank(spec)
    assert alone.run(ids) == 75

    def prefilled(index: int) -> StoredRank:
        exchange = CommunicatorExchange(spec, 64, ThreadExchange(board, index))
        rank = StoredRank(spec, lanes=spec.lanes_of_rank(index, num_ranks), exchange=exchange)
        assert rank.run(ids[:40]) == 40
        assert rank.run(ids, 40) == 75
        return rank

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(pool.map(prefilled, range(num_ranks)))
    for index, rank in enumerate(ranks):
        lanes = spec.lanes_of_rank(index, num_ranks)
        for found, wanted in zip(rank.states_of(75), alone.states_of(75), strict=True):
            for got, kept in zip(found, wanted, strict=True):
                assert relative_error(got, kept[lanes.start : lanes.stop]) < 1e-3
        assert relative_error(rank.buffers.last_streams, alone.buffers.last_streams) < 1e-3


@pytest.mark.parametrize("num_ctas", [1, 16, 128])
def test_states_stand_where_the_kernel_looks_for_them(num_ctas: int) -> None:
    """As phases/delta.cuh has them, by its own names."""
    spec = spec_of(DeltaNet(4, 12, 64, 32, 3), DeltaNet(4, 12, 64, 32, 3))
    shape = DeltaShape.of(spec, spec.num_lanes, num_ctas)
    assert shape is not None
    layout, random, position = StateLayout(shape), np.random.default_rng(2), 7
    states = np.zeros(layout.num_values, np.float32)
    state = random.standard_normal((4, 3, 64, 32)).astype(np.float32)
    past = random.standard_normal((4, 2, 2 * 64 + 3 * 32)).astype(np.float32)
    layout.store(states, 1, position, state, past)
    found = layout.load(states, 1, position)
    assert np.array_equal(found[0], state)
    assert np.array_equal(found[1], past)
    slice_columns, items = 32 // shape.slices, 3 * shape.slices
    warp_columns, item_channels = slice_columns // 4, 2 * 64 + slice_columns
    for lane, head, key, column in random.integers(0, (4, 3, 64, 32), (50, 4)):
        item = ((1 * 4 + lane) * items + head * shape.slices + column // slice_columns) * (64 * slice_columns + 3 * item_channels)
        warp, group = column % slice_columns // warp_columns, column % warp_columns // 4
        assert states[item + ((warp * (warp_columns // 4) + group) * 64 + key) * 4 + column % 4] == state[lane, head, key, column]
        inputs = item + 64 * slice_columns
        for back in (1, 2):
            row = inputs + (position - back) % 3 * item_channels
            assert states[row + key] == past[lane, -back, key], "query"
            assert states[row + 64 + key] == past[lane, -back, 64 + key], "key"
            assert states[row + 128 + column % slice_columns] == past[lane, -back, 128 + head * 32 + column]


@pytest.mark.parametrize("name", LONG)
def test_memory_is_counted_beforehand(name: str) -> None:
    spec = LONG[name]
    layout, shape = layout_of(spec, spec.num_lanes), DeltaShape.of(spec, spec.num_lanes, 16)
    buffers = DenseBuffers(layout, np.float16, 96, "cpu", shape)
    for size in (8, 64, 96):
        buffers.rows(size)
    buffers.last_rows()
    assert dense_buffer_bytes(layout, 96, shape) == buffers.num_bytes
    kept = [getattr(layer, name) for layer in StoredRank(spec, dtype=np.float16).matrices for name in layer.__slots__]
    assert matrix_bytes(spec, spec.num_lanes) == sum(tensor.nbytes for tensor in kept if tensor is not None)


def test_what_cannot_be_taken_is_named() -> None:
    assert [misfit(spec) for spec in SPECS.values()] == [""] * len(SPECS)

    def of_net(*sizes: int) -> ModelSpec:
        return spec_of(DeltaNet(*sizes), NETS.layers[2].mixer)

    assert misfit(of_net(4, 8, 256, 32, 4)) == "keys of 256 values in delta nets (a multiple of 16, at most 128)"
    assert misfit(NETS, Coding("E4M3", 1, "F32")) == ""
    assert misfit(SHARED) == ""
    assert misfit(SPECS["gated attention"], None, "fp8") == "fp8 keys and values of heads of 256 (at most 128)"
    assert misfit(NETS, None, "fp8") == ""
    odd = replace(SHARED.layers[0], ffn=Experts(32, ExpertsSpec(6, 2), shared_width=48))
    assert "a shared expert with 12 columns in a lane" in misfit(replace(SHARED, mixed_layers=(odd,) * 4))
    assert misfit(of_net(4, 8, 32, 8, 4)) == "value heads of 8 values in delta nets (a multiple of 16)"


def test_work_counts_the_products_of_every_kind_of_layer() -> None:
    """Of 27B about 2 FLOP of each weight but embedding and head, and attention of a fourth of its layers."""
    spec = read_config(CONFIGS["Qwen3.5-27B"])
    work = work_of(spec)
    in_layers = spec.num_parameters - 2 * spec.vocab_size * spec.hidden_size
    assert work.row_flop == pytest.approx(2 * in_layers, rel=1e-3)
    assert work.key_flop == 4 * 24 * 256 * 16
    assert work.most_parts == 64
    assert sizes_within(spec)[-1] == 4096
    assert work.parts(4096) > 16, "a stop waits for a few layers"
