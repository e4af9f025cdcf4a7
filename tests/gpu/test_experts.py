"""Experts on a GPU, at the width of real models: logits are those of CPU ranks, of the kernel alone and behind prefill."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import MOE, QUANTISED, named_shape
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.layout import EXPERTS
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import write_stored_checkpoint
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_rows, to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_codes, random_tensor, random_weights
from kog_dist.workers.prefill import gpu
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import MOST_FLOP, work_of
from kog_dist.workers.prefill.buffers.dense import DenseBuffers
from kog_dist.workers.prefill.experts import device
from kog_dist.workers.prefill.experts.device import experts_on_gpu
from kog_dist.workers.prefill.experts.experts_abi import tiles
from kog_dist.workers.prefill.gpu import Tuning, matrices_for, prefill_for
from tests.gpu.test_families import on_cpu
from tests.gpu.test_prefill import begin_at_head, decode, fill, logits_of_prompt, relative_error

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT, TOKENS, SEED = 2, 4096, 256, 9, 5
LIMIT = 1e-3  # as of dense models; a wrong expert, weight or scale is 1e-1
PROMPT, CACHED, PREFILL_LIMIT = 200, 77, 4e-3
MXFP4 = Coding("E2M1", 4, "E8M0", is_of_experts=True)
Observer = Callable[[str, Any], None]  # see `load_weights`


def few_experts(name: str, num_experts: int) -> ModelSpec:
    """A named shape with few layers and experts."""
    config = {**MOE[name], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    spec = read_config({**config, "num_experts": num_experts} if "num_experts" in config else config)
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, num_experts=num_experts))


def shape_of(spec: ModelSpec, coding: Coding | None = None) -> KernelShape:
    return KernelShape(spec, range(spec.num_lanes), weight_dtype="bfloat16", kv_dtype="float16", coding=coding)


def drawn(count: int) -> list[int]:
    """A prompt."""
    ids: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, count).tolist()
    return ids


def check(shape: KernelShape, made: Callable[[Observer], DeviceWeights], checkpoint: Checkpoint, name: str) -> None:
    """Of a few tokens, decoded, and of a prompt behind prefill: whole, in two parts, and behind decoded tokens."""
    matrices, observe = matrices_for(shape)
    kernel = Monokernel(shape, made(observe))
    few, ids = drawn(TOKENS), drawn(PROMPT)
    error = relative_error(decode(kernel, few, 0), on_cpu(checkpoint, few))
    logits = logits_of_prompt(kernel, prefill_for(kernel, matrices), ids, CACHED)
    wanted = on_cpu(checkpoint, ids)
    kernel.close()
    errors = {how: relative_error(found, wanted) for how, found in logits.items()}
    print(name, f"decoded {error:.1e}", {how: f"{one:.1e}" for how, one in errors.items()})
    assert error < LIMIT
    assert max(errors.values()) < PREFILL_LIMIT


@pytest.mark.parametrize(("name", "num_experts"), [("qwen3-30b-a3b", 12), ("gpt-oss-20b", 6)])
def test_logits_of_experts_in_16_bit(tmp_path: Path, name: str, num_experts: int) -> None:
    spec = few_experts(name, num_experts)
    write_stored_checkpoint(tmp_path, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30)
    checkpoint = open_checkpoint(tmp_path)
    shape = shape_of(checkpoint.spec)
    check(shape, partial(load_weights, shape, checkpoint), checkpoint, name)


def test_logits_of_experts_in_mxfp4(tmp_path: Path) -> None:
    """CPU ranks have the values of the codes, which are exact in bfloat16."""
    import cupy

    spec = few_experts("gpt-oss-20b", 6)
    shape = shape_of(spec, MXFP4)
    assert shape.experts is not None
    numbers = cupy.asarray(NUMBERS["E2M1"].values)

    def stored(name: str) -> Any:
        if EXPERTS not in name or not name.endswith("weight"):
            return random_tensor(spec, name, SEED).get()
        lanes = []
        for lane in range(spec.num_lanes):
            codes, scales = random_codes(shape, name, lane, SEED).parts()
            skew = shape.experts.skew(lane) if name.endswith("w2.weight") and shape.experts is not None else 0
            lanes.append(numbers[codes] * scales[:, (np.arange(codes.shape[1]) + skew) // 32])
        return to_words(cupy.stack(lanes), "bfloat16").get()

    write_stored_checkpoint(tmp_path, spec, stored, max_shard_bytes=2**30)

    def weights(observe: Observer) -> DeviceWeights:
        def tensor(name: str) -> Any:
            words = random_tensor(spec, name, SEED)[slice(*needed_rows(shape, name))]
            observe(name, words)
            return words

        return from_tensors(shape, tensor, lambda name, lane: random_codes(shape, name, lane, SEED))

    check(shape, weights, open_checkpoint(tmp_path), "MXFP4")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "qwen3-30b-a3b+fp8", "qwen3-30b-a3b+int4"])
def test_bits_depend_neither_on_tiles_nor_on_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What all experts add to the rows of a chunk, in tiles of all sizes, and of the second half of the lanes alone."""
    import cupy

    whole, codings = named_shape(f"{name}@{CONTEXT}")
    spec = replace(whole, num_layers=LAYERS, window_layers=tuple(layer for layer in whole.window_layers if layer < LAYERS))
    partials, sizes = dict[tuple[int, int], Any](), list[int]()
    for num_ranks in (1, 2):
        shape = KernelShape(spec, spec.lanes_of_rank(num_ranks - 1, num_ranks), num_ranks=num_ranks, **codings)
        assert shape.experts is not None
        matrices, observe = matrices_for(shape)
        weights = random_weights(shape, SEED, observe)
        assert weights.experts is not None
        buffers = DenseBuffers(CacheLayout.of(shape), np.float16, CONTEXT, "cuda")
        buffers.last_position[...] = CONTEXT - 3
        rows, experts = buffers.rows(CONTEXT), experts_on_gpu(shape, weights.experts, buffers.last_position)
        assert rows.experts is not None
        draw = cupy.random.default_rng(SEED)
        rows.x[...] = draw.standard_normal(rows.x.shape, dtype=np.float32)
        rows.experts.logits[...] = draw.standard_normal(rows.experts.logits.shape, dtype=np.float32)
        bias = None if weights.experts.router_bias is None else cupy.zeros(shape.experts.num_experts, np.float32)
        for tile in tiles(shape.experts):
            monkeypatch.setattr(device, "tile_for", lambda *_, tile=tile: tile)
            experts.run(rows, rows.experts, bias, 1)
            partials[num_ranks, tile.rows] = cupy.asnumpy(rows.partial)
        sizes = [tile.rows for tile in tiles(shape.experts)]
        del weights, matrices, buffers, rows, experts
    first = partials[1, sizes[0]]
    assert len(sizes) >= 2
    assert np.isfinite(first).all()
    assert np.abs(first.astype(np.float32)[:, : CONTEXT - 2]).sum((0, 2)).min() > 0
    assert not first[:, CONTEXT - 2 :].any()
    for size in sizes:
        assert np.array_equal(partials[1, size], first), size
        assert np.array_equal(partials[2, size], first[spec.num_lanes // 2 :]), size


def test_windowed_layers_may_keep_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss in MXFP4: logits have the bits of rings; a stop within a chunk keeps what was there, and one goes on behind it."""
    import cupy

    whole, codings = named_shape("gpt-oss-20b@2048")
    spec = replace(whole, num_layers=4, window_layers=(0, 2), vocab_size=VOCABULARY)
    monkeypatch.setattr(gpu, "work_of", lambda *args, **options: replace(work_of(*args, **options), chunk_flop=1.4 * MOST_FLOP))
    ids, tuning = drawn(1300), Tuning((128, 256))
    found = []
    for whole_windows in (False, True):
        shape = KernelShape(spec, range(spec.num_lanes), whole_windows=whole_windows, **codings)
        matrices, observe = matrices_for(shape)
        kernel = Monokernel(shape, random_weights(shape, SEED, observe))
        prefill = prefill_for(kernel, matrices, tuning=tuning)
        asked = iter([False] * 4 + [True])
        fill(prefill, ids[:1290])
        reached = prefill.run(ids, 600, should_stop=lambda asked=asked: next(asked)) if whole_windows else 0  # type: ignore[misc]
        assert reached == (856 if whole_windows else 0), "a second chunk of 256 rows has lost its last parts"
        fill(prefill, ids, reached)
        layout, cache = CacheLayout.of(shape), kernel.kv.view(np.uint16)
        kept = [layout.load(cache, layer, layout.first_read(layer, 1300), 1300) for layer in range(spec.num_layers)]
        logits = [begin_at_head(kernel, prefill, ids, 30), decode(kernel, [*ids, *drawn(300)], 1300)]
        found.append([part.tobytes() for part in (*logits, *(cupy.asnumpy(part) for pair in kept for part in pair))])
        kernel.close()
    assert [one == other for one, other in zip(*found, strict=True)] == [True] * len(found[0])


def in_blocks(matrix: Any) -> dict[str, Any]:
    """A matrix of whole blocks of 128 x 128 in E4M3."""
    import torch

    rows, columns = matrix.shape
    blocks = matrix.reshape(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def in_awq(matrix: Any) -> dict[str, Any]:
    """A matrix in INT4 as AutoAWQ packs it: groups of 128 columns, a zero point for each."""
    import torch

    rows, columns = matrix.shape
    groups = matrix.reshape(rows, columns // 128, 128)
    scales = (groups.abs().amax(2) / 6).half()
    zeros = torch.arange(scales.numel()).reshape(scales.shape) % 3 + 7
    codes = ((groups / scales[:, :, None].float()).round().int() + zeros[:, :, None]).clamp(0, 15).reshape(rows, columns)

    def words(values: Any) -> Any:
        """(n, m / 8) of (n, m)."""
        parts = values.long().reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]] << torch.arange(0, 32, 4)
        return torch.from_numpy(parts.sum(2).numpy().astype(np.uint32).view(np.int32))

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.contiguous()}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PUBLISHED: dict[str, tuple[Any, Callable[[Any], dict[str, Any]]]] = {"FP8": (QUANTISED["fp8"], in_blocks), "AWQ": (AWQ, in_awq)}


def write_quantised(folder: Path, name: str) -> None:
    """Qwen3-30B-A3B with few layers and experts, as it is published: all quantised but router, norms, embedding and head."""
    import torch
    from safetensors.torch import save_file

    quantised, made = PUBLISHED[name]
    config = {
        **MOE["qwen3-30b-a3b"], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
        "num_experts": 12, "quantization_config": quantised,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator, tensors, d = torch.Generator().manual_seed(SEED), dict[str, Any](), 2048

    def put(name: str, rows: int, columns: int, *, is_coded: bool = True) -> None:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        parts = made(values) if is_coded else {"weight": values.bfloat16()}
        tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})

    put("model.embed_tokens", VOCABULARY, d, is_coded=False)
    put("lm_head", VOCABULARY, d, is_coded=False)
    tensors["model.norm.weight"] = torch.ones(d, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        norms = {"input_layernorm": d, "post_attention_layernorm": d, "self_attn.q_norm": 128, "self_attn.k_norm": 128}
        for name, size in norms.items():
            tensors[f"{start}.{name}.weight"] = (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()
        for name, heads in (("q", 32), ("k", 4), ("v", 4)):
            put(f"{start}.self_attn.{name}_proj", heads * 128, d)
        put(f"{start}.self_attn.o_proj", d, 32 * 128)
        put(f"{start}.mlp.gate", 12, d, is_coded=False)
        for expert in range(12):
            put(f"{start}.mlp.experts.{expert}.gate_proj", 768, d)
            put(f"{start}.mlp.experts.{expert}.up_proj", 768, d)
            put(f"{start}.mlp.experts.{expert}.down_proj", d, 768)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_a_folder_that_is_published_quantised(tmp_path: Path, name: str) -> None:
    """Attention and experts; the router's weights are multiplied in binary16."""
    write_quantised(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    shape = shape_of(checkpoint.spec, coding_of(checkpoint))
    check(shape, partial(load_weights, shape, checkpoint), checkpoint, name)
