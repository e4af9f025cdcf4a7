"""Models in the local cache of the Hugging Face Hub: found by name, and their links into `blobs/` followed no further.

The cache's form: `models--ORG--NAME/` with `refs/main` (a revision), `snapshots/REVISION/` (the model folder) and `blobs/` (the
files themselves, named by their hash, to which the snapshot's links lead). Nothing is downloaded here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.foreign_file import opened, read_file
from kog_dist.quoting import short

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")
_ADDRESS = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_REF_BYTES = 256
_TREE_PREFIX = "models--"
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")  # of blobs: Git's, of a file that Git keeps; or LFS's
_CHUNK_BYTES = 2**20


def is_hub_name(name: str) -> bool:
    """Whether the Hub could have a model of this name: `ORG/NAME`, or `NAME` alone."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def hub_name_and_tag(text: str) -> tuple[str, str]:
    """`ORG/NAME` and `QUANT` of `ORG/NAME:QUANT`, as llama.cpp and Ollama name a GGUF file; with the Hub's address or without."""
    name, _, tag = _ADDRESS.sub("", text).partition(":")
    return name, tag


def find_snapshot(name: str, environ: Mapping[str, str]) -> Path:
    """The folder of a model in the cache: what `refs/main` names. Raises CheckpointError with the command that downloads it."""
    cache = cache_folder(environ)
    tree = cache / (_TREE_PREFIX + name.replace("/", "--"))
    reference = tree / "refs" / "main"
    download = f"`hf download {name}` downloads it"
    if not os.path.isdir(tree):
        raise CheckpointError(
            f"MODEL {name} does not exist, neither as a folder nor in the cache {cache}; if the Hub has it, {download}"
        )
    try:
        revision = read_file(reference, _MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{reference} cannot be read: {error.strerror}; {download}, or give a folder of snapshots/"
        ) from None
    if not _REVISION.fullmatch(revision):
        raise CheckpointError(f"{reference} holds {short(revision)}, which is no revision; {download}")
    folder = tree / "snapshots" / revision
    if not os.path.isdir(folder) or folder.resolve().parent != (tree / "snapshots").resolve():
        raise CheckpointError(f"{reference} names revision {revision}, but {folder} is no folder of the cache; {download}")
    return folder.resolve()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where the Hub's own tools keep models: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    chosen = environ.get("HF_HUB_CACHE")
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.abspath(os.path.expanduser(chosen or os.path.join(home, "hub"))))


def hub_name(folder: Path) -> str | None:
    """`ORG/NAME` of a model folder that is a snapshot of a cache; else None."""
    tree = _tree(folder)
    return None if tree is None else tree.name.removeprefix(_TREE_PREFIX).replace("--", "/", 1)


def _tree(folder: Path) -> Path | None:
    """`models--ORG--NAME` of a resolved snapshot; None for other folders."""
    tree = folder.parent.parent
    return tree if folder.parent.name == "snapshots" and tree.name.startswith(_TREE_PREFIX) else None


def check_inside(folder: Path, path: Path) -> None:
    """Raise CheckpointError if `path`, with links followed, is neither in the model folder nor among the blobs of its cache."""
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{path} cannot be resolved: {error}") from None
    if target.is_relative_to(root):
        return
    tree = _tree(root)
    if tree is not None and target.parent == tree / "blobs":
        return
    if tree is not None:
        raise CheckpointError(f"{path} leads out of the cache's own {tree.name}/blobs; {download_again(folder)}")
    raise CheckpointError(f"{path} leads out of the model folder; copy the files themselves (cp -L), not links to them")


def download_again(folder: Path) -> str:
    """What to do about a file of the folder that is missing or damaged."""
    name = hub_name(folder.resolve())
    return "copy it again" if name is None else f"`hf download {name}` completes it"


def check_blob(path: Path) -> None:
    """Compare a file with the hash that is its name, if it is a blob of a cache; reads all of it. Raises CheckpointError."""
    target = _blob(path)
    if target is None:
        return
    try:
        with opened(target) as file:
            hasher = _hasher(target.name, os.fstat(file.fileno()).st_size)
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    _compare(path, target, hasher.hexdigest())


def check_blob_content(path: Path, content: bytes) -> None:
    """The same for a file whose content is at hand."""
    target = _blob(path)
    if target is not None:
        hasher = _hasher(target.name, len(content))
        hasher.update(content)
        _compare(path, target, hasher.hexdigest())


def _blob(path: Path) -> Path | None:
    """The blob that a link leads to if its name is a hash; a mirror may name its blobs otherwise."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    is_hash = _SHA1.fullmatch(target.name) or _SHA256.fullmatch(target.name)
    return target if target.parent.name == "blobs" and is_hash else None


def _hasher(name: str, num_bytes: int) -> hashlib._Hash:
    if _SHA256.fullmatch(name):
        return hashlib.sha256()
    return hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)  # Git's hash of a file


def _compare(path: Path, target: Path, digest: str) -> None:
    if digest != target.name:
        raise CheckpointError(
            f"{path} differs from the hash that names its blob: remove {target}, then {download_again(path.parent)}"
        )
