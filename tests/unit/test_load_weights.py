"""Loading for the GPU: every word of a checkpoint arrives where the kernel looks for it, in the plan's order; damage is named.

NumPy stands in for cupy: its pinned memory is ordinary memory, its copies are done at once.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kog_dist.bench.fakes.tiny_delta_model import CONFIG, ON_GPUS, WITH_EXPERTS, write_tiny_delta_model
from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.tape_packing import OpShape, interleave, take_off_tape, unpack
from kog_dist.errors import CheckpointError
from kog_dist.launch.gpu_choice import gpu_rank_bytes
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda import load, staging
from kog_dist.workers.cuda.device_weights import DeviceWeights, pack_tape, to_values, to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from tests.unit.test_delta_gguf import converted, keys_of, write

SPEC = ModelSpec(
    hidden_size=96, num_layers=3, num_heads=6, num_kv_heads=2, intermediate_size=136, vocab_size=101, max_context=64, num_lanes=2,
    delay=1,
)  # fmt: skip
SPECS = {
    "as published": SPEC,
    "tied": replace(SPEC, tied_embeddings=True),
    "norms per lane": replace(SPEC, shared_norm_scale=False),
    "norms per lane, aggregate": replace(SPEC, shared_norm_scale=False, pre_norm_lane_agg=True),
    "staggered lanes": replace(SPEC, hidden_size=128, num_heads=8, num_kv_heads=4, intermediate_size=144, num_lanes=4),
    "head of all lanes": replace(SPEC, head_type=HeadType.LANE),
    "head of all lanes, norms per lane": replace(
        SPEC,
        head_type=HeadType.LANE,
        shared_norm_scale=False,
        hidden_size=128,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=144,
        num_lanes=4,
    ),
    "head by lane": replace(SPEC, head_type=HeadType.VOCAB_PARALLEL, vocab_size=102),
    "head by lane, norms per lane": replace(SPEC, head_type=HeadType.VOCAB_PARALLEL, vocab_size=102, shared_norm_scale=False),
    "one lane": replace(SPEC, num_lanes=1, num_kv_heads=6, delay=0),
}


class Array(np.ndarray[Any, Any]):
    """An array with cupy's `data.ptr`."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def pinned(num_bytes: int) -> Any:
    memory = type("Pinned", (ctypes.Array,), {"_type_": ctypes.c_uint8, "_length_": num_bytes, "ptr": property(ctypes.addressof)})
    return memory()


@pytest.fixture(autouse=True)
def numpy_as_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(target: int, source: int, num_bytes: int, _kind: int, _stream: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    cupy: Any = ModuleType("cupy")
    cupy.uint16, cupy.asarray = np.uint16, np.asarray
    cupy.empty = lambda shape, dtype: np.full(shape, 0xEEEE & np.iinfo(dtype).max, dtype).view(Array)
    cupy.get_default_memory_pool = cupy.get_default_pinned_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    cuda: Any = ModuleType("cupy.cuda")
    cuda.Device = lambda: SimpleNamespace(use=lambda: None)
    cuda.alloc_pinned_memory = pinned
    cuda.Event = lambda disable_timing: SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    cuda.Stream = SimpleNamespace(null=SimpleNamespace(ptr=0))
    cuda.runtime = SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1)
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 1000)  # several pieces for each part
    monkeypatch.setattr(load, "AHEAD_BYTES", 50_000)


def stored_words(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Tapes:
    """Takes the products off the tapes of all thread blocks again."""

    def __init__(self, weights: DeviceWeights, shape: KernelShape) -> None:
        self.tape, self.shape, self.position = np.asarray(weights.tape), shape, 0

    def next(self, op: OpShape, rows: int, columns: int) -> np.ndarray[Any, Any]:
        return np.asarray(unpack(self._tiles(op), op, rows, columns))

    def _tiles(self, op: OpShape) -> Any:
        self.position += op.num_values
        return take_off_tape(self.tape, self.position - op.num_values, op, self.shape.num_ctas)

    def head(self) -> np.ndarray[Any, Any]:
        """The LM head's rows of the hosted lanes."""
        shape, (first, last) = self.shape, self.shape.head.vocab_rows
        op, columns = shape.head.form, shape.spec.hidden_size
        if shape.spec.head_type is not HeadType.VOCAB_PARALLEL:
            return np.concatenate([self.next(op, last - first, columns) for _ in range(shape.head.num_products)], axis=1)
        tiles = self._tiles(op)
        parts = [tiles[:, lane * shape.head.num_ctas : (lane + 1) * shape.head.num_ctas] for lane in range(shape.num_lanes)]
        assert not tiles[:, shape.num_lanes * shape.head.num_ctas :].any(), "thread blocks without rows"
        return np.concatenate([unpack(part, op, shape.head.lane_vocab, columns) for part in parts])


def checkpoint_of(folder: Path, spec: ModelSpec, dtype: str = "bfloat16", *, manifest: bool = True) -> Checkpoint:
    write_checkpoint(folder, spec, random_tensors(spec, 3), dtype=dtype, manifest=manifest)
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", SPECS)
def test_every_word_arrives_in_its_place(tmp_path: Path, variant: str, dtype: str) -> None:
    spec = SPECS[variant]
    checkpoint = checkpoint_of(tmp_path, spec, dtype)
    whole, last = range(spec.num_lanes), range(spec.num_lanes - 1, spec.num_lanes)
    for hosted, num_ranks in {(whole, 1), (last, 1), (last, spec.num_lanes)}:  # a rank that is alone knows no other lanes
        shape = KernelShape(spec, hosted, weight_dtype=dtype, kv_dtype=dtype, max_ctas=7, num_ranks=num_ranks)
        weights = load_weights(shape, checkpoint)
        wanted = checkpoint.rank_weights(hosted)
        tapes = Tapes(weights, shape)

        def found(op: OpShape, matrix: np.ndarray[Any, Any], tapes: Tapes = tapes) -> bool:
            return np.array_equal(tapes.next(op, *matrix.shape), stored_words(matrix, dtype))

        for product in shape.layer_products:
            layer = wanted.lanes[product.first_lane].layers[product.layer]
            matrix = {
                Phase.QKV: layer.wqkv,
                Phase.OUT: layer.wo,
                Phase.GATE_UP: np.stack([layer.w1, layer.w3], 1).reshape(-1, spec.hidden_size),
                Phase.DOWN: layer.w2,
            }[product.op]
            assert found(shape.ops[product.op], matrix), product
        norms = []
        for i in range(spec.num_layers):
            layers = [wanted.lanes[lane].layers[i] for lane in (hosted[:1] if spec.shared_norm_scale else hosted)]
            norms.append([[layer.attention_norm for layer in layers], [layer.ffn_norm for layer in layers]])
        head = np.concatenate([wanted.heads[lane] for lane in hosted])
        lanes = shape.head.lanes
        if spec.head_type is HeadType.LANE:
            head = head[:, lanes[0] * spec.hidden_size : (lanes[-1] + 1) * spec.hidden_size]
        assert np.array_equal(tapes.head(), stored_words(head, dtype))
        assert tapes.position == shape.tape.num_values
        assert np.array_equal(weights.norms, stored_words(np.array(norms), dtype))
        shares_final = spec.shared_norm_scale or spec.pre_norm_lane_agg
        norm_of = checkpoint.rank_weights(whole).norms
        final = [norm_of[lane] for lane in (lanes[:1] if shares_final else lanes)]
        assert np.array_equal(weights.final_norm, stored_words(np.array(final), dtype))
        assert np.array_equal(weights.embedding, stored_words(wanted.embedding, dtype))


@pytest.mark.parametrize("hosted", [range(4), range(2, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_every_word_of_delta_nets_arrives_in_its_place(hosted: range, dtype: str, tmp_path: Path) -> None:
    """Of a published folder, whose tensors have several parts of a lane. Where two lanes share a KV head each has its rows.

    Some publish logarithms of rates and norms in float32: they are rounded, as transformers does.
    """
    write_tiny_delta_model(tmp_path, **ON_GPUS)
    rounded = [name for name in ("A_log", "dt_bias", "linear_attn.norm") if dtype == "F32"]
    if rounded:
        whole = load_file(tmp_path / "model.safetensors")
        changed = {
            name: tensor.float() * 1.001 if any(part in name for part in rounded) else tensor for name, tensor in whole.items()
        }
        save_file(changed, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.spec
    assert (checkpoint.dtype, spec.num_lanes, spec.num_kv_heads) == ("bfloat16", 4, 2)
    shape = KernelShape(spec, hosted, max_ctas=7, num_ranks=spec.num_lanes // len(hosted))
    weights, wanted = load_weights(shape, checkpoint), checkpoint.rank_weights(hosted)
    tapes = Tapes(weights, shape)
    for product in shape.layer_products:
        layers = [wanted.lanes[product.first_lane + lane].layers[product.layer] for lane in range(product.num_lanes)]
        matrices = {
            Phase.QKV: [layer.wqkv for layer in layers],
            Phase.DELTA_IN: [layer.wqkv for layer in layers],
            Phase.OUT: [layer.wo for layer in layers],
            Phase.GATE_UP: [interleave(*np.split(layer.w13, 2)) for layer in layers],
            Phase.DOWN: [layer.w2 for layer in layers],
        }[product.op]
        matrix = np.concatenate(matrices)
        assert np.array_equal(tapes.next(shape.ops[product.op], *matrix.shape), stored_words(matrix, "bfloat16")), product
    head = np.concatenate([wanted.heads[lane] for lane in hosted])
    assert np.array_equal(tapes.head(), stored_words(head, "bfloat16"))
    nets = [layer for layer in range(spec.num_layers) if layer not in shape.cache.layers]
    assert shape.delta is not None
    assert tuple(nets) == shape.delta.layers

    def own(layer: int, lane: int, *names: str) -> Any:
        return np.concatenate([wanted.lanes[lane].layers[layer].own[name].reshape(-1) for name in names])

    for found, names in ((weights.delta_taps, ("conv_q", "conv_k", "conv_v")), (weights.delta_factors, ("decay", "dt_bias"))):
        of_all = np.stack([[own(layer, lane, *names) for lane in hosted] for layer in nets])
        assert np.array_equal(np.asarray(found).reshape(of_all.shape), to_words(of_all, "bfloat16"))
    norms = np.stack([own(layer, hosted[0], "norm.weight") for layer in nets])
    assert np.array_equal(np.asarray(weights.delta_norm), to_words(norms, "bfloat16"))
    attending: list[Any] = [wanted.lanes[hosted[0]].layers[layer] for layer in shape.cache.layers]
    of_heads = np.stack([np.stack([layer.q_norm, layer.k_norm]) for layer in attending])
    assert np.array_equal(1 + to_values(np.asarray(weights.head_norms), "bfloat16"), of_heads), "the kernel adds the 1"
    for layer, both in enumerate(np.asarray(weights.norms)):
        first = wanted.lanes[hosted[0]].layers[layer]
        assert np.array_equal(1 + to_values(both[:, 0], "bfloat16"), np.stack([first.attention_norm, first.ffn_norm]))
    vectors = (getattr(weights, f"delta_{name}") for name in ("taps", "factors", "norm"))
    tables = (weights.embedding, weights.norms, weights.final_norm, weights.head_norms, weights.rope, *vectors)
    counted = gpu_rank_bytes(checkpoint, hosted[0] // len(hosted), shape.num_ranks, "bfloat16")
    assert sum(np.asarray(held).nbytes for held in tables) == counted["tables"], "what the launcher counts"


def test_a_gguf_file_of_delta_nets_gives_the_words_of_its_folder(tmp_path: Path) -> None:
    """But for logarithms of rates, which it has as rates: those may come back rounded otherwise."""
    write_tiny_delta_model(tmp_path, **ON_GPUS)
    config = SimpleNamespace(**CONFIG | ON_GPUS)
    tensors = converted(config, "qwen35", load_file(tmp_path / "model.safetensors"))
    write(tmp_path / "model.gguf", "qwen35", keys_of(config, "qwen35", **{"rope.dimension_count": 32}), tensors)
    loaded = []
    for path in (tmp_path, tmp_path / "model.gguf"):
        checkpoint = open_checkpoint(path)
        loaded.append(load_weights(KernelShape(checkpoint.spec, range(4), max_ctas=7), checkpoint))
    of_folder, of_file = loaded
    for name in ("tape", "embedding", "norms", "final_norm", "head_norms", "delta_taps", "delta_norm"):
        assert np.array_equal(getattr(of_folder, name), getattr(of_file, name)), name
    found, wanted = (to_values(np.asarray(one.delta_factors), "bfloat16") for one in (of_file, of_folder))
    assert np.allclose(found, wanted, rtol=2**-7)
    assert (found != wanted).mean() < 0.05


def overwrite(folder: Path, checkpoint: Checkpoint, name: str, element: int, word: int) -> Checkpoint:
    stored = checkpoint.owner[name].tensors[name]
    with checkpoint.owner[name].path.open("r+b") as file:
        file.seek(stored.begin + 2 * element)
        file.write(word.to_bytes(2, "little"))
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    ("dtype", "word"), [("bfloat16", 0x7F80), ("bfloat16", 0xFFC1), ("float16", 0xFC00), ("float16", 0x7C01)]
)
def test_values_that_are_not_finite_are_named(tmp_path: Path, dtype: str, word: int) -> None:
    name = "model.layers.1.feed_forward.w3.weight"
    checkpoint = overwrite(tmp_path, checkpoint_of(tmp_path, SPEC, dtype, manifest=False), name, 77, word)
    shape = KernelShape(SPEC, range(2), weight_dtype=dtype, kv_dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has a value that is not finite \(element 77 of it\)"):
        load_weights(shape, checkpoint)
    load_weights(shape, open_checkpoint(tmp_path, verify=False))


def test_bytes_that_differ_from_the_manifest_are_named(tmp_path: Path) -> None:
    name = "model.layers.2.attention.wo.weight"
    checkpoint = overwrite(tmp_path, checkpoint_of(tmp_path, SPEC), name, SPEC.hidden_size * 48 + 5, 0x3F80)
    with pytest.raises(CheckpointError, match=rf"tensor {name}, rows 1 to 2, differs from its SHA-256"):
        load_weights(KernelShape(SPEC, range(2)), checkpoint)
    load_weights(KernelShape(SPEC, range(1)), checkpoint)  # the other lane's rank finds it
    load_weights(KernelShape(SPEC, range(2)), open_checkpoint(tmp_path, verify=False))


def test_a_file_that_was_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, SPEC)
    path = checkpoint.files[0].path
    path.write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="changed or replaced"):
        load_weights(KernelShape(SPEC, range(2)), checkpoint)


# ---- the order of the tape ----
def packed_products(shape: KernelShape) -> list[tuple[Phase, int, int]]:
    """What `pack_tape` puts on the tapes, in order: (phase, layer, hosted lane)."""
    asked: list[tuple[Phase, int, int]] = []

    def source(phase: Phase, layer: int, lane: int) -> Any:
        asked.append((phase, layer, lane))
        return np.full((1, 1), len(asked), np.uint16)  # the first value of the first thread block's first tile

    tapes = np.zeros(shape.num_ctas * shape.tape.num_values, np.uint16)
    pack_tape(shape, source, tapes)
    layers = [layer for phase, layer, _ in asked if phase is not Phase.HEAD]
    assert layers == sorted(layers), "a layer's tensors are read together"
    found, position = [], 0
    while position < shape.tape.num_values:
        number = int(tapes[position * shape.num_ctas])
        assert number, f"no product begins at value {position}"
        found.append(asked[number - 1])
        position += shape.ops[found[-1][0]].num_values
    assert position == shape.tape.num_values
    return found


@pytest.mark.parametrize("hosted", [range(8), range(4, 8), range(2, 4), range(7, 8)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"delay": 0}, {"delay": 0, "experts": ExpertsSpec(6, 2)}], ids=str)
def test_tape_has_the_order_of_the_products(hosted: range, changes: dict[str, Any]) -> None:
    """Those of the plan. Experts stand elsewhere, with a router on the tape."""
    spec = replace(ModelSpec(128, 3, 8, 8, 256, 100, max_context=64, num_lanes=8, delay=1), **changes)
    shape = KernelShape(spec, hosted, max_ctas=4)
    wanted = []
    for product in shape.products:
        if spec.experts is None or product.op not in (Phase.GATE_UP, Phase.DOWN):
            lane = 0 if product.op is Phase.ROUTE else product.first_lane - hosted[0]
            wanted.append((product.op, max(product.layer, 0), lane))
    assert packed_products(shape) == wanted


@pytest.mark.parametrize("hosted", [range(8), range(4, 6), range(7, 8)], ids=str)
def test_rows_of_the_2b_shape_divide_evenly(hosted: range) -> None:
    """Over 128 thread blocks, for the layers' products."""
    shape = KernelShape(laneformer_2b(), hosted)
    rows = {product.op: (product.rows.num_rows, product.rows.per_cta) for product in shape.layer_products}
    assert rows == {Phase.QKV: (768, 6), Phase.OUT: (3072, 24), Phase.GATE_UP: (3072, 24), Phase.DOWN: (3072, 24)}


@pytest.mark.parametrize("hosted", [range(4), range(2, 4)], ids=str)
def test_every_word_of_experts_beside_delta_nets_arrives_in_its_place(hosted: range, tmp_path: Path) -> None:
    """Router and gate, and the shared expert, on the tape; the others in the order of their numbers."""
    write_tiny_delta_model(tmp_path, **ON_GPUS, **WITH_EXPERTS)
    checkpoint = open_checkpoint(tmp_path)
    shape = KernelShape(checkpoint.spec, hosted, max_ctas=4, num_ranks=4 // len(hosted))
    weights, wanted, own = load_weights(shape, checkpoint), checkpoint.rank_weights(hosted), shape.experts
    assert own is not None
    assert weights.experts is not None
    assert (own.takes_turns, own.shares > 1, own.lane_shared) == (True, True, 24)
    tapes, experts = Tapes(weights, shape), np.asarray(weights.experts.matrices)
    for product in shape.products:
        form = shape.tape.form_of(product)
        assert form is not None, "all products have something on the tape"
        if product.op not in (Phase.ROUTE, Phase.GATE_UP, Phase.DOWN):
            tapes._tiles(form)
            continue
        lanes = [wanted.lanes[lane].layers[product.layer] for lane in (hosted if product.op is not Phase.DOWN else product.lanes)]
        shared: list[Any] = [layer.experts for layer in lanes if layer.experts is not None]
        matrix: Any = {
            Phase.ROUTE: shared[0].router,
            Phase.GATE_UP: np.concatenate([interleave(*np.split(one.shared_w13, 2)) for one in shared]),
            Phase.DOWN: shared[0].shared_w2,
        }[product.op]
        assert np.array_equal(tapes.next(form, *matrix.shape), stored_words(matrix, "bfloat16")), product
        if product.op is Phase.GATE_UP:
            of_lanes = [[interleave(*np.split(expert, 2)) for expert in layer.w13] for layer in lanes]
            first, form, num_ctas = 0, own.gate_up, own.ctas
        elif product.op is Phase.DOWN:
            of_lanes, form, num_ctas = [list(lanes[0].w2)], own.down_of_one, shape.num_ctas
            first = own.gate_up_values + (product.first_lane - hosted[0]) * own.down_values
        else:
            continue
        for number, slab in enumerate(experts[product.layer]):
            matrix = np.concatenate([lane[number] for lane in of_lanes])
            held = slab[first : first + form.num_values * num_ctas]
            found = unpack(take_off_tape(held, 0, form, num_ctas), form, *matrix.shape)
            assert np.array_equal(found, stored_words(matrix, "bfloat16")), (product, number)
