"""Shapes that benchmarks of GPUs know by name, and checkpoints of them with random weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec, laneformer_2b

# Shapes of models that people run, in lane form with delay 0: hidden size, layers, heads, KV heads, FFN, vocabulary.
DENSE = {
    "llama-3.2-1b": (2048, 16, 32, 8, 8192, 128256),
    "llama-3.2-3b": (3072, 28, 24, 8, 8192, 128256),
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256),
    "mistral-7b": (4096, 32, 32, 8, 14336, 32768),
    "qwen3-1.7b": (2048, 28, 16, 8, 6144, 151936),
    "qwen3-8b": (4096, 36, 32, 8, 12288, 151936),
    "smollm2-1.7b": (2048, 24, 32, 32, 8192, 49152),
}
_DENSE_CONTEXT = 4096
_DENSE_LANES = 8  # so that every number of ranks up to it has the same bits
SEED = 1
_TMPFS = Path("/dev/shm")


def named_spec(name: str, *, others: Sequence[str] = ()) -> ModelSpec:
    """The spec of a name; a dense shape may say how many lanes it has (NAME:1), else 8.

    Raises ConfigError listing the known ones, and `others` that the caller knows.
    """
    if name == "2b":
        return laneformer_2b()
    base, _, lanes = name.partition(":")
    if base not in DENSE or lanes not in ("", "1", "2", "4", "8"):
        raise ConfigError(f"--spec {name!r} is not known; known: {', '.join((*others, '2b', *DENSE))}, and with lanes NAME:1")
    hidden, layers, heads, kv_heads, ffn, vocab = DENSE[base]
    return ModelSpec(
        hidden, layers, heads, kv_heads, ffn, vocab, max_context=_DENSE_CONTEXT, num_lanes=int(lanes or _DENSE_LANES), delay=0
    )


@contextmanager
def random_checkpoint(spec: ModelSpec, parent: Path | None) -> Iterator[Path]:
    """A folder with a bfloat16 checkpoint and its manifest, made on the GPU; removed at the end.

    It lies in `parent`; None: in memory (/dev/shm) if there is room, else where temporary files go.
    """
    from kog_dist.model.checkpoint import write_stored_checkpoint
    from kog_dist.workers.cuda.device_weights import random_tensor

    with model_folder(spec, parent) as folder:
        write_stored_checkpoint(folder, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30)
        yield folder


@contextmanager
def model_folder(spec: ModelSpec, parent: Path | None = None) -> Iterator[Path]:
    """An empty folder with room for a 16-bit checkpoint of `spec`, removed at the end; `parent` as above."""
    num_bytes = 2 * spec.num_parameters + 2**28
    if parent is None and _TMPFS.is_dir() and shutil.disk_usage(_TMPFS).free > num_bytes:
        parent = _TMPFS
    with tempfile.TemporaryDirectory(prefix="kog-model-", dir=parent) as name:
        free = shutil.disk_usage(name).free
        if free < num_bytes:
            raise ConfigError(f"{name} has room for {free / 1e9:.1f} GB, the model needs {num_bytes / 1e9:.1f} GB; give --folder")
        yield Path(name)
