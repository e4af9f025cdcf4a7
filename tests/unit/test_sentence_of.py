"""What a process says that ends of an error of others: want of memory in our words, wherever it hides."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from kog_dist.errors import ConfigError, sentence_of

MEMORY = "there is not enough memory; raise its limit (ulimit -v), or free some"
THREAD = "a thread could not be started; raise the limits of memory and of processes (ulimit -v, ulimit -u)"


def behind(cause: BaseException) -> BaseException:
    """What failed while the first error was being answered."""
    try:
        try:
            raise cause
        finally:
            raise RuntimeError("cannot join thread before it is started")
    except RuntimeError as error:
        return error


def no_room() -> BaseException:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, np.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), MEMORY),
        (no_room(), MEMORY),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MEMORY),
        (ImportError("libx.so: failed to map segment from shared object"), MEMORY),
        (ImportError("libx.so: cannot open shared object file"), "ImportError: libx.so: cannot open shared object file"),
        (RuntimeError("can't start new thread"), THREAD),
        (behind(MemoryError("x")), MEMORY),
        (behind(RuntimeError("can't start new thread")), THREAD),
        (behind(ValueError("x")), "RuntimeError: cannot join thread before it is started"),
        (ValueError("a\nb"), "ValueError: a b"),
        (ValueError(), "ValueError"),
        (ConfigError("ranks must be 1"), "ranks must be 1"),
    ],
)
def test_an_error_is_one_sentence(error: BaseException, sentence: str) -> None:
    assert sentence_of(error) == sentence


def test_errors_that_are_causes_of_each_other_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert sentence_of(one) == "ValueError: one"
