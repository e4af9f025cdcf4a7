"""Memory of this process that the C library keeps when it is free."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: other C libraries have none, or one that does nothing


def trim_heap() -> None:
    """Return free pages to the kernel. Takes about 0.1 ms for each MB that goes; other threads go on meanwhile.

    glibc by itself returns only what is free at the end of a heap: one small block there keeps all below it resident. This
    returns what is between blocks; the end of a thread's heap, at most 64 MB, remains glibc's to return.
    """
    if _trim is not None:
        _trim(0)
