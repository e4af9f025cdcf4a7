"""What a request goes through until it waits for its turn: room, its text, its grammar. Each step may refuse it."""

from __future__ import annotations

from collections.abc import Callable

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.rpc.messages import Generate
from kog_dist.workers.coordinator.client_events import StreamEvents
from kog_dist.workers.coordinator.model_folder import ModelFolder
from kog_dist.workers.coordinator.open_requests import OpenRequests
from kog_dist.workers.coordinator.streams import RequestStream
from kog_dist.workers.coordinator.text_reader import UNREAD, TextReader
from kog_dist.workers.grammar.service import GrammarService


class Admission:
    """`take` is told of every request; `go_on` of time that has passed. `start_next`: a request has been queued."""

    def __init__(
        self,
        model: ModelFolder,
        requests: OpenRequests,
        grammars: GrammarService[RequestStream],
        texts: TextReader[RequestStream],
        clients: StreamEvents,
        clock: Callable[[], int],
        *,
        is_draining: Callable[[], bool],
        start_next: Callable[[], None],
    ) -> None:
        self._model, self._requests, self._grammars, self._texts = model, requests, grammars, texts
        self._clients, self._clock = clients, clock
        self._is_draining, self._start_next = is_draining, start_next

    def take(self, peer: bytes, message: Generate, received_ns: int) -> None:
        """A client wants this: queue it, have its text read, or refuse it."""
        try:
            self._check_room(peer, message.request_id)
            if self._texts.is_for(message):
                self._model.check_text(message)
                stream = RequestStream(peer, message, UNREAD, None, received_ns)
                self._texts.ask(stream, peer, lambda: self._model.admit(message))
                stream.told_position = self._requests.place(stream)
            else:
                self._go_on_with(RequestStream(peer, message, self._model.admit(message), None, received_ns))
        except RequestError as error:
            self._clients.refuse(peer, message.request_id, error)

    def go_on(self) -> None:
        """Accept or refuse the requests of which something has become known; others may have taken their room meanwhile."""
        if (answer := self._texts.answer()) is not None:
            self._take_read(*answer)
        for stream, refusal, code in self._grammars.verdicts():
            try:
                if refusal is not None:
                    raise RequestError(code, refusal)
                self._check_room(stream.peer, stream.request_id)
            except RequestError as error:
                self._clients.refuse(stream.peer, stream.request_id, error)
            else:
                self._accept(stream)

    def _take_read(self, stream: RequestStream, request: DecodeRequest | BaseException) -> None:
        if isinstance(request, RequestError):  # raised here, it would stay until cycles are collected: this frame has it
            self._clients.refuse(stream.peer, stream.request_id, request)
            return
        if isinstance(request, BaseException):
            raise request
        try:
            self._check_room(stream.peer, stream.request_id)
            stream.request = request
            self._go_on_with(stream)
        except RequestError as error:
            self._clients.refuse(stream.peer, stream.request_id, error)

    def _go_on_with(self, stream: RequestStream) -> None:
        """It fits the model."""
        if stream.constraint is None:
            self._accept(stream)
            return
        self._grammars.ask(stream, stream.peer, stream.constraint)
        stream.told_position = self._requests.place(stream)

    def _check_room(self, peer: bytes, request_id: str) -> None:
        self._clients.check_new(request_id, is_draining=self._is_draining())
        self._requests.check_room(peer)

    def _accept(self, stream: RequestStream) -> None:
        self._requests.queue.add(stream)
        stream.timings.stage("admitted", self._clock())
        self._start_next()  # ranks that have nothing to do need not wait for the rest, nor until the client is told
        if (tokenizer := self._model.tokenizer) is not None:
            stream.decoder = tokenizer.stream(after=stream.request.prompt)
        self._clients.accept(stream, self._requests.place(stream))
