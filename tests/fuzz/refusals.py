"""The errors that a target may end with, and what their messages must be like."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from kog_dist.quoting import MAX_MESSAGE_CHARS


@contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    """Accept these errors if a user can be shown them."""
    try:
        yield
    except errors as error:
        message = str(error)
        assert 0 < len(message) <= MAX_MESSAGE_CHARS, len(message)
        acting = [letter for letter in message if letter != "\n" and unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")]
        assert not acting, ascii(acting)
