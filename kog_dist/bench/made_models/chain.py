"""A known answer as a chain of tokens, each of which has one successor; and the tokenizer that reads the same tokens in prompts.

A text is cut into pieces, runs of words that stand nowhere else in any of the texts. Each is a token of its own, so that a
prompt which quotes the text has the tokens that the answer will have, and a draft can find them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from kog_dist.errors import ConfigError
from kog_dist.quoting import short
from kog_dist.records import dataclass

_NUM_BYTES = 256  # tokens that a tokenizer has in any case
_WORD = re.compile(r"\s*\S+|\s+$")


def mark_of(text_idx: int) -> str:
    """The token behind which a text is written; behind all others that is the first one."""
    return f"<|text_{text_idx}|>"


@dataclass(frozen=True)
class TextChain:
    """`texts`: the pieces of each. Ids: 256 bytes, then the marks, then the pieces in order."""

    texts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextChain:
        """Cut texts into pieces. Raises ConfigError for one that is empty, not ASCII, or whole within another."""
        for text in texts:
            if not text.strip() or not text.isascii():
                raise ConfigError(f"--chain takes ASCII texts that are not empty, not {short(text[:60])}")
            if sum(_count(text, other) for other in texts) > 1:
                raise ConfigError(f"--chain: the text that begins {short(text[:60])} stands more than once in what is given")
        return cls(tuple(_pieces(text, texts) for text in texts))

    @property
    def names(self) -> list[str]:
        """All tokens that the tokenizer has for it, in the order of their ids."""
        return [*map(mark_of, range(len(self.texts))), *(piece for pieces in self.texts for piece in pieces)]

    def following(self, end_id: int) -> dict[int, int]:
        """Which id follows each mark and each piece; `end_id` ends every text."""
        found: dict[int, int] = {}
        first = _NUM_BYTES + len(self.texts)
        for text_idx, pieces in enumerate(self.texts):
            chain = [_NUM_BYTES + text_idx, *range(first, first + len(pieces)), end_id]
            found |= dict(pairwise(chain))
            first += len(pieces)
        return found

    @property
    def begin_id(self) -> int:
        """What follows all tokens that are not of the chain."""
        return _NUM_BYTES + len(self.texts)


def _pieces(text: str, texts: Sequence[str]) -> tuple[str, ...]:
    words = _WORD.findall(text)
    pieces: list[str] = []
    piece = ""
    for word in words:
        piece += word
        if sum(_count(piece, other) for other in texts) == 1:
            pieces.append(piece)
            piece = ""
    if piece:  # what is left ends the last one
        pieces[-1:] = ["".join(pieces[-1:]) + piece]
    return tuple(pieces)


def _count(piece: str, text: str) -> int:
    """How often a piece stands in a text, where it overlaps itself, too; more than two are two."""
    first = text.find(piece)
    return 0 if first < 0 else 1 if text.find(piece, first + 1) < 0 else 2
