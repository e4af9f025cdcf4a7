"""The requests of an engine that are not finished: every one of them is in here, and ends by being taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kog_dist.workers.coordinator.decode_slot import DecodeSlot
from kog_dist.workers.coordinator.request_queue import RequestQueue
from kog_dist.workers.coordinator.streams import RequestStream
from kog_dist.workers.coordinator.text_reader import TextReader
from kog_dist.workers.grammar.service import GrammarService


class OpenRequests:
    """Those that run, those that wait for their turn, and those whose text is being read or whose grammar is checked."""

    def __init__(
        self,
        queue: RequestQueue,
        grammars: GrammarService[RequestStream],
        texts: TextReader[RequestStream],
        clock: Callable[[], int],
    ) -> None:
        """`clock`: nanoseconds, as in the timings of streams."""
        self.running: dict[DecodeSlot, RequestStream] = {}  # in the order in which they began
        self.queue = queue
        self._grammars, self._texts, self._clock = grammars, texts, clock

    def __iter__(self) -> Iterator[RequestStream]:
        """In the order in which they run; last those that cannot be accepted yet. Any of them may be removed meanwhile."""
        return iter([*self.running.values(), *self.not_running()])

    def __len__(self) -> int:
        return len(self.running) + len(self.not_running())

    def not_running(self) -> list[RequestStream]:
        """Those that have not begun."""
        return [*self.queue, *self._not_accepted()]

    def _not_accepted(self) -> list[RequestStream]:
        return [*self._grammars.askers, *self._texts.askers]

    def of_client(self, peer: bytes) -> list[RequestStream]:
        """Those of one connection."""
        return [stream for stream in self if stream.peer == peer]

    def find(self, request_id: str) -> RequestStream | None:
        """The request with this id, from whichever connection."""
        return next((stream for stream in self if stream.request_id == request_id), None)

    def check_room(self, peer: bytes) -> None:
        """Raises RequestError when there is no place for another request of that connection."""
        peers = [stream.peer for stream in self._not_accepted()]
        self.queue.check_room(peer, num_others=len(peers), num_own_others=peers.count(peer))

    def place(self, stream: RequestStream) -> int:
        """How many run before a request that is not finished."""
        return 0 if self.slot_of(stream) is not None else list(self).index(stream)

    def slot_of(self, stream: RequestStream) -> DecodeSlot | None:
        """Where it runs; None if it does not."""
        return next((slot for slot, running in self.running.items() if running is stream), None)

    def remove(self, stream: RequestStream) -> bool:
        """Take a request out, if it is in; ranks that decode it are told that nobody wants it any more."""
        if (slot := self.slot_of(stream)) is not None:
            del self.running[slot]
            slot.cancel()
            self.queue.turn_over(stream.peer, stream.timings.running_s(self._clock()))
            return True
        for service in (self._grammars, self._texts):
            if stream in service.askers:
                service.forget(stream)
                return True
        return self.queue.remove(stream)
