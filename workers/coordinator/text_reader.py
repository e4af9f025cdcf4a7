"""Long texts are read beside the coordinator's loop: tokenizing 128 KiB takes 0.1 s, in which others want their tokens.

It also takes some 200 bytes of memory per token for as long, which go back to the kernel then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.records import dataclass
from kog_dist.rpc.messages import Generate
from kog_dist.runtime.heap import trim_heap
from kog_dist.runtime.rounds import Rounds

LONG_TEXT = 2048  # characters, which take about a millisecond: shorter ones are read at once
UNREAD = DecodeRequest(prompt=(), max_tokens=1)  # what is known of a request while its text is being read

Asker = TypeVar("Asker")
Read = Callable[[], DecodeRequest]


@dataclass(eq=False)
class _Reading(Generic[Asker]):
    asker: Asker
    client: bytes
    read: Read
    is_wanted: bool = True
    found: DecodeRequest | BaseException | None = None  # None: not read yet


class TextReader(Generic[Asker]):
    """One thread. It has one text at a time; clients whose texts wait take turns. An asker is whatever wants to know (a request's
    stream). All but the thread itself is for one thread.
    """

    def __init__(self) -> None:
        self._waiting = Rounds[_Reading[Asker]]()
        self._reading: _Reading[Asker] | None = None  # what the thread has
        self._orders: SimpleQueue[_Reading[Asker] | None] = SimpleQueue()  # None: end
        self._lock = threading.Lock()  # of the event, which the thread must not write once it is closed
        self._event_fd = -1

    def start(self) -> None:
        """Before the first `ask`: nothing that later requests do may need a file or a thread that cannot be had."""
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._work, name="text-reader", daemon=True).start()  # nobody waits for it at the end

    def is_for(self, message: Generate) -> bool:
        """Whether this request has a text, and reading it would hold others up."""
        return message.prompt is not None and len(message.prompt) > LONG_TEXT

    @property
    def askers(self) -> list[Asker]:
        """Those whose text is being read or waits for that, in the order of their turns."""
        if self._reading is None:  # nobody waits: this is asked between any two tokens
            return []
        current = [self._reading] if self._reading.is_wanted else []
        return [reading.asker for reading in (*current, *self._waiting)]

    @property
    def fds(self) -> list[int]:
        """What becomes readable when a text has been read."""
        return [self._event_fd] if self._event_fd >= 0 else []

    def ask(self, asker: Asker, client: bytes, read: Read) -> None:
        """Have `read` called in the thread; `answer` will name the asker."""
        assert self._event_fd >= 0, "start it first"
        self._waiting.add(client, _Reading(asker, client, read))
        self._give()

    def forget(self, asker: Asker) -> None:
        """The asker does not want to know any more."""
        if self._reading is not None and self._reading.asker is asker:
            self._reading.is_wanted = False
            return
        for reading in self._waiting:
            if reading.asker is asker:
                self._waiting.remove(reading.client, reading)
                return

    def has_answer(self) -> bool:
        """Whether `answer` has something to do."""
        return self._reading is not None and self._reading.found is not None

    def answer(self) -> tuple[Asker, DecodeRequest | BaseException] | None:
        """A text that has been read, or what `read` raised; None: there is nothing to tell. Gives the thread the next one."""
        reading = self._reading
        if reading is None or reading.found is None:
            return None
        os.eventfd_read(self._event_fd)
        self._reading = None
        self._give()
        return (reading.asker, reading.found) if reading.is_wanted else None

    def close(self) -> None:
        """Forget everybody; a text that is being read is still read to its end, for nobody."""
        self._waiting.clear()
        self._reading = None
        self._orders.put(None)
        with self._lock:
            if self._event_fd >= 0:
                os.close(self._event_fd)
            self._event_fd = -1

    def _give(self) -> None:
        if self._reading is None and len(self._waiting):
            self._reading = self._waiting.pop()
            self._orders.put(self._reading)

    def _work(self) -> None:
        while (reading := self._orders.get()) is not None and self._read(reading):
            del reading  # its text and ids, which else would stay until there is another text

    def _read(self, reading: _Reading[Asker]) -> bool:
        """Whether anybody may still want to know of another."""
        found = _outcome(reading.read)
        with self._lock:
            if self._event_fd < 0:
                return False
            os.eventfd_write(self._event_fd, 1)
        reading.found = found  # after the event: whoever sees it takes the event away, and nobody is woken for nothing
        trim_heap()
        return True


def _outcome(read: Read) -> DecodeRequest | BaseException:
    """What `read` returns or raises."""
    try:
        return read()
    except RequestError as error:
        error.__context__ = None
        return error.with_traceback(None)  # of frames with the text and its ids: they would stay until cycles are collected
    except BaseException as error:  # a defect, which the asker's thread raises
        return error
