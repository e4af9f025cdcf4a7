"""The physical tape: every weight is there once, in the place where the kernel looks for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.plan.steps import LAYER_OPS, Phase
from kog_dist.decode.tape_packing import (
    STEP_COLUMNS,
    OpShape,
    interleave,
    owned_rows,
    pack,
    put_on_tape,
    take_off_tape,
    unpack,
)
from kog_dist.errors import ConfigError
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b
from kog_dist.workers.cuda.geometry import EIGHT_WARPS, TWELVE_WARPS, Geometry
from kog_dist.workers.cuda.kernel_shape import KernelShape

WARPS = 12


def numbered(rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    """A matrix whose values differ from their neighbours, and are never 0."""
    return (np.arange(rows * columns, dtype=np.uint32) % 65521 + 1).astype(np.uint16).reshape(rows, columns)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400), columns=st.integers(1, 900), num_ctas=st.integers(1, 10), multiple=st.sampled_from([1, 2, 4]),
    geometry=st.sampled_from([TWELVE_WARPS, EIGHT_WARPS]),
)  # fmt: skip
def test_unpack_is_the_inverse_of_pack(rows: int, columns: int, num_ctas: int, multiple: int, geometry: Geometry) -> None:
    matrix = numbered(rows, columns)
    shape = geometry.op_shape(owned_rows(rows, num_ctas, multiple), columns, multiple)
    tiles = pack(matrix, shape, num_ctas)
    assert tiles.shape == (shape.num_tiles, num_ctas, shape.tile_values)
    assert num_ctas * shape.num_values <= tiles.size
    assert np.array_equal(unpack(tiles, shape, rows, columns), matrix)
    tape = np.zeros(num_ctas * (7 + shape.num_values + 5), np.uint16)
    put_on_tape(tape, 7, shape, tiles)
    assert np.array_equal(take_off_tape(tape, 7, shape, num_ctas), tiles), "what is left out is padding"
    assert np.count_nonzero(tape[7 * num_ctas :][: num_ctas * shape.num_values]) == np.count_nonzero(tape) == rows * columns
    assert np.count_nonzero(tiles) == rows * columns  # the rest is padding


MEMORY_ORDER = np.array([0, 1, 4, 5, 2, 3, 6, 7])  # of eight neighbouring columns: what one thread gives to the matrix unit


def test_tape_order_is_block_tile_thread_block_warp_step_row_column() -> None:
    shape = OpShape(rows=6, blocks=2, per=8, steps=4, warps=WARPS)
    matrix = numbered(12 * 3, 8 * WARPS * STEP_COLUMNS)
    values, offset = pack(matrix, shape, 3).ravel(), 0
    for block, tile, cta in np.ndindex(shape.blocks, shape.tiles, 3):
        for warp in range(WARPS):
            for step in range(shape.steps):
                first = (warp * shape.per + tile * shape.steps + step) * STEP_COLUMNS
                for row in range(shape.rows):
                    found = values[offset : offset + STEP_COLUMNS].reshape(-1, 8)[:, MEMORY_ORDER.argsort()].ravel()
                    wanted = matrix[cta * shape.cta_rows + block * shape.rows + row, first : first + STEP_COLUMNS]
                    assert np.array_equal(found, wanted), (block, tile, cta, warp, step, row)
                    offset += STEP_COLUMNS
    assert offset == len(values) == 3 * shape.num_values


def test_products_lie_one_after_the_other() -> None:
    first, second = OpShape(rows=6, blocks=2, per=8, steps=4, warps=WARPS), OpShape(rows=4, blocks=1, per=3, steps=1, warps=WARPS)
    tape = np.zeros(3 * (first.num_values + second.num_values), np.uint16)
    for number, (position, shape) in enumerate(((0, first), (first.num_values, second))):
        put_on_tape(tape, position, shape, np.full((shape.num_tiles, 3, shape.tile_values), 1 + number, np.uint16))
    assert tape.tolist() == [1] * (3 * first.num_values) + [2] * (3 * second.num_values)


def test_gate_and_up_rows_stand_side_by_side() -> None:
    gate, up = numbered(5, 3), numbered(5, 3) + np.uint16(1000)
    both = interleave(gate, up)
    assert np.array_equal(both[0::2], gate)
    assert np.array_equal(both[1::2], up)


def test_a_matrix_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack(numbered(25, 384), TWELVE_WARPS.op_shape(24, 384, 2), 1)


def test_2b_shape_divides_without_rounding_loss() -> None:
    shape = KernelShape(laneformer_2b(), range(8))
    assert (shape.num_ctas, shape.ring.num_slots) == (128, 10)
    assert [op.cta_rows for op in (shape.ops[name] for name in LAYER_OPS)] == [6, 24, 24, 24]
    tape_bytes = 2 * shape.tape.num_values * shape.num_ctas
    assert laneformer_2b().bytes_per_token() <= tape_bytes < 1.001 * laneformer_2b().bytes_per_token()


def test_few_lanes_have_halves_of_tiles() -> None:
    shapes = [KernelShape(laneformer_2b(), range(num_lanes)) for num_lanes in (1, 2, 4, 8)]
    assert [(shape.ring.num_pieces, shape.ring.in_flight) for shape in shapes] == [(2, 4), (2, 5), (1, 3), (1, 3)]
    assert [shape.ring.far_in_flight for shape in shapes] == [4, 4, 3, 3]


def test_other_numbers_of_a_ring_can_be_tried() -> None:
    shapes = [KernelShape(laneformer_2b(), range(num_lanes)) for num_lanes in (1, 2, 8)]
    whole = TrialShape.of(shapes[0], pieces=1).ring
    assert (whole.num_pieces, whole.in_flight, whole.num_slots) == (1, 2, shapes[0].ring.num_slots)
    assert TrialShape.of(shapes[2], pieces=2).ring.in_flight == 6
    ring = TrialShape.of(TrialShape.of(shapes[1], pieces_in_flight=5), pieces_in_flight=4).ring
    assert (ring.in_flight, ring.far_in_flight) == (4, 4)
    assert TrialShape.of(shapes[2], max_slots=8).ring.num_slots == 8 < shapes[2].ring.num_slots
    assert TrialShape.of(shapes[2], copies=2).words.replicas == 2 < shapes[2].words.replicas
    assert TrialShape.of(shapes[0], matrix_warps=8).geometry is EIGHT_WARPS
    with pytest.raises(ConfigError, match="ring tiles in 5 pieces"):
        TrialShape.of(shapes[0], pieces=5)


@pytest.mark.parametrize(("head", "columns"), [(HeadType.LANE, 8), (HeadType.VOCAB_PARALLEL, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_heads_of_the_2b_shape_divide_alike(head: HeadType, columns: int, world_size: int) -> None:
    spec = replace(laneformer_2b(), head_type=head)
    shape = KernelShape(spec, spec.lanes_of_rank(0, world_size), num_ranks=world_size)
    assert (shape.head.num_products, shape.head.num_ctas) == (columns, 128 // shape.num_lanes if columns == 1 else 128)
    assert 250 // world_size <= shape.head.form.cta_rows <= 264 // world_size
    tape_bytes = 2 * shape.tape.num_values * shape.num_ctas * world_size
    assert spec.bytes_per_token() <= tape_bytes < 1.03 * spec.bytes_per_token()


def test_every_thread_block_owns_a_row_of_the_residual() -> None:
    for hidden, heads in ((64, 4), (192, 12), (256, 16), (960, 20), (4096, 32)):
        spec = ModelSpec(hidden, 2, heads, heads, 4 * hidden, 1000, num_lanes=4, delay=1)
        shape = KernelShape(spec, range(4))
        owned = shape.ops[Phase.OUT].cta_rows
        assert shape.ops[Phase.DOWN].cta_rows == owned
        assert (shape.num_ctas - 1) * owned < hidden <= shape.num_ctas * owned
        assert shape.num_ctas * shape.head.form.cta_rows >= spec.vocab_size


def test_models_that_the_kernel_cannot_run_are_refused_by_name() -> None:
    fine = ModelSpec(256, 2, 16, 8, 1024, 1000, num_lanes=8)
    KernelShape(fine, range(8))
    KernelShape(replace(fine, head_type=HeadType.LANE), range(8), max_ctas=4)
    with pytest.raises(ConfigError, match="8 lanes, but only 4 thread blocks"):
        KernelShape(replace(fine, head_type=HeadType.VOCAB_PARALLEL), range(8), max_ctas=4)
    with pytest.raises(ConfigError, match="head_dim 8"):
        KernelShape(replace(fine, num_heads=32), range(8))
    with pytest.raises(ConfigError, match="float32 weights"):
        KernelShape(fine, range(8), weight_dtype="float32")
