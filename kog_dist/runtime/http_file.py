"""What a gateway leaves in the instance folder for the launcher and for commands of the same user."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kog_dist.records import dataclass
from kog_dist.runtime.folder_file import check_process, read_record

HTTP_FILE: Final = "http.json"  # there once the gateway answers; see Service.announce


@dataclass(frozen=True, slots=True)
class HttpFile:
    """Where it answers, and whether the engine takes requests."""

    url: str
    pid: int
    serves: bool

    def __post_init__(self) -> None:
        check_process(self.pid)

    @classmethod
    def read(cls, folder: Path) -> HttpFile | None:
        """That of an instance folder; None where there is none, or none that can be read."""
        return read_record(cls, folder / HTTP_FILE)
