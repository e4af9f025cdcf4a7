"""Which replica has how much of a prompt cached, as far as the requests that went by tell.

What was seen is a tree of prefixes: a node is a block of a prompt behind all blocks before it, and its key a hash of these. So a
dictionary of keys is the whole tree, and a path through it is found from any node on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

TEXT_BLOCK_BYTES: Final = 256
IDS_BLOCK: Final = 64
MAX_BLOCKS: Final = 1024  # of one prompt; what is longer is known by its beginning
MAX_KEYS: Final = 1 << 16  # 20 MB
MAX_HOMES: Final = 16  # replicas that are remembered for one beginning, the last ones

_ID_BYTES = 8
_DIGEST_BYTES = 12


def conversation_key(conversation: str, salt: str | None = None) -> bytes:
    """The key of a conversation that names itself. Of another salt it is another one, whatever it is called."""
    return _begin(b"conversation", salt) + b" " + conversation.encode()


def text_keys(text: str, salt: str | None = None) -> tuple[bytes, ...]:
    """One key per whole block from the beginning of a text; each stands for everything up to its end. Salts share none."""
    return tuple(_chain(b"text", salt, text.encode(), TEXT_BLOCK_BYTES))


def ids_keys(token_ids: Sequence[int], salt: str | None = None) -> tuple[bytes, ...]:
    """The same for token ids (each from -2^63 to 2^63 - 1)."""
    return tuple(_chain(b"ids", salt, array("q", token_ids[: IDS_BLOCK * MAX_BLOCKS]).tobytes(), IDS_BLOCK * _ID_BYTES))


def _chain(kind: bytes, salt: str | None, content: bytes, block_bytes: int) -> Iterator[bytes]:
    digest = _begin(kind, salt)
    for begin in range(0, min(len(content), MAX_BLOCKS * block_bytes) - block_bytes + 1, block_bytes):
        digest = hashlib.blake2b(digest + content[begin : begin + block_bytes], digest_size=_DIGEST_BYTES).digest()
        yield digest


def _begin(kind: bytes, salt: str | None) -> bytes:
    return kind if salt is None else hashlib.blake2b(kind + b" " + salt.encode(), digest_size=_DIGEST_BYTES).digest()


class Affinity:
    """Keys of what replicas have seen, newest kept. It may be wrong: a wrong guess costs a prefill, never an answer."""

    def __init__(self) -> None:
        self._homes_of: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """Replicas that saw a beginning of it, each with the number of blocks; who saw most comes first, of equals the last."""
        found: dict[str, int] = {}
        for num_blocks in range(len(keys), 0, -1):
            for name in self._homes_of.get(keys[num_blocks - 1], ()):
                found.setdefault(name, num_blocks)
            if len(found) >= MAX_HOMES:
                break
        return found

    def remember(self, keys: Sequence[bytes], name: str) -> None:
        """From now on `name` has all that `keys` stand for."""
        for key in reversed(keys):  # of a prompt the end is forgotten first: without it the beginning is still worth something
            others = [other for other in self._homes_of.get(key, ()) if other != name]
            self._homes_of[key] = (name, *others[: MAX_HOMES - 1])
            self._homes_of.move_to_end(key)
        while len(self._homes_of) > MAX_KEYS:
            self._homes_of.popitem(last=False)

    def forget(self, name: str) -> None:
        """A replica is gone, and its caches with it."""
        for key, homes in self._homes_of.items():
            if name in homes:
                self._homes_of[key] = tuple(home for home in homes if home != name)
