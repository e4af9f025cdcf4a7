"""The exceptions of the project. Everything a user can cause or must know of is one of these.

KogError
├── ConfigError          a flag, key, environment value or combination of them is wrong (exit 2)
├── CheckpointError      a model folder cannot be used as it is on disk (exit 3)
├── PlanError            a plan broke one of the rules in decode/validate (exit 3)
├── CompileError         a device program did not build; carries the compiler's log (exit 3)
├── LaunchError          a process, port, name, device or memory was not to be had (exit 3)
├── ProtocolError        an RPC peer sent something that is not the protocol
├── RequestError         one request was refused; the engine is unharmed (exit 2)
├── RequestFailed        a request that was running ended without its answer (exit 4)
├── AbortedError         a wait ended because the engine is being stopped
├── PeerLost             another rank died (exit 4)
├── DeviceError          a wait on a device or rank ran out of time; carries what it waited for (exit 5)
└── RendezvousTimeout    ranks did not all arrive in time; carries those that are missing (exit 5)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kog_dist.quoting import MAX_MESSAGE_CHARS, printable

if TYPE_CHECKING:
    from kog_dist.runtime.abi import WaitRecord


def remedy_of(error: BaseException, otherwise: str = "") -> str:
    """What to do where the system has refused something: the limit that was reached, else `otherwise`."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "raise the limit of open files (ulimit -n)"
    return otherwise


_NO_MEMORY = (os.strerror(errno.ENOMEM), "failed to map segment")  # the second of the dynamic linker


def sentence_of(error: BaseException) -> str:
    """An error that ends a process, on one line: those of others by the kind and what they say, but for want of memory, which may
    hide behind what failed because of it.
    """
    text = " ".join(str(error).split())
    if isinstance(error, KogError):
        return text
    for cause in _causes(error):
        is_unmapped = isinstance(cause, ImportError | OSError) and any(words in str(cause) for words in _NO_MEMORY)
        if isinstance(cause, MemoryError) or is_unmapped:
            return "there is not enough memory; raise its limit (ulimit -v), or free some"
        if isinstance(cause, RuntimeError) and "can't start new thread" in str(cause):
            return "a thread could not be started; raise the limits of memory and of processes (ulimit -v, ulimit -u)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class KogError(Exception):
    """Base of all errors that are meant to be read by a user: one sentence with the cause and the remedy.

    As text it is fit for a terminal and a log, whatever file or client had a part in it (kog_dist/quoting.py).
    """

    exit_code = 3
    max_chars = MAX_MESSAGE_CHARS

    def __str__(self) -> str:
        return printable(super().__str__(), self.max_chars)


class ConfigError(KogError):
    """A flag, configuration key, environment value or their combination cannot be used."""

    exit_code = 2


class CheckpointError(KogError):
    """A model folder is missing, damaged, or not what its config.json says. The message names file and tensor."""


class PlanError(KogError):
    """A plan broke a rule; the message lists each finding of the validator."""


class CompileError(KogError):
    """A device program did not compile."""

    max_chars = 1 << 20  # a compiler's log is read whole

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}")
        self.log = log


class LaunchError(KogError):
    """The engine could not be started; nothing was served."""


# What optional features need: this package is on no index, so advice names none.
PACKAGES: Final[Mapping[str, str]] = {
    "cuda": "cupy-cuda13x nvidia-cublas",
    "train": "torch",
    "mpi": "mpi4py mpich",
    "ray": "'ray[default]'",
    "bench": "matplotlib",
    "gguf": "gguf",
}


def install(extra: str) -> str:
    """`pip install gguf, or '.[gguf]' in a clone`."""
    return f"pip install {PACKAGES[extra]}, or '.[{extra}]' in a clone"


@contextmanager
def naming_extra(extra: str) -> Iterator[None]:
    """Where torch or cupy are missing, raise LaunchError with the extra of the package that brings them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "cupy"):
            raise
        message = f"this needs {error.name}, which is not installed: {install(extra)}"
        raise LaunchError(message) from None


class ProtocolError(KogError):
    """A message did not follow the RPC protocol."""


class RequestError(KogError):
    """One request was refused before it reached a rank. `code` is stable and machine-readable.

    `retry_after_s`: when the same request may be taken, where that can be said.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class RequestFailed(KogError):
    """A request was accepted and then ended without its answer. `code` is stable and machine-readable."""

    exit_code = 4

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AbortedError(KogError):
    """A wait was left because the engine is being aborted. Nothing may be published after it."""

    exit_code = 4


class PeerLost(KogError):
    """Another rank is gone."""

    exit_code = 4

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class DeviceError(KogError):
    """A bounded wait ran out of time. `record` says who waited where for which epoch, and what was seen instead."""

    exit_code = 5

    def __init__(self, record: WaitRecord) -> None:
        super().__init__(str(record))
        self.record = record


class RendezvousTimeout(KogError):
    """Not every rank arrived before the deadline."""

    exit_code = 5

    def __init__(self, missing: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
