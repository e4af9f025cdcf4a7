"""Device code of delta nets in prefill, run on a CPU: it is the array code's, and leaves nothing that it should not."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.cuda import build as compiler
from kog_dist.model.layout import EMBEDDING
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.attention.choice import heads_of
from kog_dist.workers.prefill.attention.wide_abi import WIDE_PARAMS, wide_header, wide_shared_bytes
from kog_dist.workers.prefill.attention.wide_attention import WideAttention
from kog_dist.workers.prefill.base.arrays import BFLOAT16, float32_of, rounded
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.compiled import SOURCE_FOLDERS
from kog_dist.workers.prefill.base.hopper_abi import SHARED_BYTES
from kog_dist.workers.prefill.delta.delta_abi import advance_shared_bytes, delta_header
from kog_dist.workers.prefill.delta.device import DELTA_KERNELS, RULE_KERNELS
from kog_dist.workers.prefill.delta.state_layout import StateLayout
from kog_dist.workers.prefill.dense.dense_abi import dense_header
from kog_dist.workers.prefill.dense.device import GATES_KERNELS, KERNELS
from kog_dist.workers.prefill.dense.gates_abi import gates_header
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.delta_configs import CONFIGS
from tests.unit.prefill.delta_rank import StoredRank
from tests.unit.prefill.emulated import EmulatedDenseOperations, compiled, emulated_delta, launcher
from tests.unit.prefill.models import relative_error, token_ids
from tests.unit.prefill.test_attention import wanted
from tests.unit.prefill.test_delta import SHARED
from tests.unit.test_kinds_twin import SPECS

pytestmark = needs_compiler
# Rows of a chunk, position of the first, tokens: padded blocks and whole ones, from nothing and behind a state.
CHUNKS = ((70, 0, 70), (130, 5, 129), (16, 2, 2), (64, 1, 64), (16, 0, 1))


@pytest.mark.parametrize("name", ["delta nets", "delta nets, published heads", "delta nets, odd shapes"])
def test_kernels_are_the_array_code(name: str, tmp_path: Path) -> None:
    spec = replace(SPECS[name], max_context=256)
    rank = StoredRank(spec, dtype=np.float16, sizes=(16, 64, 70, 130))
    buffers, operations, random = rank.buffers, rank.operations, np.random.default_rng(1)
    kernels = emulated_delta(buffers, rank.states, tmp_path)
    made, shape = buffers.states, buffers.delta
    assert made is not None
    assert shape is not None
    layer, layout, own = shape.layers[-1], StateLayout(shape), rank.states[len(rank.states) // 2 :]
    rank.matrices[layer].delta_factors[...] *= 0.3  # decays from slow to fast
    for size, start, tokens in CHUNKS:
        kept = (random.standard_normal(array.shape).astype(np.float32) for array in layout.load(own, layout.net_of(layer), start))
        layout.store(own, layout.net_of(layer), start, *kept)
        rows = buffers.rows(size)
        assert rows.nets is not None
        assert rows.mixed is not None
        projected = 2 * random.standard_normal(rows.nets.projected.shape).astype(np.float32)
        projected += 2 * random.standard_normal(projected.shape[1:]).astype(np.float32)  # keys of all tokens are alike
        operations.product = lambda x, matrix, out, given=projected: np.copyto(out, given.reshape(out.shape))
        rows.place[0], buffers.last_position[0], buffers.cache_number[0] = start, start + tokens - 1, 1
        buffers.overflow[...] = 0
        made[...] = 7
        wanted = operations.recur(rows, rank.matrices[layer], layer).copy()
        wanted_state, solved = made.copy(), (rows.nets.query.copy(), rows.nets.key.copy(), rows.nets.value.copy())
        for array in (rows.nets.query, rows.nets.key, rows.nets.value, rows.nets.logs, rows.nets.beta):
            array[...] = np.nan  # which nobody may read before it is written
        rows.nets.solved[...], rows.nets.seen[...], made[...], rows.mixed[...] = np.nan, np.nan, 7, 0
        rows.nets.projected[...] = projected
        kernels.run(rows, rank.matrices[layer], layer)
        assert not buffers.overflow[0]
        for found, other in zip((rows.nets.query, rows.nets.key, rows.nets.value), solved, strict=True):
            assert relative_error(found[:tokens], other[:tokens]) < 1e-4
            assert not found[tokens:].any()
        assert np.array_equal(made == 7, wanted_state == 7), "values of a state that are written"
        net = layout.net_of(layer)
        (state, inputs), (other, others) = (layout.load(one, net, start + tokens) for one in (made, wanted_state))
        assert np.array_equal(inputs, others)
        assert relative_error(state, other) < 1e-5, (size, start, tokens)
        assert relative_error(rows.mixed[:, :tokens], wanted[:, :tokens]) < 1e-4, (size, start, tokens)
        assert bool(np.isfinite(rows.mixed).all())
    before = rank.states.copy()
    buffers.overflow[0] = 1
    kernels.keep_states()
    assert np.array_equal(rank.states, before), "nothing is kept behind an overflow"
    buffers.overflow[0] = 0
    kernels.keep_states()
    assert np.array_equal(own, made)
    assert np.array_equal(rank.states[: len(own)], before[: len(own)])


class EmulatedRank(StoredRank):
    """Whose kernels run here. Products and attention are those of array code."""

    def __init__(self, spec: ModelSpec, folder: Path, **options: Any) -> None:
        self.folder = folder
        super().__init__(spec, **options)

    def made_operations(self) -> EmulatedDenseOperations:
        embedding = rounded(self.tensors[EMBEDDING], BFLOAT16)
        return EmulatedDenseOperations(
            self.buffers, embedding, self.cache, self.folder, weight_dtype="bfloat16", kv_dtype=self.kv_dtype,
            of_layers=self.experts, states=self.states,
        )  # fmt: skip


@pytest.mark.parametrize("name", [*SPECS, "a shared expert"])
def test_prompts_by_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("base.shared_abi", "dense.dense_abi", "dense.device"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{place}.MAX_THREADS", 64)  # a head of 256; more are expensive here
    monkeypatch.setattr("kog_dist.workers.prefill.dense.device._LOADING", 3)
    spec = replace((SPECS | {"a shared expert": SHARED})[name], max_context=128)
    options: dict[str, Any] = {"dtype": np.float16, "kv_dtype": "bfloat16", "sizes": (8, 16)}
    rank, plain = EmulatedRank(spec, tmp_path, **options), StoredRank(spec, **options)
    ids = token_ids(spec, 27)
    for end, start in ((21, 0), (27, 21)):
        assert rank.run(ids[:end], start, cache=1) == plain.run(ids[:end], start, cache=1) == end
        assert np.array_equal(float32_of(rank.cache) != 0, float32_of(plain.cache) != 0)
        assert relative_error(float32_of(rank.cache), float32_of(plain.cache)) < 2e-3
        assert relative_error(rank.states, plain.states) < 2e-3 if rank.delta else not len(rank.states)
        # What roundings to binary16 alone make of so small a model, against float64.
        assert relative_error(rank.buffers.last_streams, plain.buffers.last_streams) < 4e-3


@pytest.mark.parametrize("heads", [AttentionShape(256, 4, 2, 2), AttentionShape(144, 3, 1, 3)], ids=["256", "144"])
def test_wide_attention_on_a_cpu(heads: AttentionShape, tmp_path: Path) -> None:
    header = wide_header(heads)
    library = ctypes.CDLL(str(compiled(tmp_path, "wide_attention", header, ("attend_wide",), "WideParams", "-Og")))
    attention = WideAttention(heads, launcher(library, "attend_wide", WIDE_PARAMS.size_bytes))
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(230, count, heads.head_dim, generator=generator).half()
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    keys[210:], values[210:] = torch.inf, torch.nan  # which nobody sees
    for start, size in ((0, 40), (70, 140), (209, 1)):
        place = np.array([start, 0, start + size], np.int32)
        found = attention.run(query[start : start + size].numpy(), keys.numpy(), values.numpy(), place, None).copy()
        assert relative_error(found, wanted(heads, query[start : start + size], keys, values, start, None, None)) < 1e-3
        if start == 70:
            alone = attention.run(query[150:200].numpy(), keys.numpy(), values.numpy(), np.array([150, 0, 200], np.int32), None)
            assert np.array_equal(alone, found[:, 80:130]), "a row has other bits in another chunk"


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-27B"])
def test_kernels_build_without_spills(name: str, tmp_path: Path) -> None:
    spec = replace(read_config(CONFIGS[name]), max_context=9216)
    shape = KernelShape(spec, range(spec.num_lanes))
    layout = CacheLayout.of(shape)
    assert shape.delta is not None
    headers = {
        "delta": (DELTA_KERNELS, delta_header(shape.delta, spec.norm_eps)),
        "rule": (RULE_KERNELS, delta_header(shape.delta, spec.norm_eps)),
        "gates": (GATES_KERNELS, gates_header(spec, shape.num_lanes, shape.delta)),
        "wide_attention": (("attend_wide",), wide_header(heads_of(layout))),
        "dense": (KERNELS, dense_header(layout, weight_dtype="bfloat16", kv_dtype="bfloat16")),
    }
    for stem, (kernels, header) in headers.items():
        sources = {**compiler.read_sources(*SOURCE_FOLDERS), f"{stem}_shape.cuh": header}
        log = compiler.build(sources, f"{stem}.cu", folder=tmp_path).log
        assert log.count("0 bytes spill stores, 0 bytes spill loads") == len(kernels), stem
    assert max(advance_shared_bytes(shape.delta), 2 * wide_shared_bytes(heads_of(layout))) <= SHARED_BYTES
