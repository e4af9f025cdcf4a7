"""The links of a snapshot in the Hub's cache: into its blobs, out of the cache, in circles, to pipes and devices.

An input is a JSON object: where each file of the snapshot leads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from kog_dist.bench.fakes.tiny_model import TINY
from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.generation_config import read_eos_ids
from kog_dist.model.published_config import spec_of_folder
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

ROOT = Path(tempfile.mkdtemp()).resolve()
OUTSIDE, TREE = ROOT / "outside", ROOT / "models--a--b"
BLOBS, SNAPSHOT = TREE / "blobs", TREE / "snapshots" / "r"
BLOBS.mkdir(parents=True)
(BLOBS / "folder").mkdir()
os.mkfifo(BLOBS / "pipe")
write_checkpoint(OUTSIDE, TINY, random_tensors(TINY, seed=1), max_shard_bytes=40_000, manifest=False)
for found in sorted(OUTSIDE.iterdir()):
    content = found.read_bytes()
    shutil.copy(found, BLOBS / found.name)  # the names of the seeds' targets; a mirror names its blobs as it likes
    shutil.copy(found, BLOBS / hashlib.sha256(content).hexdigest())
    (BLOBS / f"to-{found.name}").symlink_to(found)


def one_input(data: bytes) -> None:
    """What is accepted lies in the snapshot or among the blobs of its cache, links of links included."""
    try:
        links = dict(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return
    shutil.rmtree(SNAPSHOT, ignore_errors=True)
    SNAPSHOT.mkdir(parents=True)
    for name, target in links.items():
        if isinstance(target, str) and not {"/", "\0"} & set(name) and name not in ("", ".", ".."):
            try:
                (SNAPSHOT / name).symlink_to(target)
            except (OSError, ValueError):  # no file can be called so, or lead there
                continue
    with refused(CheckpointError):
        spec = spec_of_folder(SNAPSHOT)
        assert _is_inside("config.json")
        checkpoint = open_checkpoint(SNAPSHOT)
        assert checkpoint.spec == spec == TINY
        assert all(_is_inside(file.path.name) for file in checkpoint.owner.values())
        read_eos_ids(SNAPSHOT)
        Tokenizer.from_folder(SNAPSHOT)


def _is_inside(name: str) -> bool:
    return (SNAPSHOT / name).resolve().parent in (SNAPSHOT, BLOBS)
