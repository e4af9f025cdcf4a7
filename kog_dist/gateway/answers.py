"""The response to a request for an answer: its status is decided when the engine has decided; then what is ready is written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from kog_dist.gateway.errors import send_error
from kog_dist.gateway.exchange import Exchange
from kog_dist.gateway.guard import Receive, Scope, Send
from kog_dist.gateway.logs import CLIENT_GONE, RequestLine, address_class
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned

if TYPE_CHECKING:
    from kog_dist.gateway.service import Service

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class AnswerResponse(Response):
    """Plain ASGI: between the engine and the socket lies nothing of a framework but what writes the chunk."""

    def __init__(self, planned: Planned, service: Service, endpoint: str) -> None:
        super().__init__()
        self._planned, self._service, self._endpoint = planned, service, endpoint
        self._unseen = ", ".join(planned.unseen)
        self._left_out = ", ".join(planned.left_out) if service.args.unknown_fields == "warn" else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the requests, and write the answer or the error."""
        service, begin_s = self._service, time.monotonic()
        service.bridge.deliver()
        exchange = Exchange(self._planned, service.metrics, service.limits, self._endpoint, keeps_text=service.log.with_prompts)
        service.answering.add(exchange)
        watch = asyncio.create_task(_watch(receive, exchange))
        status = 500
        try:
            exchange.begin(lambda *requests: service.bridge.submit(client_of(scope), *requests))
            if self._planned.stream:
                status = await self._stream(exchange, send, scope.get("kog.write_chunk"))
            else:
                status = await self._whole(exchange, send)
        finally:
            watch.cancel()
            exchange.abandon()
            service.answering.discard(exchange)
            service.log.request(self._line(exchange, scope, status, time.monotonic() - begin_s))

    async def _stream(self, exchange: Exchange, send: Send, write_now: Callable[[bytes], bool] | None) -> int:
        await exchange.opened(self._service.limits.accept_s)
        if exchange.refusal is not None:
            await send_error(send, exchange.refusal, self._endpoint)
            return exchange.refusal.status
        if exchange.is_abandoned:
            return CLIENT_GONE
        headers = [(b"content-type", exchange.reply.media_type.encode()), *_STREAM_HEADERS, *self._told(exchange)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._service.metrics.stream_opened()
        exchange.write_now = write_now
        try:
            while chunk := await exchange.next_bytes():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._service.metrics.stream_closed()
        return 200

    async def _whole(self, exchange: Exchange, send: Send) -> int:
        await exchange.ended()
        try:
            if exchange.refusal is not None:
                raise exchange.refusal
            if exchange.is_abandoned:
                return CLIENT_GONE
            body = json.dumps(exchange.reply.whole(), ensure_ascii=False).encode("utf-8", "replace")
        except ApiError as error:
            await send_error(send, error, self._endpoint)
            return error.status
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._told(exchange),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return 200

    def _told(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """How many requests the engine had to take before this one, how long it waited, if known;
        fields that were not read, or not shown to the model.
        """
        place = [] if exchange.first_place is None else [(b"x-kog-queue-position", str(exchange.first_place).encode())]
        if (done := next(iter(exchange.last.values()), None)) is not None and done.queue_s is not None:
            place.append((b"x-kog-queue-ms", f"{done.queue_s * 1e3:.1f}".encode()))
        told = ((b"x-kog-unknown-fields", self._left_out), (b"x-kog-not-in-prompt", self._unseen))
        return [*place, *((name, value.encode()) for name, value in told if value)]

    def _line(self, exchange: Exchange, scope: Scope, status: int, total_s: float) -> RequestLine:
        done = list(exchange.last.values())
        first = done[0] if done else None
        prompts = [meter.num_prompt_tokens for meter in exchange.meters if meter.num_prompt_tokens is not None]
        return RequestLine(
            request_id=scope["kog.request_id"],
            endpoint=self._endpoint,
            status=CLIENT_GONE if exchange.is_abandoned else status,
            client=address_class((scope.get("client") or ("",))[0]),
            stream=self._planned.stream,
            finish_reason=str(first.finish_reason) if first is not None else None,
            error=exchange.refusal.code if exchange.refusal is not None else None,
            num_prompt_tokens=sum(prompts) if prompts else None,
            num_cached_tokens=sum(end.num_cached_tokens for end in done) if done else None,
            num_generated_tokens=sum(meter.num_tokens for meter in exchange.meters),
            num_drafted_tokens=(drafted := sum(end.num_drafted_tokens for end in done)) or None,
            num_accepted_tokens=sum(end.num_accepted_tokens for end in done) if drafted else None,
            num_reasoning_tokens=exchange.reply.num_reasoning_tokens or None,
            num_calls=exchange.reply.num_calls or None,
            queue_s=first.queue_s if first is not None else exchange.queue_s,
            ttft_s=exchange.meters[0].ttft_s if exchange.meters else None,
            total_s=total_s,
            tokens_per_s=exchange.meters[0].tokens_per_s if exchange.meters else None,
            left_out=self._left_out or None,
            unseen=self._unseen or None,
            prompt=self._prompt() if self._service.log.with_prompts else None,
            answer="".join(exchange.texts) or None,
        )

    def _prompt(self) -> str | None:
        """What the ranks read, as text: with the chat template's marks, and ids where this gateway has no tokenizer."""
        first, served = self._planned.generates[0], self._service.served
        if first.prompt is not None or first.prompt_ids is None:
            return first.prompt
        tokenizer = None if served is None else served.tokenizer
        return str(list(first.prompt_ids)) if tokenizer is None else tokenizer.decode(first.prompt_ids)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Notice at once that the client has gone."""
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.abandon()


def client_of(scope: Scope) -> tuple[object, ...]:
    """Whose turn a request takes: another machine's, or on this machine, where all have one address, a connection's."""
    peer: tuple[Any, ...] = tuple(scope.get("client") or ("unknown",))
    return peer if address_class(peer[0]) == "loopback" else peer[:1]
