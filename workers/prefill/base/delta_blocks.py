"""How the delta nets of a chunk take its tokens together."""

from __future__ import annotations

BLOCK = 64  # tokens whose changes of a state are one triangular system; decides about bits


def num_blocks(size: int) -> int:
    """Of a chunk of so many tokens, the last one filled up."""
    return -(-size // BLOCK)
