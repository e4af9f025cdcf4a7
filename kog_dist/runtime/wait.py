"""The one bounded wait of the host side: it ends in OK, ABORT or TIMEOUT, and never spins for long.

Ranks that share cores must give way: eight ranks that spin on two cores are about 900 times slower than eight that yield. So a
wait spins briefly, then calls sched_yield, then sleeps. Where a wait may last (an idle rank, a coordinator between tokens) the
waiter blocks in the kernel on a `FutexWord` instead, so that being idle costs next to nothing. A first token is looked for
(`DecodeSlot.wait`), and so is the request of roused ranks (`ControlPage.wait_doorbell`), for a moment that is bounded.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import math
import os
import platform
import time
from collections.abc import Callable
from mmap import mmap

from kog_dist.records import dataclass

POLLS_PER_CHECK = 64  # `aborted`, `on_poll` and the clock cost more than a poll; after the first sleep they come with every poll

_PR_SET_TIMERSLACK = 29
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: waiter and waker are different processes
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_ALL_WAITERS = 2**31 - 1
_POLL_S = 0.002  # how often to look where this machine's futex call is not known


class WaitResult(enum.Enum):
    """How a wait ended. Only OK is success."""

    OK = "ok"
    ABORT = "abort"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, `math.inf` for never. Pass one deadline down instead of adding timeouts up."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """A deadline that does not come."""
        return cls(math.inf)

    def remaining_s(self) -> float:
        """Seconds left, never negative; `math.inf` for never."""
        return max(0.0, self.at_s - time.monotonic())

    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.at_s


def wait(
    ready: Callable[[], bool],
    *,
    aborted: Callable[[], bool],
    deadline: Deadline,
    on_poll: Callable[[], None] | None = None,
    spins: int = 64,
    yields: int = 2000,
    sleep_s: float = 0.0005,
) -> WaitResult:
    """Poll `ready` until it is true, `aborted` is true or the deadline has passed.

    The first `spins` polls follow one another, the next `yields` polls give the core away in between, later ones sleep
    `sleep_s`. `aborted`, `on_poll` (a heartbeat) and the clock are looked at every 64 polls, and with each poll once it sleeps.
    `ready` is asked once more after the deadline, so that a waiter that was not scheduled in time does not blame its peer.
    """
    polls = 0
    while not ready():
        polls += 1
        sleeping = polls > spins + yields
        if sleeping or polls % POLLS_PER_CHECK == 0:
            if on_poll is not None:
                on_poll()
            if aborted():
                return WaitResult.ABORT
            if deadline.expired():
                return WaitResult.OK if ready() else WaitResult.TIMEOUT
        if sleeping:
            time.sleep(min(sleep_s, deadline.remaining_s()))
        elif polls > spins:
            os.sched_yield()
    return WaitResult.OK


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def sleep_precisely() -> None:
    """From now on sleeps of this thread, and of those that it starts, end within microseconds of what was asked for.

    Otherwise the system may add 50 us to each, so that it can end several at once. For processes that poll while they work.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class FutexWord:
    """A 32-bit word of shared memory on which other processes can block in the kernel. `offset` is in bytes, a multiple of 4.

    The word itself is written by its owner through the segment; this class only waits for it to change and wakes those who wait.
    """

    def __init__(self, buffer: mmap, offset: int) -> None:
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(buffer, offset)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._word))

    def wait(self, expected: int, timeout_s: float) -> bool:
        """Return when the word is not the low half of `expected`, after a wake, a signal or `timeout_s`; check again then.

        True if it was a wake, as far as this machine's system tells.
        """
        word = self._word
        if word is None or word.value != expected & 0xFFFFFFFF or timeout_s <= 0:
            return False
        if _FUTEX_SYSCALL is None:
            time.sleep(min(timeout_s, _POLL_S))
            return False
        seconds = min(timeout_s, 3600.0)
        timeout = _Timespec(int(seconds), int((seconds % 1.0) * 1e9))
        arguments = (self._pointer, _FUTEX_WAIT, ctypes.c_uint32(expected & 0xFFFFFFFF), ctypes.byref(timeout), None, 0)
        if _syscall(ctypes.c_long(_FUTEX_SYSCALL), *arguments) == 0:
            return True
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex wait failed: {os.strerror(code)}")
        return False

    def wake(self) -> None:
        """Wake everyone who waits on this word. Call after the word was changed."""
        if self._word is not None and _FUTEX_SYSCALL is not None:
            _syscall(ctypes.c_long(_FUTEX_SYSCALL), self._pointer, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)

    def close(self) -> None:
        """Let go of the segment, so that it can be unmapped."""
        self._word = None
        self._pointer = ctypes.c_void_p()
