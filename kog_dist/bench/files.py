"""Files that a benchmark writes besides what it prints: its figures as a table or as JSON, and a picture of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kog_dist.bench.report import check_destination, handing_results_to
from kog_dist.bench.tables import comma_separated, markdown
from kog_dist.errors import ConfigError, install
from kog_dist.foreign_file import read_text

TABLES: Final = (".md", ".csv", ".json")
PICTURES: Final = (".png", ".svg")


@contextmanager
def writing(names: Sequence[str] | None) -> Iterator[None]:
    """Around a benchmark: what it finishes with also goes to these files. Raises ConfigError for those that cannot be."""
    paths = [Path(name) for name in names or ()]
    for path in paths:
        _check(path)
    check_destination(*paths)

    def write(whole: Mapping[str, object]) -> None:
        for path in paths:
            try:
                _write(path, whole)
            except Exception as error:  # what was measured must not be lost with it; a picture can fail in many ways
                print(f"kog-bench: {path} was not written: {type(error).__name__}: {error}", file=sys.stderr)

    with handing_results_to(write):
        yield


def read_text_of(path: Path) -> str:
    """What a benchmark reads out. Raises ConfigError for a file that cannot be read as text."""
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file of UTF-8 text") from None


def _check(path: Path) -> None:
    if path.suffix not in (*TABLES, *PICTURES):
        raise ConfigError(f"--output {path} must end with {', '.join(TABLES)}, or for a picture with {' or '.join(PICTURES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: the folder cannot be made: {error.strerror}") from None
    if path.suffix in PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--output {path} needs matplotlib: {install('bench')}")


def _write(path: Path, whole: Mapping[str, object]) -> None:
    if path.suffix in PICTURES:
        from kog_dist.bench.pictures import draw

        draw(path, whole)
        return
    tables = {".md": markdown, ".csv": comma_separated}
    text = tables[path.suffix](whole) if path.suffix in tables else json.dumps(whole, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")
