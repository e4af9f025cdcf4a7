"""What `kog-bench make-model` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kog_dist.bench.made_models.chain import TextChain, mark_of
from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.shapes import SHAPES
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_file
from kog_dist.model.manifest import read_json

_MOST_TEXT_BYTES = 1 << 20


def run(shape: str, out: Path, texts: Sequence[Path], seed: int) -> None:
    """Make it and print what it is. Raises ConfigError, CheckpointError."""
    config = _config(shape)
    chain = TextChain.of([_text(path) for path in texts]) if texts else None
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}; give a folder that does not exist") from None
    made = write_published(out, config, seed=seed, chain=chain)
    print(f"{out}: {shape}, {made.num_bytes / 1e9:.3f} GB, {made.spec.num_parameters / 1e6:,.0f} million parameters")
    for text_idx, (path, num_tokens) in enumerate(zip(texts, made.num_tokens, strict=True)):
        when = f"behind {mark_of(text_idx)}" + (", and behind all but its texts" if text_idx == 0 else "")
        print(f"  writes {path} in {num_tokens} tokens {when}")


def _text(path: Path) -> str:
    try:
        return read_file(path, _MOST_TEXT_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"--chain {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chain {path} is not ASCII at byte {error.start}; other texts cannot be cut into tokens") from None


def _config(shape: str) -> Mapping[str, object]:
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    if not path.exists():
        raise ConfigError(f"--spec {shape!r} is not known; known: {', '.join(SHAPES)}, or a config.json")
    config = read_json(path.parent if path.is_file() else path, "config.json", None)
    if config is None:
        raise ConfigError(f"--spec: {shape} has no config.json")
    return config
