"""Logs of an engine as files: which there are, and the end of one that grows."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kog_dist.foreign_file import open_fd


def log_names(folder: Path) -> list[str]:
    """Processes that have a log there: launcher, rank-0, r0/rank-0."""
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.log"))


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_fd(path), "rb")


class LogTail:
    """The end of a log that grows, and goes on as a new file when it has grown enough."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _opened(path)

    def last_lines(self, num_lines: int) -> bytes:
        """Of all that is there now, also in the file before it if this one has not so many."""
        text = self._file.read()
        older = Path(f"{self._path}.1")
        if text.count(b"\n") < num_lines and older.exists():
            with _opened(older) as stream:
                text = stream.read() + text
        return b"".join(text.splitlines(keepends=True)[-num_lines:]) if num_lines else b""

    def news(self) -> bytes:
        """What was written since."""
        if self._file.tell() > os.fstat(self._file.fileno()).st_size:  # logrotate has emptied it
            self._file.seek(0)
        text = self._file.read()
        with suppress(FileNotFoundError):  # it is being renamed in this moment
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                following = _opened(self._path)
                text += self._file.read() + following.read()
                self._file.close()
                self._file = following
        return text

    def close(self) -> None:
        """Read no more."""
        self._file.close()
