"""Token ids of the pieces of texts that were encoded before.

A conversation is sent again with each of its turns, and agents begin alike: of 20,000 tokens some hundred are new, and encoding
all of them takes 10 ms and more. The tokenizers library cuts a text at special tokens before it does anything else, and encodes
what lies between them piece by piece. So a piece, from one special token up to the next, has the same ids in every text.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

LEAST_LENGTH = 4096  # characters; a shorter text is encoded in less than a millisecond
MOST_BYTES = 16 << 20  # of all that is kept; what was used last stays
_ENTRY_BYTES = 400  # of a piece, besides its characters and ids


class KeptTexts:
    """Pieces of long texts, and their ids.

    encode: ids of a whole text, special tokens of the text among them and no others added. tags: ids of the special tokens at
    which texts may be cut; none: nothing is kept. Any number of threads may call it at once.
    """

    def __init__(self, encode: Callable[[str], list[int]], tags: Mapping[str, int], *, most_bytes: int = MOST_BYTES) -> None:
        self._encode, self._tags, self._most_bytes = encode, dict(tags), most_bytes
        longest_first = sorted(self._tags, key=len, reverse=True)  # as the library chooses among tokens that begin alike
        self._tag = re.compile("|".join(map(re.escape, longest_first))) if self._tags else None
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by scope and piece; what was used last is last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, scope: str = "") -> list[int]:
        """The ids of `text`; raises what the constructor's `encode` raises. How long it takes tells nothing of other scopes."""
        if self._tag is None or len(text) < LEAST_LENGTH:
            return self._encode(text)
        tags = list(self._tag.finditer(text))
        bounds = [0, *(tag.start() for tag in tags), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(bounds)]  # the first one has no tag, and may be empty
        ids: list[int] = []
        num_kept = 0
        for kept in self._known(scope, pieces):
            ids += kept
            num_kept += 1
        if num_kept < len(pieces):
            rest = self._encode(text[bounds[num_kept] :])
            ids += rest
            wanted = [self._tags[tag[0]] for tag in tags[max(0, num_kept - 1) :]]
            self._keep(scope, pieces[num_kept:], _cut(rest, wanted, has_first=num_kept == 0))
        return ids

    def _known(self, scope: str, pieces: Sequence[str]) -> list[array[int]]:
        """The ids of the first pieces, up to one that is not kept."""
        found = []
        with self._lock:
            for piece in pieces:
                key = (scope, piece)
                if (ids := self._kept.get(key)) is None:
                    break
                self._kept.move_to_end(key)
                found.append(ids)
        return found

    def _keep(self, scope: str, pieces: Sequence[str], parts: Iterable[Sequence[int]]) -> None:
        with self._lock:
            for piece, ids in zip(pieces, parts, strict=False):
                key = (scope, piece)
                if key not in self._kept:
                    self._kept[key] = array("I", ids)
                    self._num_bytes += _num_bytes(piece, ids)
            while self._num_bytes > self._most_bytes:
                (_, piece), ids = self._kept.popitem(last=False)
                self._num_bytes -= _num_bytes(piece, ids)


def _cut(ids: Sequence[int], tags: Sequence[int], *, has_first: bool) -> list[Sequence[int]]:
    """The ids of each piece, of which all but the first begin with these tags, in this order, and the first with none if
    `has_first`. None at all if `ids` has other tags: then something is not as this file believes.
    """
    known = set(tags)
    places = [place for place, token_id in enumerate(ids) if token_id in known]
    if [ids[place] for place in places] != list(tags) or (not has_first and places[:1] != [0]):
        return []
    bounds = [*([0] if has_first else []), *places, len(ids)]
    return [ids[begin:end] for begin, end in pairwise(bounds)]


def _num_bytes(piece: str, ids: Sequence[int]) -> int:
    return _ENTRY_BYTES + piece.__sizeof__() + 4 * len(ids)
