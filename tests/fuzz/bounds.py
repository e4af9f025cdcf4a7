"""What a fuzz target may take for one input, and the page on which its process says where it is."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"  # TARGET/NAME: seeds, and every input that was once a finding
MAX_CPU_S = 1.0  # of processor time for one input
MAX_STUCK_S = 20.0  # of waiting for one input, on a busy machine too
MAX_GROWTH_BYTES = 100 << 20  # of resident memory in one input
ADDRESS_SPACE_BYTES = 1 << 30  # beyond what the imports took
MAX_INPUT_BYTES = 1 << 14  # that the fuzzer makes; seeds may have more
_PAGE_BYTES = 4 << 20
_HEAD = struct.Struct("<QQ")  # cases begun, bytes of the current input


class CasePage:
    """The input that a target is at, in a mapped file: it outlives the process that wrote it."""

    def __init__(self, path: Path) -> None:
        """Map the file, which is made if need be."""
        with path.open("a+b") as file:
            file.truncate(_PAGE_BYTES)
            self._page = mmap.mmap(file.fileno(), _PAGE_BYTES)

    def begin(self, data: bytes) -> None:
        """Note that the next case has begun."""
        kept = data[: _PAGE_BYTES - _HEAD.size]
        self._page[_HEAD.size : _HEAD.size + len(kept)] = kept
        _HEAD.pack_into(self._page, 0, self.num_cases + 1, len(kept))

    @property
    def num_cases(self) -> int:
        """Cases that were begun."""
        return int(_HEAD.unpack_from(self._page)[0])

    @property
    def data(self) -> bytes:
        """The input of the last one."""
        length = _HEAD.unpack_from(self._page)[1]
        return self._page[_HEAD.size : _HEAD.size + length]
