"""Checkpoints: what is written is read, per lane and bit for bit, and each byte is verified by exactly one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from numpy.typing import NDArray

from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.layout import EMBEDDING, head_name, tensor_layouts
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint

BASE: dict[str, Any] = {
    "hidden_size": 16, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 32, "vocab_size": 36,
    "max_context": 64, "num_lanes": 4, "delay": 1,
}  # fmt: skip
SPECS = {
    "replicate": ModelSpec(**BASE),
    "replicate, uneven vocabulary": ModelSpec(**BASE | {"vocab_size": 37}),
    "replicate, per-lane norms": ModelSpec(**BASE, shared_norm_scale=False),
    "replicate, sum then norm": ModelSpec(**BASE, pre_norm_lane_agg=True),
    "replicate, sum then norm, per-lane norms": ModelSpec(**BASE, pre_norm_lane_agg=True, shared_norm_scale=False),
    "tied": ModelSpec(**BASE | {"vocab_size": 37}, tied_embeddings=True),
    "lane": ModelSpec(**BASE | {"vocab_size": 37}, head_type=HeadType.LANE),
    "lane, per-lane norms": ModelSpec(**BASE, head_type=HeadType.LANE, shared_norm_scale=False),
    "vocab_parallel": ModelSpec(**BASE, head_type=HeadType.VOCAB_PARALLEL),
    "rows that are no multiple of 64 bytes": ModelSpec(**BASE | {"hidden_size": 24, "num_heads": 4}, shared_norm_scale=False),
    "one lane": ModelSpec(**BASE | {"num_lanes": 1}),
}
SPEC = SPECS["replicate"]
W2 = "model.layers.1.feed_forward.w2.weight"
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def written(folder: Path, spec: ModelSpec = SPEC, **options: Any) -> dict[str, NDArray[np.float32]]:
    tensors = random_tensors(spec, seed=3)
    write_checkpoint(folder, spec, tensors, **options)
    return tensors


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


# ---- round trips ----
@every_spec
def test_every_tensor_comes_back_in_its_published_shape(tmp_path: Path, spec: ModelSpec) -> None:
    tensors = written(tmp_path, spec, max_shard_bytes=8192)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec == spec
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.num_bytes == 2 * spec.num_parameters
    assert set(tensors) == set(checkpoint.layouts)
    for name, values in tensors.items():
        assert np.array_equal(checkpoint.tensor(name), values)


@every_spec
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_hold_their_lanes(tmp_path: Path, spec: ModelSpec, world_size: int) -> None:
    if spec.num_lanes % world_size:
        world_size = 1
    tensors = written(tmp_path, spec)
    for rank in range(world_size):
        lanes = spec.lanes_of_rank(rank, world_size)
        weights = open_checkpoint(tmp_path).rank_weights(lanes)
        assert set(weights.lanes) == set(weights.heads) == set(lanes)
        assert set(weights.norms) == set(range(spec.num_lanes))
        assert np.array_equal(weights.embedding, tensors[EMBEDDING])
        for lane in lanes:
            for i, layer in enumerate(weights.lanes[lane].layers):
                for name, got in (("wq", layer.wq), ("wk", layer.wk), ("wv", layer.wv), ("wo", layer.wo)):
                    assert np.array_equal(got, tensors[f"model.layers.{i}.attention.{name}.weight"][lane])
                for name, got in (("w1", layer.w1), ("w3", layer.w3), ("w2", layer.w2)):
                    assert np.array_equal(got, tensors[f"model.layers.{i}.feed_forward.{name}.weight"][lane])
                assert np.array_equal(layer.wqkv, np.concatenate([layer.wq, layer.wk, layer.wv]))
                assert np.array_equal(layer.w13, np.concatenate([layer.w1, layer.w3]))
                assert np.array_equal(layer.attention_norm, norm_of(tensors, f"model.layers.{i}.attention_norm", lane))
                assert np.array_equal(layer.ffn_norm, norm_of(tensors, f"model.layers.{i}.ffn_norm", lane))
            first, last = spec.vocab_slice(lane)
            head = tensors[head_name(spec)]
            assert np.array_equal(weights.heads[lane], head[lane] if head.ndim == 3 else head[first:last])
        for lane, norm in weights.norms.items():
            assert np.array_equal(norm, norm_of(tensors, "model.norm", lane))


def norm_of(tensors: dict[str, NDArray[np.float32]], stem: str, lane: int) -> NDArray[np.float32]:
    return tensors[f"{stem}.weight"] if f"{stem}.weight" in tensors else tensors[f"{stem}.scale"][lane]


@every_spec
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_a_rank_are_aligned_and_contiguous(tmp_path: Path, spec: ModelSpec, dtype: type) -> None:
    written(tmp_path, spec)
    weights = open_checkpoint(tmp_path).rank_weights(range(spec.num_lanes), dtype=dtype)
    arrays = [weights.embedding, *weights.heads.values(), *weights.norms.values()]
    for lane in weights.lanes.values():
        for layer in lane.layers:
            arrays += [layer.attention_norm, layer.wqkv, layer.wo, layer.ffn_norm, layer.w13, layer.w2]
    for array in arrays:
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0


def test_float64_weights_are_the_float32_weights(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        written(tmp_path, dtype=dtype)
        single, double = (open_checkpoint(tmp_path).rank_weights([1], dtype=kind) for kind in (np.float32, np.float64))
        assert np.array_equal(single.lanes[1].layers[0].wqkv, double.lanes[1].layers[0].wqkv)
        assert np.array_equal(single.heads[1], double.heads[1])


def test_a_rank_may_compute_the_logits_of_other_lanes(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    weights = open_checkpoint(tmp_path).rank_weights([0], vocab_lanes=[2, 3])
    assert list(weights.lanes) == [0]
    assert np.array_equal(np.concatenate([weights.heads[2], weights.heads[3]]), tensors["lm_head.weight"][18:36])
    with pytest.raises(ValueError, match="lane 4 does not exist"):
        open_checkpoint(tmp_path).rank_weights([4])
    with pytest.raises(ValueError, match="float32 or float64"):
        open_checkpoint(tmp_path).rank_weights([0], dtype=np.float16)


@every_spec
def test_every_byte_is_verified_exactly_once_over_the_ranks(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, spec)
    verified: Counter[tuple[str, int]] = Counter()
    read = SafetensorsFile.read_chunks

    def counting(
        self: SafetensorsFile, name: str, chunks: Any, out: NDArray[Any], *, verify: bool, first: int, not_finite: str
    ) -> str:
        width = tensor_layouts(spec)[name].values_per_row
        verified.update((name, row) for row in range(first // width, (first + out.size) // width) if verify)
        return read(self, name, chunks, out, verify=verify, first=first, not_finite=not_finite)

    monkeypatch.setattr(SafetensorsFile, "read_chunks", counting)
    for rank in range(spec.num_lanes):
        open_checkpoint(tmp_path).rank_weights([rank])
    expected = {(name, row): 1 for name, layout in tensor_layouts(spec).items() for row in range(layout.shape[0])}
    assert verified == expected
    verified.clear()
    open_checkpoint(tmp_path, verify=False).rank_weights(range(spec.num_lanes))
    assert not verified


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = written(tmp_path, dtype="float32")
    with safetensors.safe_open(tmp_path / SINGLE_NAME, framework="np") as file:
        assert set(file.keys()) == set(tensors)
        for name, values in tensors.items():
            assert np.array_equal(file.get_tensor(name), values)
    written(tmp_path)
    with safetensors.safe_open(tmp_path / SINGLE_NAME, framework="pt") as file:
        for name, values in tensors.items():
            assert file.get_tensor(name).dtype == torch.bfloat16
            assert np.array_equal(file.get_tensor(name).float().numpy(), values)


def test_random_tensors_are_reproducible_and_tell_everything_apart() -> None:
    first, again, other = (random_tensors(SPECS["lane, per-lane norms"], seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)
    contents = {values.tobytes() for values in first.values()}
    assert len(contents) == len(first)
    norm = first["model.norm.scale"]
    assert norm.min() > 0.3
    assert norm.std() > 0.1
    w1 = first["model.layers.0.feed_forward.w1.weight"]
    assert 0.7 < w1.std() * BASE["hidden_size"] ** 0.5 < 1.3


# ---- writing ----
def test_shards_stay_under_their_limit_and_replace_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for limit in (4096, 8192, 2**20):
        written(tmp_path, max_shard_bytes=limit)
        files = list(tmp_path.glob("*.safetensors"))
        assert (tmp_path / INDEX_NAME).exists() == (len(files) > 1)
        assert len(files) == len(open_checkpoint(tmp_path).files)
        assert max(path.stat().st_size for path in files) <= limit
    assert [path.name for path in files] == [SINGLE_NAME]
    assert (tmp_path / "tokenizer.json").exists()


def test_tensors_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, 0)

    def write(changes: dict[str, Any], **options: Any) -> str:
        return refusal(lambda: write_checkpoint(tmp_path, SPEC, tensors | changes, **options))

    assert "missing ['lm_head.weight']" in refusal(
        lambda: write_checkpoint(tmp_path, SPEC, {name: values for name, values in tensors.items() if name != "lm_head.weight"})
    )
    assert "unexpected ['extra']" in write({"extra": np.zeros(3)})
    assert f"tensor {W2} to write has shape (4, 8, 16)" in write({W2: tensors[W2].reshape(4, 8, 16)})
    assert f"tensor {W2} to write has values that are not finite in bfloat16" in write({W2: tensors[W2] * np.float32(np.nan)})
    assert "not finite in float16" in write({W2: np.full_like(tensors[W2], 7e4)}, dtype="float16")
    assert "not finite in bfloat16" in write({W2: np.full_like(tensors[W2], np.finfo(np.float32).max)})
    assert "more than a shard of 1000 bytes" in write({}, max_shard_bytes=1000)
    with pytest.raises(ValueError, match="dtype must be one of bfloat16"):
        write_checkpoint(tmp_path, SPEC, tensors, dtype="int8")


def test_an_interrupted_write_leaves_no_model(tmp_path: Path) -> None:
    written(tmp_path)
    tensors = random_tensors(SPEC, 0) | {W2: np.full(tensor_layouts(SPEC)[W2].shape, np.nan, np.float32)}
    refusal(lambda: write_checkpoint(tmp_path, SPEC, tensors, max_shard_bytes=4096))
    assert "has no config.json" in refusal(lambda: open_checkpoint(tmp_path))


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    # A limit on file sizes is what a full disk looks like to a writer, and needs no privileges.
    program = """
import resource, sys
from pathlib import Path
from kog_dist.errors import CheckpointError
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.model.spec import ModelSpec
spec = ModelSpec(**{SPEC})
tensors = random_tensors(spec, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_checkpoint(Path(sys.argv[1]), spec, tensors)
except CheckpointError as error:
    print(error)
"""
    program = program.replace("{SPEC}", repr(BASE))
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert f"{tmp_path / SINGLE_NAME} cannot be written" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(lambda: written(tmp_path / "file" / "model"))


def test_rank_processes_need_no_torch() -> None:
    program = "import sys, kog_dist.model.checkpoint; print([name for name in ('torch', 'tokenizers') if name in sys.modules])"
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
