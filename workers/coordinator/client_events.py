"""What the clients of streams are told besides tokens: where their requests are, and how they end."""

from __future__ import annotations

from kog_dist.rpc.client_events import ClientEvents
from kog_dist.rpc.messages import Accepted, FinishReason
from kog_dist.workers.coordinator.streams import RequestStream


class StreamEvents(ClientEvents[RequestStream]):
    """Knows what a stream has to say of its request."""

    def accept(self, stream: RequestStream, position: int) -> None:
        """The client learns that its request is in the queue; `position`: how many run before it."""
        stream.told_position = position
        request = stream.request
        self.send(stream, Accepted(stream.request_id, position, len(request.prompt), request.max_tokens))

    def tell_position(self, stream: RequestStream, position: int) -> None:
        """A changed place in the queue, or a word after a silence."""
        if self.keep_alive(stream, position, has_moved=position != stream.told_position):
            stream.told_position = position

    def finish(self, stream: RequestStream, reason: FinishReason) -> None:
        """End a request that went well, was cancelled or ran out of its time: the text that is left, and its figures."""
        self.end(stream, reason, stream.last_events(reason, self._clock()))
