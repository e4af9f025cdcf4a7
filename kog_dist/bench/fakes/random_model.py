"""A folder that an engine can serve, with random weights: `python -m kog_dist.bench.fakes.random_model SPEC FOLDER`.

A process of its own, because whoever measures engines on GPUs must not hold a context there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.fakes.tiny_model import TINY, TINY_ON_GPUS, write_tiny_model
from kog_dist.bench.shapes import SEED, model_folder, named_spec
from kog_dist.errors import KogError
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import write_stored_checkpoint
from kog_dist.system import python_child

_WRITE_S = 120.0


@contextmanager
def random_model(name: str, *, on_gpus: bool) -> Iterator[tuple[Path, ModelSpec]]:
    """A model of a named shape, or `tiny`, removed at the end. Shapes with a name are written with the help of a GPU."""
    spec = (TINY_ON_GPUS if on_gpus else TINY) if name == "tiny" else named_spec(name, others=("tiny",))
    with model_folder(spec) as folder:
        if name == "tiny":
            write_tiny_model(folder, spec)
        else:
            command = python_child.command("kog_dist.bench.fakes.random_model", name, str(folder))
            done = subprocess.run(command, capture_output=True, text=True, timeout=_WRITE_S, check=False)
            if done.returncode:
                raise KogError(f"a model of shape {name} could not be written: {done.stderr.strip()[-2000:]}")
        yield folder, spec


def write_on_gpu(name: str, folder: Path) -> None:
    """Write a checkpoint without hashes and its tokenizer; the same weights as other benchmarks have without a checkpoint."""
    from kog_dist.workers.cuda.random_weights import random_tensor

    spec = named_spec(name)
    write_stored_checkpoint(
        folder, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30, manifest=False
    )
    write_tokenizer(folder, spec.vocab_size, chats=True)


if __name__ == "__main__":
    write_on_gpu(sys.argv[1], Path(sys.argv[2]))
