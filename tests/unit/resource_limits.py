"""Resource limits of this process, for a while."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    """One of RLIMIT_..., lowered in the block: writing beyond RLIMIT_FSIZE is like a full disk."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
