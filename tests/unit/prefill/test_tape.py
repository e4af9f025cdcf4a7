"""Products with quantised matrices on the monokernel's tape: tape.cu on a CPU is the definition, whatever its tiles and ranks."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.bench.shapes import named_shape
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.steps import Phase
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES
from kog_dist.workers.prefill.base.reference import silu
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, DenseRows
from kog_dist.workers.prefill.expand.expanded import places_on_tape
from kog_dist.workers.prefill.tape import tape_abi, tile_abi
from kog_dist.workers.prefill.tape.products import TapeProducts, kernel_bytes
from kog_dist.workers.prefill.tape.tape_abi import PHASES, TAPE_PARAMS, constants, is_multiplied_on_tape, tiles
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu
from tests.unit.prefill.models import ordered, relative_error
from tests.unit.prefill.test_expand import twin
from tests.unit.test_coded_twin import DENSE, FORMS, CodedModel
from tests.unit.test_expert_twin import QUANTISED

SPEC = replace(DENSE, own_head_dim=32, hidden_size=288, num_layers=2)  # three steps of 128 columns, the last with few
FORM = "FP8, blocks"
FEW, ALONE, HALVED = {32: (2, 32, 128)}, {32: (1, 32, 128)}, {64: (1, 32, 64)}  # as `tape_abi` has them
NUM_TOKENS, SIZE = 35, 70  # the third tile of 32 rows has none, and of 64 the second
SIZES = (1, *CHUNK_SIZES)


def test_order_of_products() -> None:
    assert ordered(np.arange(64))[:40].tolist() == [
        0, 1, 8, 9, 16, 17, 24, 25, 4, 5, 12, 13, 20, 21, 28, 29, 2, 3, 10, 11, 18, 19, 26, 27, 6, 7, 14, 15, 22, 23, 30, 31,
        32, 33, 40, 41, 48, 49, 56, 57,
    ]  # fmt: skip


class Case:
    """A rank's products on a CPU: inputs, and what they should give."""

    def __init__(self, folder: Path, model: CodedModel, hosted: range) -> None:
        folder.mkdir()
        self.shape = KernelShape(model.spec, hosted, model.dtype, num_ranks=model.spec.num_lanes // len(hosted), max_ctas=5,
                                 coding=Coding.of(model.form))  # fmt: skip
        assert is_multiplied_on_tape(self.shape)
        self.layer = twin(model, hosted)[1]
        self.buffers = DenseBuffers(CacheLayout.of(self.shape), np.float16, SIZE, "cpu")
        self.rows: DenseRows = self.buffers.rows(SIZE)
        self.rows.place[0] = 7
        self.buffers.last_position[0] = 7 + NUM_TOKENS - 1
        kernels = kernel_bytes(self.shape)
        library = ctypes.CDLL(str(compiled(folder, "tape", constants(self.shape), kernels, "TapeLaunch", "-Og", cluster=2)))
        launchers = {name: launcher(library, name, TAPE_PARAMS.size_bytes) for name in kernels}
        places, last_position = places_on_tape(self.shape), self.buffers.last_position
        self.products = TapeProducts(self.shape, model.weights(self.shape), places, last_position, launchers, map_on_cpu)
        generator, spec = np.random.default_rng(3), model.spec

        def drawn(lanes: int, columns: int) -> NDArray[np.float16]:  # of all lanes, whoever hosts them
            values = generator.standard_normal((lanes, SIZE, columns), np.float32).astype(np.float16)
            return values if lanes == 1 else values[list(hosted)]

        self.x = drawn(1, spec.hidden_size)
        self.mixed = drawn(spec.num_lanes, spec.lane_heads * spec.head_dim)
        self.activation = drawn(spec.num_lanes, spec.lane_ffn)

    def run(self, tile_idx: int = 0, tile_rows: int = 0) -> dict[Phase, NDArray[Any]]:
        """What all products give in tiles of so many rows, as many as there is room for unless told otherwise, with padding."""
        tile = tiles(self.shape)[tile_idx]
        rows, found = self.rows, dict[Phase, NDArray[Any]]()
        self.products.tile_for = lambda phase, size: (tile, tile_rows or tile.rows)  # type: ignore[method-assign]
        lowered = np.ascontiguousarray(ordered(self.activation).swapaxes(0, 1)).swapaxes(0, 1)
        inputs = {
            Phase.QKV: ordered(self.x[0]),
            Phase.OUT: ordered(self.mixed),
            Phase.GATE_UP: ordered(self.x[0]),
            Phase.DOWN: lowered,
        }
        outputs = {Phase.QKV: rows.qkv, Phase.OUT: rows.partial, Phase.GATE_UP: rows.activation, Phase.DOWN: rows.partial}
        for phase in PHASES:
            outputs[phase].fill(77)
            self.products(phase, 1, SIZE, rows.place, inputs[phase], outputs[phase])
            found[phase] = outputs[phase].copy()
        return found

    def check(self, found: dict[Phase, NDArray[Any]]) -> None:
        """Against the values of the codes, in float64."""

        def times(x: NDArray[Any], matrix: NDArray[Any]) -> NDArray[np.float64]:
            product: NDArray[np.float64] = x[:, :NUM_TOKENS].astype(np.float64) @ matrix.astype(np.float64).swapaxes(1, 2)
            return product

        def by_row(lanes: NDArray[Any]) -> NDArray[Any]:
            return lanes.swapaxes(0, 1).reshape(NUM_TOKENS, -1)

        gate, up = np.split(times(self.x, self.layer.w13), 2, axis=2)
        activation = silu(gate.astype(np.float32)) * up * ACTIVATION_SCALE
        assert relative_error(found[Phase.QKV][:NUM_TOKENS], by_row(times(self.x, self.layer.wqkv))) < 5e-4
        assert relative_error(found[Phase.OUT][:, :NUM_TOKENS], times(self.mixed, self.layer.wo)) < 7e-4
        assert relative_error(found[Phase.GATE_UP][:, :NUM_TOKENS], ordered(activation)) < 1e-3
        assert relative_error(found[Phase.DOWN][:, :NUM_TOKENS], times(self.activation, self.layer.w2)) < 7e-4
        assert not found[Phase.QKV][NUM_TOKENS:].any()
        assert not found[Phase.OUT][:, NUM_TOKENS:].any()
        assert not found[Phase.DOWN][:, NUM_TOKENS:].any()


def bits(found: dict[Phase, NDArray[Any]], phase: Phase) -> NDArray[Any]:
    """Of a product's results, by row and lane; of activations padding is nobody's."""
    values = found[phase]
    return values if phase is Phase.QKV else np.ascontiguousarray(values[:, :NUM_TOKENS])


@needs_compiler
@pytest.mark.parametrize("form", [form for form in FORMS if form != FORM])  # which is below in all tiles
def test_products_are_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(tape_abi, "_TILES", FEW)
    case = Case(tmp_path / "a", CodedModel(SPEC, "bfloat16", FORMS[form], monkeypatch), range(SPEC.num_lanes))
    case.check(case.run())


@needs_compiler
def test_bits_depend_neither_on_tiles_nor_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CodedModel(SPEC, "bfloat16", FORMS[FORM], monkeypatch)
    found = {}
    for names, made, most_stages in ((["alone"], ALONE, 6), (["few", "halved"], FEW | HALVED, 2)):
        monkeypatch.setattr(tape_abi, "_TILES", made)
        monkeypatch.setattr(tile_abi, "_MOST_STAGES", most_stages)  # with two, each slot is used again
        case = Case(tmp_path / names[0], model, range(SPEC.num_lanes))
        for tile_idx, name in enumerate(names):
            found[name] = case.run(tile_idx)
            case.check(found[name])
    found["half as many rows"] = case.run(tile_idx=1, tile_rows=32)
    case.buffers.last_position[0] = 7 + 8  # of a tile of 64 rows half is multiplied, and the other half is 0
    few = case.run(tile_idx=1)
    assert np.array_equal(few[Phase.QKV][:9], found["few"][Phase.QKV][:9])
    assert not few[Phase.QKV][9:].any()
    assert not few[Phase.DOWN][:, 9:].any()
    for phase in PHASES:
        assert len({bits(one, phase).tobytes() for one in found.values()}) == 1, phase
    monkeypatch.setattr(tape_abi, "_TILES", HALVED)
    case = Case(tmp_path / "second rank", model, range(1, 2))
    half = case.run()
    case.check(half)
    assert np.array_equal(half[Phase.QKV], np.split(found["few"][Phase.QKV], 2, axis=1)[1])
    for phase in (Phase.OUT, Phase.GATE_UP, Phase.DOWN):
        assert np.array_equal(bits(half, phase), bits(found["few"], phase)[1:]), phase


def test_models_that_are_not_multiplied_so() -> None:
    coding = Coding.of(FORMS[FORM])
    assert is_multiplied_on_tape(KernelShape(SPEC, range(1), num_ranks=2, coding=coding))
    assert not is_multiplied_on_tape(KernelShape(SPEC, range(2)))
    assert not is_multiplied_on_tape(KernelShape(replace(SPEC, own_head_dim=16), range(2), coding=coding))
    assert not is_multiplied_on_tape(KernelShape(QUANTISED, range(QUANTISED.num_lanes), coding=coding))


@pytest.mark.parametrize("name", ["llama-3.1-8b+fp8", "llama-3.1-8b+int4", "qwen3-4b+fp8", "qwen3-8b+int4", "llama-3.2-1b+fp8"])
def test_tiles_fit(name: str) -> None:
    spec, codings = named_shape(name)
    shape = KernelShape(spec, range(spec.num_lanes), **codings)
    assert is_multiplied_on_tape(shape)
    for tile in tiles(shape):
        assert tile.stages >= 3
        assert tile.ctas * (tile.shared_bytes + 1024) <= 228 << 10
    nothing = np.zeros(1, np.uint16)
    weights: Any = SimpleNamespace(tape=nothing)
    made = TapeProducts(shape, weights, nothing, nothing, {}, map_on_cpu)
    for size, phase in itertools.product(SIZES, PHASES):
        tile, rows = made.tile_for(phase, size)
        assert tile.rows == (64 if size <= 128 else 256)
        assert rows in range(tile.least, tile.rows + 1, tile.least)
    assert made.tile_for(Phase.DOWN, 4096)[1] == 256
