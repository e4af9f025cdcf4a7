"""Checkpoints that are damaged, incomplete or not what their config says: refused, with the file and tensor named."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.layout import EMBEDDING, tensor_layouts
from kog_dist.model.manifest import MANIFEST_NAME
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint, write_manifest

SPEC = ModelSpec(
    hidden_size=16, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=32, vocab_size=36, num_lanes=4, delay=1
)  # fmt: skip
W2 = "model.layers.1.feed_forward.w2.weight"


def written(folder: Path, spec: ModelSpec = SPEC, **options: Any) -> dict[str, NDArray[np.float32]]:
    tensors = random_tensors(spec, seed=3)
    write_checkpoint(folder, spec, tensors, **options)
    return tensors


def load_all(folder: Path) -> None:
    """What an engine of two ranks does: each opens the folder and loads its lanes."""
    lanes = SPEC.num_lanes
    for hosted in (range(lanes // 2), range(lanes // 2, lanes)):
        open_checkpoint(folder).rank_weights(hosted)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def raw_file(header: bytes, num_data_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * num_data_bytes


# ---- damage ----
@pytest.mark.parametrize("manifest", [True, False])
def test_a_value_that_is_not_finite_is_found_in_every_tensor(tmp_path: Path, manifest: bool) -> None:
    spec = dataclasses.replace(SPEC, shared_norm_scale=False)
    for dtype, bad in (("bfloat16", b"\x80\x7f"), ("float16", b"\x01\x7e"), ("float32", b"\x00\x00\xc0\xff")):
        written(tmp_path, spec, dtype=dtype, manifest=False)
        path = tmp_path / SINGLE_NAME
        intact = path.read_bytes()
        for name, tensor in SafetensorsFile.open(path).tensors.items():
            # the last value of the tensor: in the part of the last lane
            path.write_bytes(intact[: tensor.end - len(bad)] + bad + intact[tensor.end :])
            if manifest:
                message = refusal(lambda: write_manifest(tmp_path))
            else:
                message = refusal(lambda: open_checkpoint(tmp_path).rank_weights([3]))
                assert open_checkpoint(tmp_path, verify=False).rank_weights([3])
            assert f"{path}: tensor {name} has a value that is not finite" in message
            assert f"element {tensor_layouts(spec)[name].num_values - 1} of it" in message


def test_the_rank_of_another_lane_does_not_look_at_foreign_bytes(tmp_path: Path) -> None:
    written(tmp_path, manifest=False)
    path = tmp_path / SINGLE_NAME
    end = SafetensorsFile.open(path).tensors[W2].end
    intact = path.read_bytes()
    path.write_bytes(intact[: end - 2] + b"\x80\x7f" + intact[end:])
    open_checkpoint(tmp_path).rank_weights([0, 1, 2])
    for action in (
        lambda: open_checkpoint(tmp_path).rank_weights([3]),
        lambda: open_checkpoint(tmp_path).verify_all(),
        lambda: open_checkpoint(tmp_path).tensor(W2),
    ):
        assert W2 in refusal(action)


def test_every_bit_flip_is_detected(tmp_path: Path) -> None:
    written(tmp_path, max_shard_bytes=8192)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    write_manifest(tmp_path)
    load_all(tmp_path)
    rng = random.Random(5)
    files = [path for path in sorted(tmp_path.iterdir()) if path.name != "generation_config.json"]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        intact = path.read_bytes()
        for _ in range(120):
            bit = rng.randrange(8 * len(intact))
            flipped = bytearray(intact)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            message = refusal(lambda: load_all(tmp_path))
            assert str(tmp_path) in message, f"bit {bit} of {path.name}"
        path.write_bytes(intact)
    load_all(tmp_path)


def test_a_flipped_value_is_named_with_its_rows(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / SINGLE_NAME
    flipped = bytearray(path.read_bytes())
    flipped[SafetensorsFile.open(path).tensors[W2].end - 2] ^= 1
    path.write_bytes(flipped)
    message = refusal(lambda: load_all(tmp_path))
    assert f"{path}: tensor {W2}, rows 3 to 4, differs from its SHA-256 in {MANIFEST_NAME}" in message
    os.unlink(tmp_path / MANIFEST_NAME)
    load_all(tmp_path)


def test_truncation_at_any_length_is_detected(tmp_path: Path) -> None:
    written(tmp_path, manifest=False)
    path = tmp_path / SINGLE_NAME
    size = path.stat().st_size
    first_value = min(tensor.begin for tensor in SafetensorsFile.open(path).tensors.values())
    lengths = sorted({*range(64), *range(0, size, 97), first_value - 1, first_value, first_value + 1, size - 1}, reverse=True)
    for length in lengths:
        os.truncate(path, length)
        assert str(path) in refusal(lambda: open_checkpoint(tmp_path)), f"{length} of {size} bytes"


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    written(tmp_path, manifest=False)
    with (tmp_path / SINGLE_NAME).open("ab") as file:
        file.write(b"\0")
    assert "followed by bytes that belong to nothing" in refusal(lambda: open_checkpoint(tmp_path))


def test_short_reads_are_continued_and_read_errors_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = written(tmp_path)
    whole_read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole_read(fd, [buffers[0][:501]], offset))
    assert np.array_equal(open_checkpoint(tmp_path).tensor(W2), tensors[W2])

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 8:
            raise OSError(5, "Input/output error")
        return whole_read(fd, buffers, offset)

    path = tmp_path / SINGLE_NAME
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(os, "preadv", failing)
    assert f"{path}: reading tensor {W2} failed: Input/output error" in refusal(lambda: checkpoint.tensor(W2))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: failing(fd, buffers, offset + 9))
    assert f"{path}: reading the header's length failed" in refusal(lambda: open_checkpoint(tmp_path))


def test_a_file_that_shrinks_or_changes_after_opening_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    path = tmp_path / SINGLE_NAME
    checkpoint = open_checkpoint(tmp_path)
    replacement = tmp_path / "replacement"
    replacement.write_bytes(path.read_bytes())
    replacement.rename(path)
    assert f"{path} was changed or replaced" in refusal(lambda: checkpoint.rank_weights([0]))
    checkpoint = open_checkpoint(tmp_path)
    whole_read = os.preadv

    def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path, 4096)
        return whole_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert "it is truncated" in refusal(lambda: checkpoint.verify_all())


# ---- wrong files and tensors ----
def rewrite(folder: Path, changes: dict[str, tuple[str, list[int]] | None]) -> None:
    """Replace entries of the single file by zeros of other dtype and shape, remove (None) or add some."""
    widths = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8, "F8_E4M3": 1, "BOOL": 1}
    described = {name: (t.dtype, list(t.shape)) for name, t in SafetensorsFile.open(folder / SINGLE_NAME).tensors.items()}
    entries: dict[str, Any] = {}
    offset = 0
    for name, described_as in (described | changes).items():
        if described_as is None:
            continue
        dtype, shape = described_as
        num_bytes = widths[dtype] * int(np.prod(shape, dtype=np.int64))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    (folder / SINGLE_NAME).write_bytes(raw_file(json.dumps(entries).encode(), offset))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({W2: None}, f"lacks tensor {W2}, which"),
        ({W2: None, EMBEDDING: None, "lm_head.weight": None}, "lacks tensor lm_head.weight and 2 more"),
        ({"model.layers.2.ffn_norm.weight": ("BF16", [16])}, "has a tensor 'model.layers.2.ffn_norm.weight'"),
        ({"evil\n\x1b[31m": ("BF16", [1])}, r"has a tensor 'evil\n\x1b[31m'"),
        ({W2: ("BF16", [4, 8, 16])}, f"tensor {W2} has shape (4, 8, 16), but config.json asks for (4, 16, 8)"),
        ({W2: ("BF16", [16, 32])}, f"tensor {W2} has shape (16, 32)"),
        ({W2: ("BF16", [4, 16, 9])}, f"tensor {W2} has shape (4, 16, 9)"),
        ({W2: ("BF16", [0])}, f"tensor {W2} has shape (0,)"),
        ({W2: ("F64", [4, 16, 8])}, "dtype 'F64' is not supported; supported: BF16, F16, F32"),
        ({W2: ("I64", [4, 16, 8])}, "is I64, which config.json does not say; expected BF16, F16, F32"),
        ({W2: ("F8_E4M3", [4, 16, 8])}, "is F8_E4M3, which config.json does not say"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    tmp_path: Path, changes: dict[str, tuple[str, list[int]] | None], cause: str
) -> None:
    written(tmp_path, manifest=False)
    rewrite(tmp_path, changes)
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert cause in message
    assert str(tmp_path) in message
    assert "damaged" not in message


def test_a_tied_model_has_no_head_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, dataclasses.replace(SPEC, vocab_size=37, tied_embeddings=True), manifest=False)
    rewrite(tmp_path, {"lm_head.weight": ("BF16", [37, 16])})
    assert "has a tensor 'lm_head.weight'" in refusal(lambda: open_checkpoint(tmp_path))


def test_folders_without_weights_say_what_they_have(tmp_path: Path) -> None:
    written(tmp_path, manifest=False)
    (tmp_path / SINGLE_NAME).rename(tmp_path / "weights.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "it has 'pytorch_model.bin', 'weights.safetensors'" in message
    assert "has no config.json" in refusal(lambda: open_checkpoint(tmp_path / "nowhere"))


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    written(tmp_path, max_shard_bytes=8192)
    shard = max(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    assert f"{shard} is missing: {INDEX_NAME} places" in refusal(lambda: open_checkpoint(tmp_path))


def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path: Path) -> None:
    written(tmp_path, max_shard_bytes=8192, manifest=False)
    intact = (tmp_path / INDEX_NAME).read_bytes()
    first, second = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))[:2]
    edit_index(tmp_path, lambda index: index["weight_map"].update({EMBEDDING: second}))
    assert f"tensor '{EMBEDDING}'" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / INDEX_NAME).write_bytes(intact)
    edit_index(tmp_path, lambda index: index["weight_map"].update({"ghost": first}))
    assert f"{first} has no tensor 'ghost'" in refusal(lambda: open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "place",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "model.bin", "", "..", ".", "a\0.safetensors", 3,
     None, "x" * 300 + ".safetensors", ["model.safetensors"]],
)  # fmt: skip
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, place: object) -> None:
    written(tmp_path, max_shard_bytes=8192, manifest=False)
    edit_index(tmp_path, lambda index: index["weight_map"].update({EMBEDDING: place}))
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert f"{tmp_path / INDEX_NAME} places tensor '{EMBEDDING}' in" in message


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}', "[" * 10**5,
             '{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}', "\xff"]
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    written(tmp_path, manifest=False)
    (tmp_path / INDEX_NAME).write_text(text, encoding="latin-1")
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert message.startswith(str(tmp_path / INDEX_NAME))
    assert "is not an index" in message or "cannot be read as JSON" in message


@pytest.mark.parametrize("name", [SINGLE_NAME, "config.json"])
def test_links_out_of_the_folder_are_refused_and_links_within_are_not(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    written(model)
    (model / name).rename(tmp_path / "outside")
    (model / name).symlink_to(tmp_path / "outside")
    assert f"{model / name} leads out of the model folder" in refusal(lambda: open_checkpoint(model))
    (model / name).unlink()
    (tmp_path / "outside").rename(model / "inside")
    (model / name).symlink_to("inside")
    load_all(model)
    (model / name).unlink()
    (model / name).symlink_to(name)
    assert str(model / name) in refusal(lambda: open_checkpoint(model))


@pytest.mark.parametrize("name", [SINGLE_NAME, "config.json", MANIFEST_NAME, INDEX_NAME])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused_without_hanging(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    written(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    assert str(tmp_path / name) in refusal(lambda: open_checkpoint(tmp_path))


# ---- manifest ----
def test_an_edited_config_is_noticed_until_the_manifest_is_written_anew(tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-6}))
    message = refusal(lambda: open_checkpoint(tmp_path))
    assert f"{tmp_path / 'config.json'} differs from its SHA-256" in message
    assert "write it anew" in message
    assert open_checkpoint(tmp_path, verify=False).spec.norm_eps == 1e-6
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    write_manifest(tmp_path)
    assert open_checkpoint(tmp_path).spec.norm_eps == 1e-6
    assert set(json.loads((tmp_path / MANIFEST_NAME).read_text())["files"]) == {"config.json", "chat_template.jinja"}


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    edit(content)
    (folder / MANIFEST_NAME).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("tensors"),
        lambda content: content.update(format="kog_dist manifest 2"),
        lambda content: content.update(more={}),
        lambda content: content["tensors"].pop(W2),
        lambda content: content["tensors"].update(ghost=[]),
        lambda content: content["tensors"][W2].pop(),
        lambda content: content["tensors"].update({W2: 4}),
        lambda content: content["tensors"][W2].reverse(),
        lambda content: content["headers"].clear(),
        lambda content: content["headers"].update({SINGLE_NAME: "0" * 64}),
        lambda content: content["files"].clear(),
        lambda content: content["files"].update({"config.json": "A" * 64}),
        lambda content: content["files"].update({"vocab.json": "a" * 64}),
        lambda content: content.update(files=[]),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    written(tmp_path)
    edit_manifest(tmp_path, edit)
    assert MANIFEST_NAME in refusal(lambda: load_all(tmp_path))
    load_without = open_checkpoint(tmp_path, verify=False)
    assert load_without.rank_weights([0])
