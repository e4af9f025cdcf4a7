"""Prefill of models with experts: the same function as token by token; experts.cu on a CPU is its twin, whatever its tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import MOE, named_shape
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.arrays import float32_of
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import MOST_FLOP, Chunk, Work, chunks, sizes_within, work_of
from kog_dist.workers.prefill.base.matrices import DenseMatrices, matrices_of
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, dense_buffer_bytes
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.dense.operations import PlainDenseOperations
from kog_dist.workers.prefill.experts import device, experts_abi
from kog_dist.workers.prefill.experts.device import OF_ROWS, GroupedExperts, kernel_bytes
from kog_dist.workers.prefill.experts.experts_abi import EXPERTS_PARAMS, constants, tile_for, tiles
from kog_dist.workers.prefill.experts.plain import plain_experts
from kog_dist.workers.prefill.memory import matrix_bytes
from kog_dist.workers.prefill.tape import tile_abi
from kog_dist.workers.prefill.tape.tile_abi import PAIR
from tests.multi.test_bits import Board, ThreadExchange
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu
from tests.unit.prefill.models import SMALL, Rank, interpreter, relative_error, token_ids
from tests.unit.prefill.test_expand import widened
from tests.unit.prefill.test_prefill import check_ranks, last_logits
from tests.unit.test_coded_twin import FORMS, CodedModel
from tests.unit.test_decode_twin import Model
from tests.unit.test_delta_codes_twin import MIXTURE, CodedNets
from tests.unit.test_expert_twin import MXFP4, QUANTISED, VARIANTS, CodedExperts

PROMPT = 45
DENSE: dict[str, Any] = {**SMALL, "delay": 0, "num_layers": 3, "own_head_dim": 8, "num_kv_heads": 4, "window_layers": (0, 2)}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"qk_norm": True, "experts": ExpertsSpec(10, 3, is_normalised=False)},
    "gpt_oss": {
        "qkv_bias": True, "out_bias": True, "attention_sinks": True,
        "experts": ExpertsSpec(6, 2, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 0.8)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_same_function_as_token_by_token(tmp_path: Path, name: str) -> None:
    spec = ModelSpec(**{**DENSE, **MODELS[name]})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    checkpoint = open_checkpoint(tmp_path)
    rank, ids = Rank(checkpoint), token_ids(spec, PROMPT)
    slow = interpreter(checkpoint, "bfloat16")
    for position, token in enumerate(ids[:-1]):
        slow.step(token, position, None)
    wanted = slow.step(ids[-1], PROMPT - 1, SamplingParams(), gather_logits=True).logits
    assert wanted is not None
    assert rank.run(ids) == PROMPT
    assert relative_error(last_logits(rank), wanted) < 1e-3
    whole = rank.cache.copy()
    assert rank.run(ids[:21]) == 21
    assert rank.run(ids, 21) == PROMPT
    assert relative_error(float32_of(rank.cache), float32_of(whole)) < 1e-3
    half = Rank(checkpoint, dtype=np.float16)
    assert half.run(ids) == PROMPT
    assert relative_error(last_logits(half), wanted) < 4e-3


@pytest.mark.parametrize("has_rings", [False, True])
def test_a_stop_within_a_chunk_leaves_it_out(tmp_path: Path, *, has_rings: bool) -> None:
    """Chunks of 16 rows in three parts, each a layer. Where layers keep a ring of positions nothing is left."""
    spec = ModelSpec(**{**DENSE, **MODELS["qwen3_moe"]})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    checkpoint, ids = open_checkpoint(tmp_path), token_ids(spec, PROMPT)
    work = Work(chunk_flop=1.4 * MOST_FLOP, most_parts=3, has_rings=has_rings)
    whole, cut = Rank(checkpoint), Rank(checkpoint, work=work)
    assert whole.run(ids) == PROMPT
    seen: list[int] = []
    ends = {0: 0, 1: 0, 2: 0, 3: 16, 4: 16, 6: 32, 7: 32}  # by the number of parts that are queued
    runner: Any = cut.prefill._runner
    run_part, parts = runner.queue, list[tuple[int, int]]()

    def queue(chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        parts.append((chunk.start, part))
        ended: Callable[[], bool] = run_part(chunk, part)
        return ended

    runner.queue = queue
    for before, reached in ends.items():
        answers = iter([*[False] * before, True])
        parts.clear()
        seen.clear()
        held = cut.prefill.run(ids, 0, should_stop=lambda answers=answers: next(answers), on_progress=seen.append)  # type: ignore[misc]
        assert held == (0 if has_rings and before % 3 else reached)
        assert parts == [(at // 3 * 16, at % 3) for at in range(before)]
        assert seen == list(range(16, reached + 1, 16))
    assert cut.prefill.run(ids, held, should_stop=lambda: False) == PROMPT
    assert np.array_equal(whole.cache, cut.cache)
    assert np.array_equal(whole.buffers.last_streams, cut.buffers.last_streams)


def test_a_stop_within_a_chunk_keeps_what_was_there_where_windowed_layers_keep_all(tmp_path: Path) -> None:
    """A prompt goes on behind 40 positions, is stopped within its second chunk, and goes on: the bits are those of rings."""
    spec = ModelSpec(**{**DENSE, **MODELS["gpt_oss"]})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    checkpoint, ids = open_checkpoint(tmp_path), token_ids(spec, 150)
    ring = Rank(checkpoint, work=Work(chunk_flop=1.4 * MOST_FLOP, most_parts=3, has_rings=True))
    whole = Rank(checkpoint, whole_windows=True, work=Work(chunk_flop=1.4 * MOST_FLOP, most_parts=3))
    assert ring.layout.has_rings
    assert ring.layout.capacity(0) < 150 <= whole.layout.capacity(0)
    for rank in (ring, whole):
        assert rank.run(ids[:144]) == 144
    asked = iter([False] * 4 + [True])
    assert whole.prefill.run(ids, 40, should_stop=lambda: next(asked)) == 56, "a step back over more than a ring"
    assert whole.run(ids, 56) == ring.run(ids) == 150
    for layer in range(spec.num_layers):
        first = ring.layout.first_kept(layer, 150)
        pairs = [rank.layout.load(rank.cache, layer, first, 150) for rank in (ring, whole)]
        for part, other in zip(*pairs, strict=True):
            assert np.array_equal(part, other), f"layer {layer}"
    assert np.array_equal(ring.buffers.last_streams, whole.buffers.last_streams)


@pytest.mark.parametrize("name", MOE)
def test_what_a_stop_waits_for_is_bounded(name: str) -> None:
    """Two parts at most are queued; what they take of experts is in docs/moe.md."""
    spec = named_shape(f"{name}@65536")[0]
    work, sizes = work_of(spec), sizes_within(spec)
    assert sizes[-1] == 4096
    assert work == replace(work_of(spec, has_rings=True), has_rings=False), "chunks are the same with rings"
    for start in (0, 4096, 32768):
        for chunk in chunks(start, min(start + 9000, 65536), sizes, work=work):
            flop = work.of(chunk.start, chunk.size) / chunk.num_parts
            assert flop <= (MOST_FLOP if chunk.num_parts in (1, spec.num_layers) else MOST_FLOP / 2)


MEASURED_MS = {  # of chunks on an H100 (docs/results/prefill-experts-h100.txt), by their rows
    "qwen3-30b-a3b": {128: 13.8, 512: 20.5, 1024: 27.3, 2048: 46.7, 4096: 87.2},
    "gpt-oss-20b": {128: 7.5, 512: 11.7, 1024: 19.3, 2048: 35.4, 4096: 69.1},
    "gpt-oss-120b": {128: 17.8, 512: 30.7, 1024: 42.1, 2048: 63.9, 4096: 116.1},
}


@pytest.mark.parametrize("name", MEASURED_MS)
def test_no_chunk_takes_longer_than_its_work_says(name: str) -> None:
    """MOST_FLOP is 40 ms."""
    spec = named_shape(f"{name}@9216")[0]
    work, sizes = work_of(spec), sizes_within(spec)
    for size, measured_ms in MEASURED_MS[name].items():
        (chunk,) = chunks(0, size, sizes, work=work)
        assert measured_ms <= 40 * work.of(0, size) / MOST_FLOP
        num_queued = 1 if chunk.num_parts == 1 else 2  # two whole chunks if both have little work
        assert num_queued * measured_ms / chunk.num_parts <= 40


def test_ranks_that_share_the_lanes(tmp_path: Path) -> None:
    """Biases are those of the first lane's rank, and the router is whole on both."""
    spec, board = ModelSpec(**{**DENSE, **MODELS["gpt_oss"]}), Board(2)
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    check_ranks(open_checkpoint(tmp_path), 2, lambda index, prefilled: prefilled(ThreadExchange(board, index)))


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_counted_beforehand(tmp_path: Path, name: str) -> None:
    spec = ModelSpec(**{**DENSE, **MODELS[name]})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    rank = Rank(open_checkpoint(tmp_path), lanes=range(2), dtype=np.float16)
    assert dense_buffer_bytes(rank.layout, 16) == rank.buffers.num_bytes
    kept = [getattr(layer, part) for layer in rank.matrices for part in layer.__slots__]
    assert matrix_bytes(spec, 2) == sum(one.nbytes for one in kept if one is not None)
    assert misfit(spec) == misfit(spec, Coding.of(MXFP4, is_of_experts=True)) == ""
    assert misfit(spec, Coding("E4M3", 1, "F32")) == ""
    assert "experts in E4M3 with one scale" in misfit(spec, Coding("E4M3", 0, "F32"))
    assert work_of(spec).row_flop > work_of(replace(spec, experts=replace(spec.experts, per_token=1))).row_flop  # type: ignore[type-var]


def test_tiles_are_filled_and_have_room() -> None:
    for name in ("qwen3-30b-a3b", "gpt-oss-120b", "qwen3-30b-a3b+fp8", "qwen3-30b-a3b+int4"):
        spec, codings = named_shape(name)
        own = KernelShape(spec, range(spec.num_lanes), **codings).experts
        assert own is not None
        found = tiles(own)
        of_4_bit = "gpt-oss" in name or "int4" in name
        large, small = 192 if of_4_bit else 256, 64 if "fp8" in name else 96
        middle = [96, large, large] if of_4_bit else [small, small, 96]
        pairs = (8, 2048, 2560, 8192, 16384, 32768)
        assert [tile_for(count, 128, found).rows for count in pairs] == [small, *middle, large, large]
        assert tile_for(1024, 32, found).rows == small  # few experts are chosen about evenly
        assert tile_for(2048, 32, found).rows == (large if of_4_bit else 96)
        for tile in found:
            assert tile.stages >= 3
            assert tile.ctas * (tile.shared_bytes + 1024) <= 228 << 10
            assert tile.rows % tile.least == 0


NUM_TOKENS, MANY_TOKENS = 19, 160  # of a chunk; tiles of all widths have pairs where there are many
ALONE = dict.fromkeys(OF_ROWS, 1)  # thread blocks of a cluster
# As `experts_abi` has tiles.
FEW_PAIRS, MORE_PAIRS = {32: (2, 16, 128, 2, False)}, {96: (1, 32, 64, 3, False), 128: (1, 32, 64, 2, True)}
FEW = replace(VARIANTS["qwen3_moe"], num_lanes=2, experts=ExpertsSpec(3, 2, is_normalised=False))
SHAPES: dict[str, tuple[ModelSpec, str, dict[int, Any], int]] = {  # dtype, tiles, how many tokens
    "qwen3_moe": (replace(FEW, hidden_size=224), "float16", FEW_PAIRS | MORE_PAIRS, MANY_TOKENS),
    "three of sixteen": (replace(VARIANTS["qwen3_moe, three of sixteen"], num_lanes=2), "bfloat16", FEW_PAIRS, NUM_TOKENS),
    "ten of 512": (replace(VARIANTS["qwen3_moe, ten of 512"], num_lanes=2), "bfloat16", FEW_PAIRS, NUM_TOKENS),
    "gpt_oss": (replace(VARIANTS["gpt_oss"], num_lanes=2, num_layers=2, window_layers=(0,)), "bfloat16", FEW_PAIRS, NUM_TOKENS),
}


class Case:
    """A rank's experts on a CPU, as the twin has them and as the kernels read them."""

    def __init__(self, folder: Path, model: Any, shape: KernelShape, num_tokens: int) -> None:
        spec, lanes = shape.spec, shape.hosted_lanes
        self.num_tokens, self.size = num_tokens, num_tokens + 2
        assert shape.experts is not None
        self.spec, self.layout, self.tiles = spec, CacheLayout.of(shape), experts_abi.tiles(shape.experts)
        weights = model.weights(shape).experts
        assert weights is not None

        def tensor(name: str) -> Any:
            values = getattr(model, "values", {})
            return values[name] if name in values else widened(model.words[name], model.dtype)

        self.buffers = DenseBuffers(self.layout, np.float16, self.size, "cpu", shape.delta)
        self.buffers.last_position[0] = num_tokens - 1
        self.matrices: list[DenseMatrices] = matrices_of(spec, lanes, tensor, np.float16).layers()
        experts = [plain_experts(spec, layer, lanes, tensor) for layer in range(spec.num_layers)]
        cache = np.zeros(self.layout.num_values, np.uint16)
        self.twin = PlainDenseOperations(self.buffers, np.zeros((1, 1)), cache, experts)
        kernels = kernel_bytes(shape)
        library = ctypes.CDLL(
            str(compiled(folder, "experts", constants(shape), kernels, "ExpertsLaunch", "-Og", cluster=PAIR, clusters=ALONE))
        )  # fmt: skip
        launchers = {name: launcher(library, name, EXPERTS_PARAMS.size_bytes) for name in kernels}
        at_once = dict.fromkeys(kernels, 2)  # so that they take tiles in turn
        self.experts = GroupedExperts(shape, weights, self.buffers.last_position, launchers, at_once, map_on_cpu)

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every tile gives the twin's values, and all the same bits."""
        spec, layer, rows = self.spec, self.spec.num_layers - 1, self.buffers.rows(self.size)
        rows.place[0], own, num_tokens = 0, rows.experts, self.num_tokens
        assert own is not None
        stream = np.random.default_rng(5).standard_normal((self.size, spec.hidden_size), np.float32)
        stream[num_tokens:] = 0
        rows.stream[...] = stream
        self.twin._norm(rows, np.ones(spec.hidden_size, np.float32))
        self.twin.mix(rows, self.matrices[layer], layer)
        wanted, chosen, weights = rows.partial.astype(np.float32), own.chosen.copy(), own.weights.copy()
        found = []
        for tile in self.tiles:
            outputs = (own.chosen, own.places, own.offsets, own.tiles, own.weights, own.activation, own.result,
                       rows.partial)  # fmt: skip
            for part in outputs:
                part.fill(0 if part is own.activation else 77)  # beside a lane's columns it stays 0
            monkeypatch.setattr(device, "tile_for", lambda *_, tile=tile: tile)
            self.experts.run(rows, own, self.matrices[layer].router_bias, layer)
            assert np.array_equal(own.chosen, chosen)
            assert relative_error(own.weights[:num_tokens], weights[:num_tokens]) < 1e-5
            pairs = chosen[:num_tokens].size
            assert own.offsets[0] == 0
            assert own.offsets[-1] == pairs
            counts = [(chosen[:num_tokens] == expert).sum() for expert in range(len(own.offsets) - 1)]
            assert np.array_equal(np.diff(own.offsets), counts)
            places = own.places[:num_tokens]
            assert np.array_equal(np.sort(places, axis=None), np.arange(pairs))
            assert relative_error(rows.partial, wanted) < 1e-3
            assert not rows.partial[:, num_tokens:].any()
            found.append(rows.partial.tobytes())
        assert len(set(found)) == 1


def set_sizes(monkeypatch: pytest.MonkeyPatch, made: dict[int, Any]) -> None:
    """Threads and programs are expensive here. Two slots of the ring are used again in each of these models."""
    monkeypatch.setattr(device, "ROW_THREADS", 32)
    monkeypatch.setattr(tile_abi, "_MOST_STAGES", 2)
    monkeypatch.setattr(experts_abi, "_TILES", made)
    monkeypatch.setattr(experts_abi, "_TILES_OF_BITS", dict.fromkeys((4, 8, 16), tuple(made)))
    for module in (device, experts_abi):
        monkeypatch.setattr(module, "SORT_THREADS", 64)


@needs_compiler
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spec, dtype, made, num_tokens = SHAPES[name]
    set_sizes(monkeypatch, made)
    shape = KernelShape(spec, range(spec.num_lanes), dtype, max_ctas=4)
    Case(tmp_path, Model(spec, dtype, monkeypatch), shape, num_tokens).check(monkeypatch)


@needs_compiler
def test_kernels_are_the_twin_of_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks, whose lane begins in the middle of a group of 32 columns."""
    set_sizes(monkeypatch, FEW_PAIRS)
    model = CodedExperts(monkeypatch)
    hosted = model.spec.lanes_of_rank(1, 2)
    shape = KernelShape(model.spec, hosted, model.dtype, num_ranks=2, max_ctas=4, coding=Coding.of(MXFP4, is_of_experts=True))
    Case(tmp_path, model, shape, NUM_TOKENS).check(monkeypatch)


@needs_compiler
@pytest.mark.parametrize("form", [name for name in FORMS if "a scale for" not in name])
def test_kernels_are_the_twin_of_quantised_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    set_sizes(monkeypatch, FEW_PAIRS if form != "FP8, blocks" else MORE_PAIRS)
    model = CodedModel(replace(QUANTISED, hidden_size=288), "bfloat16", FORMS[form], monkeypatch)
    shape = KernelShape(model.spec, range(model.spec.num_lanes), model.dtype, max_ctas=4, coding=Coding.of(FORMS[form]))
    Case(tmp_path, model, shape, NUM_TOKENS).check(monkeypatch)


@needs_compiler
@pytest.mark.parametrize("number", ["E4M3", "INT4"])
def test_kernels_are_the_twin_of_quantised_experts_beside_a_shared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """Three of sixteen, whose columns of `down` warps take in turn."""
    set_sizes(monkeypatch, FEW_PAIRS)
    form = WeightFormat(number, 1, 128, "BF16")
    model = CodedNets(MIXTURE, "bfloat16", form, monkeypatch)
    shape = KernelShape(model.spec, range(model.spec.num_lanes), model.dtype, max_ctas=4, coding=Coding.of(form))
    assert shape.experts is not None
    assert shape.experts.takes_turns
    Case(tmp_path, model, shape, NUM_TOKENS).check(monkeypatch)
