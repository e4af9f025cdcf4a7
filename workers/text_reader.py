"""Long texts are read beside the coordinator's loop: tokenizing 128 KiB takes 0.1 s, in which others want their tokens."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.rpc.messages import ErrorCode, Generate

LONG_TEXT = 2048  # characters, which take about a millisecond: shorter ones are read at once
MAX_ASKERS = 64
UNREAD = DecodeRequest(prompt=(), max_tokens=1)  # what is known of a request while its text is being read

Asker = TypeVar("Asker")


@dataclass(frozen=True)
class _Reading(Generic[Asker]):
    asker: Asker
    request: Future[DecodeRequest]


class TextReader(Generic[Asker]):
    """One thread, started when it is first needed. An asker is whatever wants to know (a request's stream)."""

    def __init__(self) -> None:
        self._readings: deque[_Reading[Asker]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._event_fd = -1  # counts texts that have been read

    def is_for(self, message: Generate) -> bool:
        """Whether this request has a text, and reading it would hold others up."""
        return message.prompt is not None and len(message.prompt) > LONG_TEXT

    @property
    def askers(self) -> list[Asker]:
        """Those whose text is being read or waits for that, in their order."""
        return [reading.asker for reading in self._readings]

    @property
    def fds(self) -> list[int]:
        """What becomes readable when a text has been read."""
        return [self._event_fd] if self._thread is not None else []

    def ask(self, asker: Asker, read: Callable[[], DecodeRequest]) -> None:
        """Have `read` called in the thread; `answers` will name the asker. Raises RequestError when too many wait for that."""
        if len(self._readings) >= MAX_ASKERS:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{MAX_ASKERS} long texts are waiting to be read already; try again later")
        if self._thread is None:
            self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = ThreadPoolExecutor(1, "text-reader")
        request = self._thread.submit(read)
        request.add_done_callback(lambda _: os.eventfd_write(self._event_fd, 1))
        self._readings.append(_Reading(asker, request))

    def forget(self, asker: Asker) -> None:
        """The asker does not want to know any more."""
        for reading in self._readings:
            if reading.asker is asker:
                reading.request.cancel()
                self._readings.remove(reading)
                return

    def has_answers(self) -> bool:
        """Whether `answers` has something to tell."""
        return bool(self._readings) and self._readings[0].request.done()

    def answers(self) -> list[tuple[Asker, DecodeRequest | RequestError]]:
        """What has been read since the last call. Raises what `read` raised if it was no RequestError."""
        found: list[tuple[Asker, DecodeRequest | RequestError]] = []
        if self._thread is not None:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)  # texts that were forgotten have been counted, too
        while self.has_answers():
            reading = self._readings.popleft()
            try:
                found.append((reading.asker, reading.request.result()))
            except RequestError as error:
                found.append((reading.asker, error))
        return found

    def close(self) -> None:
        """Forget everybody; a text that is being read is still read to its end."""
        self._readings.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            os.close(self._event_fd)
