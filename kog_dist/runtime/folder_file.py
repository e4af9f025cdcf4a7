"""JSON files of an instance folder, which any process of this user may have written: what a reader gets is whole, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_file
from kog_dist.runtime.process_arguments import record_of
from kog_dist.strict_json import parse_object

MOST_PID: Final = 2**22  # of Linux
MOST_TICKS: Final = 2**63
MAX_BYTES: Final = 1 << 16
_MAX_ITEMS: Final = 64

Record = TypeVar("Record")


def read_object(path: Path) -> dict[str, object] | None:
    """An object; None where there is none, or no file that has one."""
    try:
        return parse_object(read_file(path, MAX_BYTES), _MAX_ITEMS)
    except (OSError, ValueError):
        return None


def read_record(kind: type[Record], path: Path) -> Record | None:
    """A frozen dataclass, whose `__post_init__` raises ValueError for values that cannot be; None as `read_object`."""
    values = read_object(path)
    try:
        made: Record | None = None if values is None else record_of(kind, values, str(path))
    except (ConfigError, ValueError):
        return None
    return made


def check_process(pid: int, start_time: int = 0) -> None:
    """Raises ValueError for a number that no process, or no start of one in clock ticks, can have."""
    if not 0 < pid <= MOST_PID or not 0 <= start_time < MOST_TICKS:
        raise ValueError(f"there is no process {pid} that began at {start_time}")


def check_path(text: str) -> None:
    """Raises ValueError for what can be no path."""
    if not text or "\0" in text:
        raise ValueError("no path")
