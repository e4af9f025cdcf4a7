"""Models of the Hugging Face cache: found by name, links followed into the cache's own blobs only, hashes in names compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError
from kog_dist.launch.inspection import check
from kog_dist.launch.target import model_folder
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.hub_cache import cache_folder, find_snapshot, hub_name, is_hub_name
from kog_dist.model.manifest import MANIFEST_NAME
from kog_dist.model.safetensors_file import narrow, write_safetensors
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from tests.unit.gguf_files import random_tensors as random_gguf_tensors
from tests.unit.gguf_files import write_gguf

NAME, REVISION = "some-org/Tiny-1.0", "ab" * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as huggingface_hub makes it, with one sharded model whose files are links to blobs."""
    plain, hub = tmp_path / "plain", tmp_path / "hub"
    write_tiny_model(plain)
    write_checkpoint(plain, TINY, random_tensors(TINY, seed=1), max_shard_bytes=40_000, manifest=False)
    (plain / MANIFEST_NAME).unlink(missing_ok=True)
    tree = hub / "models--some-org--Tiny-1.0"
    snapshot, blobs = tree / "snapshots" / REVISION, tree / "blobs"
    for folder in (snapshot, blobs, tree / "refs"):
        folder.mkdir(parents=True)
    (tree / "refs" / "main").write_text(REVISION)
    for path in plain.iterdir():
        content = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        digest = hashlib.sha256(content) if is_large else hashlib.sha1(f"blob {len(content)}\0".encode() + content)
        (blobs / digest.hexdigest()).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest.hexdigest()}")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    return hub


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def snapshot_of(cache: Path) -> Path:
    return cache / "models--some-org--Tiny-1.0" / "snapshots" / REVISION


def test_a_name_leads_to_the_snapshot_and_its_links_are_followed(cache: Path) -> None:
    folder, name = model_folder(LaunchConfig(model=NAME))
    assert (folder, name) == (snapshot_of(cache), NAME)
    assert model_folder(LaunchConfig(model=str(folder))) == (folder, NAME), "a snapshot given by its path has the same name"
    assert Tokenizer.from_folder(folder) is not None
    written = random_tensors(TINY, seed=1)
    for tensor, values in written.items():
        assert np.array_equal(open_checkpoint(folder).tensor(tensor), narrowed(values))
    assert check(LaunchConfig(model=NAME, device="cpu", ranks=1), deep=True).startswith(f"{NAME}: ")


@pytest.fixture
def ggufs(cache: Path) -> Path:
    """A snapshot with files of two formats, one of them in a folder and in parts, and with a projector beside them."""
    tree = cache / "models--some-org--Tiny-GGUF"
    snapshot, blobs = tree / "snapshots" / REVISION, tree / "blobs"
    for folder in (snapshot / "Q5_0", blobs, tree / "refs"):
        folder.mkdir(parents=True)
    (tree / "refs" / "main").write_text(REVISION)
    made = cache / "made.gguf"
    for name, form in (("tiny-Q8_0.gguf", "Q8_0"), ("mmproj-Q8_0.gguf", "F16"), ("Q5_0/tiny-Q5_0-00001-of-00001.gguf", "Q5_0")):
        write_gguf(made, "llama", random_gguf_tensors("llama"), form=form)
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        made.rename(blobs / digest)
        (snapshot / name).symlink_to(f"../../{'../' * name.count('/')}blobs/{digest}")
    return snapshot


@pytest.mark.parametrize("prefix", ["", "hf.co/", "https://huggingface.co/"])
@pytest.mark.parametrize(("tag", "file"), [("Q8_0", "tiny-Q8_0.gguf"), ("q5_0", "Q5_0/tiny-Q5_0-00001-of-00001.gguf")])
def test_a_tag_leads_to_a_gguf_file_of_the_cache(ggufs: Path, prefix: str, tag: str, file: str) -> None:
    settings = LaunchConfig(model=f"{prefix}some-org/Tiny-GGUF:{tag}", device="cpu", ranks=1)
    assert model_folder(settings) == (ggufs / file, f"some-org/Tiny-GGUF:{tag}")
    assert check(settings, deep=True).startswith(f"some-org/Tiny-GGUF:{tag}: ")


def test_tags_that_lead_to_no_file_or_out_of_the_cache_are_refused(ggufs: Path, tmp_path: Path) -> None:
    def said(tag: str) -> str:
        return refusal(lambda: model_folder(LaunchConfig(model=f"some-org/Tiny-GGUF:{tag}")))

    assert "has no GGUF file with 'Q4' in the name; it has 'Q5_0/tiny-Q5_0-00001-of-00001.gguf', 'tiny-Q8_0.gguf'" in said("Q4")
    assert "has 2 GGUF files with 'tiny' in the name" in said("tiny")
    (ggufs / "tiny-Q6_K.gguf").symlink_to(tmp_path / "elsewhere.gguf")
    assert "leads out of the cache's own models--some-org--Tiny-GGUF/blobs" in said("Q6_K")
    assert model_folder(LaunchConfig(model=f"hf.co/{NAME}"))[1] == NAME
    assert "does not exist" in refusal(lambda: model_folder(LaunchConfig(model="a/b/c:Q8_0")))


def narrowed(values: np.ndarray) -> np.ndarray:
    return (narrow(values, "BF16").astype(np.uint32) << 16).view(np.float32)


def test_a_folder_of_that_name_comes_before_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert model_folder(LaunchConfig(model=NAME)) == ((tmp_path / NAME).resolve(), "Tiny-1.0")


def test_a_model_that_is_not_there_is_refused_with_the_command_that_downloads_it(cache: Path) -> None:
    said = refusal(lambda: model_folder(LaunchConfig(model="Qwen/Qwen3-4B")))
    assert f"neither as a folder nor in the cache {cache}" in said
    assert "`hf download Qwen/Qwen3-4B`" in said
    (cache / "models--Qwen--Qwen3-4B").mkdir()
    assert "refs/main cannot be read" in refusal(lambda: model_folder(LaunchConfig(model="Qwen/Qwen3-4B")))


def test_a_download_that_was_cut_off_is_named_with_what_completes_it(cache: Path) -> None:
    folder = snapshot_of(cache)
    shard = next(folder.glob("*.safetensors"))
    (shard.parent / os.readlink(shard)).unlink()
    assert "`hf download some-org/Tiny-1.0` completes it" in refusal(lambda: open_checkpoint(folder))
    shard.unlink()
    assert "`hf download some-org/Tiny-1.0` completes it" in refusal(lambda: open_checkpoint(folder))


@pytest.mark.parametrize("revision", ["", "../../blobs", "a/b", "x" * 200, "\u00ff", "ab" * 19])
def test_a_reference_that_names_no_snapshot_is_refused(cache: Path, revision: str) -> None:
    (cache / "models--some-org--Tiny-1.0" / "refs" / "main").write_text(revision)
    assert "refs/main" in refusal(lambda: find_snapshot(NAME, os.environ))


def test_a_snapshot_that_is_a_link_out_of_the_tree_is_refused(cache: Path, tmp_path: Path) -> None:
    snapshot_of(cache).rename(tmp_path / REVISION)
    snapshot_of(cache).symlink_to(tmp_path / REVISION)
    assert "is no folder of the cache" in refusal(lambda: find_snapshot(NAME, os.environ))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX_NAME, "*.safetensors"])
@pytest.mark.parametrize("target", ["../../../elsewhere", "../../refs/main", "../../blobs/deeper/file", "../../blobs/.."])
def test_links_that_leave_the_blobs_are_refused(cache: Path, name: str, target: str) -> None:
    folder = snapshot_of(cache)
    name = min(folder.glob(name)).name
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    for path in ((cache / "elsewhere"), cache / "models--some-org--Tiny-1.0" / "blobs" / "deeper" / "file"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (folder / name).symlink_to(target)
    read = (lambda: Tokenizer.from_folder(folder)) if name == "tokenizer.json" else (lambda: open_checkpoint(folder))
    assert "leads out of the cache's own models--some-org--Tiny-1.0/blobs" in refusal(read)


def test_links_of_another_folder_gain_nothing_from_a_cache_beside_it(cache: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    target = (snapshot_of(cache) / "config.json").resolve()
    (plain / "config.json").unlink()
    (plain / "config.json").symlink_to(target)
    assert "leads out of the model folder" in refusal(lambda: open_checkpoint(plain))


def test_files_that_differ_from_the_hash_in_their_blobs_name_are_refused(cache: Path) -> None:
    folder = snapshot_of(cache)
    blob = (folder / "config.json").resolve()
    blob.write_bytes(blob.read_bytes() + b" ")
    assert f"remove {blob}, then `hf download {NAME}` completes it" in refusal(lambda: open_checkpoint(folder))
    blob.write_bytes(blob.read_bytes()[:-1])
    shard = max(folder.glob("*.safetensors")).resolve()
    flipped = bytearray(shard.read_bytes())
    flipped[-2] ^= 1
    shard.write_bytes(flipped)
    opened = open_checkpoint(folder)
    assert "differs from the hash that names its blob" in refusal(opened.verify_all)


def test_the_cache_is_where_the_hubs_own_tools_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder({}) == Path("/home/me/.cache/huggingface/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/hf"}) == Path("/home/me/hf/hub")
    assert cache_folder({"HF_HOME": "/hf", "HF_HUB_CACHE": "/hub"}) == Path("/hub")


def test_names_of_the_hub() -> None:
    for name in ("gpt2", "Qwen/Qwen3-4B", "meta-llama/Llama-3.2-1B", "a/b_c.d"):
        assert is_hub_name(name)
    for name in ("", "/a", "a/", "../a", "a/../b", "a/b/c", "a--b/c", ".a", "a b", "a\0", "x" * 200, "~/a", "a/-b"):
        assert not is_hub_name(name)
    assert hub_name(Path("/hub/models--a--b--c/snapshots/1")) == "a/b--c"
    assert hub_name(Path("/hub/a/snapshots/1")) is None


# ---- dtypes ----
def test_some_tensors_in_float32_become_the_dtype_of_the_others(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, seed=1)
    write_checkpoint(tmp_path, TINY, tensors, manifest=False)
    name = next(name for name, values in tensors.items() if values.ndim == 1)

    def rewrite(dtypes: dict[str, str]) -> Checkpoint:
        stored = {
            key: (kind, values.shape, narrow(values, kind))
            for key, values in tensors.items()
            for kind in [dtypes.get(key, "BF16")]
        }
        write_safetensors(tmp_path / SINGLE_NAME, stored)
        return open_checkpoint(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    opened = rewrite({name: "F32"})
    assert (opened.dtype, config["dtype"]) == ("bfloat16", "bfloat16")
    assert np.array_equal(opened.tensor(name), tensors[name]), "not rounded where it need not be"
    pieces = [bytes(piece) for piece in opened.stored_part(name, 0, lambda: memoryview(bytearray(64)), verify=True)]
    assert b"".join(pieces) == narrow(tensors[name], "BF16").tobytes()
