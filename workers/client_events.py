"""What the clients of requests are told, and what becomes of those that are gone or do not read."""

from __future__ import annotations

from collections.abc import Callable

from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import Delivery, RpcListener, error_event
from kog_dist.rpc.messages import Accepted, Alive, Done, Error, ErrorCode, Prefill, Tokens
from kog_dist.workers.open_requests import OpenRequests
from kog_dist.workers.streams import RequestStream

ALIVE_EVERY_NS = 250_000_000
PREFILL_EVERY_NS = 100_000_000


class ClientEvents:
    """Sends to the clients of `requests`. `clock`: nanoseconds."""

    def __init__(
        self, listener: RpcListener, requests: OpenRequests, counters: Counters, clock: Callable[[], int]
    ) -> None:  # fmt: skip
        self._listener, self._requests, self._counters, self._clock = listener, requests, counters, clock

    def send(self, stream: RequestStream, event: Accepted | Alive | Prefill | Tokens | Done | Error) -> bool:
        """Send to a request's client; False if that ended the client's requests."""
        stream.last_sent_ns = self._clock()
        delivery = self._listener.send(stream.peer, event)
        if delivery is Delivery.GONE:
            self.forget(stream.peer)
        elif delivery is Delivery.FULL:
            self._drop(stream)
        return delivery is Delivery.TAKEN

    def forget(self, peer: bytes) -> None:
        """The client is no longer connected: nobody is left to be told how its requests end."""
        streams = self._requests.of_client(peer)
        for stream in streams:
            self._remove(stream)
        self._counters.num_cancelled += len(streams)
        self._counters.num_dropped_clients += bool(streams)

    def _drop(self, behind: RequestStream) -> None:
        """The client does not read: its requests end, and all it will find is the reason."""
        streams = [behind, *(stream for stream in self._requests.of_client(behind.peer) if stream is not behind)]
        message = "the client did not read its events; more than the buffer of this engine holds were waiting"
        self._counters.num_failed += sum([self._remove(stream) for stream in streams])
        self._counters.num_dropped_clients += 1
        last = [error_event(ErrorCode.SLOW_READER, message, stream.request_id) for stream in streams]
        self._listener.drop(behind.peer, last)

    def _remove(self, stream: RequestStream) -> bool:
        return self._requests.remove(stream, self._clock())

    def tell_where_requests_are(self, prefilled: Callable[[], int], *, is_first_token_near: bool = False) -> None:
        """Changed places in the queue, progress of the prefill, a word after a silence; finds out which clients are gone.

        `prefilled`: positions of the running request that the KV cache holds. `is_first_token_near`: its client hears a word, so
        that a core which has slept for long is awake for the token.
        """
        now_ns = self._clock()
        for position, stream in enumerate(self._requests):
            silent_ns = now_ns - stream.last_sent_ns
            if self._listener.is_behind(stream.peer):
                continue
            is_running = stream is self._requests.running
            if is_running and not stream.num_tokens and silent_ns >= PREFILL_EVERY_NS:
                self.send(stream, Prefill(stream.request_id, prefilled(), len(stream.request.prompt)))
            elif position != stream.told_position or silent_ns >= ALIVE_EVERY_NS or (is_first_token_near and is_running):
                stream.told_position = position
                self.send(stream, Alive(stream.request_id, position))
