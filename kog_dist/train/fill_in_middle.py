"""Fill-in-the-middle: text rearranged so that a model learns to write what belongs between a prefix and a suffix.

`<|fim_prefix|>` before `<|fim_suffix|>` after `<|fim_middle|>` middle `<|endoftext|>`: an editor gives the first two and lets the
model go on behind the third token until the end of the text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

MAX_PIECE_CHARS = 4000  # about 1,250 tokens: a training row of 2,048 mostly holds a rearranged piece whole

Rearranged = tuple[str, str, str]  # prefix, suffix, middle


def rearrange(text: str, rate: float, draw: random.Random) -> Iterator[str | Rearranged]:
    """The text once, in order: plain parts and rearranged ones. A piece of whole lines is rearranged with probability `rate`.

    The middle is a random part of the piece between two characters, as in Bavarian et al. (arXiv 2207.14255).
    """
    plain = ""
    for piece in _pieces(text):
        if draw.random() >= rate:
            plain += piece
            continue
        if plain:
            yield plain
            plain = ""
        first, last = sorted(draw.sample(range(len(piece) + 1), 2))
        yield piece[:first], piece[last:], piece[first:last]
    if plain:
        yield plain


def _pieces(text: str) -> Iterator[str]:
    """Runs of whole lines of at most MAX_PIECE_CHARS characters, or one line."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > MAX_PIECE_CHARS:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece
