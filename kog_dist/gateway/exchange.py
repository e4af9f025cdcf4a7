"""One answer on its way: events of the engine in, bytes for a client that may read slowly, or not at all, out.

The engine is never held up. What the client has not read waits in a bounded buffer; when that is full, the request is cancelled
and the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from kog_dist.gateway.engine import Call
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.metrics import Metrics, RequestMeter
from kog_dist.gateway.openai.errors import SERVER, ApiError, from_rpc
from kog_dist.gateway.openai.reply import EVENTS, Planned, place_comment, prompt_comment
from kog_dist.rpc.messages import Accepted, Alive, Done, Error, Event, FinishReason, PrefillProgress, PromptLogprobs, Tokens


class Exchange:
    """The requests of one HTTP request, and what is ready for its client. `begin` it, then wait for `opened` and `next_bytes`."""

    def __init__(self, planned: Planned, metrics: Metrics, limits: Limits, endpoint: str, *, keeps_text: bool = False) -> None:
        """`keeps_text`: of the first choice, in `texts`."""
        self.reply = planned.reply
        self.texts: list[str] = []
        self.refusal: ApiError | None = None  # why there is no answer, or why it has ended early
        self.is_abandoned = False
        self.last: dict[int, Done] = {}
        self.first_place: int | None = None  # how many requests were before the first choice when the engine took it
        self._place = 0
        self._begun_s = time.monotonic()
        self._left_queue_s: float | None = None  # when nothing was before the first choice any more
        self._over_s: float | None = None
        self.meters = [metrics.request_started(endpoint) for _ in planned.generates]
        self._planned, self._metrics, self._limits, self._keeps_text = planned, metrics, limits, keeps_text
        self._call: Call | None = None
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._is_over = False  # nothing is added any more; what is there may still be read
        self._undecided = set(range(len(planned.generates)))
        self._told_to_end: set[int] = set()
        self._opened = asyncio.Event()
        self._wake: asyncio.Future[None] | None = None
        self.write_now: Callable[[bytes], bool] | None = None  # writes at once what the client can take, or says that it cannot
        self._written_s = time.monotonic()

    @property
    def queue_s(self) -> float | None:
        """How long the first choice has waited for others, as far as the engine has said it; None before it said anything."""
        if self.first_place is None:
            return None
        until_s = self._left_queue_s or self._over_s or time.monotonic()
        return until_s - self._begun_s

    def begin(self, submit: Callable[..., Call]) -> None:
        """Send the requests. `submit(generates, sinks)` is the bridge's, for the right client."""
        choices = range(len(self._planned.generates))
        self._call = submit(self._planned.generates, tuple(self._sink(choice) for choice in choices))

    def _sink(self, choice: int) -> Callable[[Event], None]:
        meter, reply, texts = self.meters[choice], self.reply, self.texts if self._keeps_text and choice == 0 else None

        def take(event: Event) -> None:
            if type(event) is Tokens:
                now_s = time.monotonic()
                if not self._is_over:
                    frames = reply.on_event(choice, event)
                    if not frames and now_s - self._written_s > self._limits.keepalive_s:
                        frames = reply.keepalive  # tokens without text, of a model without a tokenizer
                    self._put(choice, frames)
                    if reply.satisfied:
                        self._end_satisfied(choice)
                meter.tokens(len(event.token_ids), now_s)  # when the client has them
                if texts is not None:
                    texts.append(event.text)
            else:
                self._take_rare(choice, meter, event)

        return take

    def _take_rare(self, choice: int, meter: RequestMeter, event: Event) -> None:
        """Everything but tokens."""
        if isinstance(event, Done) and event.finish_reason is FinishReason.CANCELLED and choice in self.reply.satisfied:
            event = replace(event, finish_reason=FinishReason.STOP)
        if isinstance(event, Done | Error):
            meter.finished(event, time.monotonic())
        elif isinstance(event, Accepted):
            meter.accepted(event.num_prompt_tokens, event.max_tokens)
        if self._is_over:
            return
        if choice == 0 and isinstance(event, Accepted | Alive):
            self._take_place(event)
        if isinstance(event, Error):
            self.fail(choice, from_rpc(event), event)
        elif isinstance(event, PromptLogprobs):
            self._put(choice, self.reply.on_event(choice, event))
            self._decided(choice)
        elif isinstance(event, Accepted | Alive | PrefillProgress | Done):
            self._put(choice, self.reply.on_event(choice, event), is_growing=False)
            if choice == 0 and isinstance(event, PrefillProgress) and self.reply.media_type == EVENTS:
                self._put(0, prompt_comment(event.position, event.num_prompt_tokens), is_growing=False)
            elif isinstance(event, Alive | PrefillProgress) and time.monotonic() - self._written_s > self._limits.keepalive_s:
                self._put(choice, self.reply.keepalive)
            if not isinstance(event, Alive):
                self._decided(choice)
            if isinstance(event, Done):
                self._done(choice, event)
            if self.reply.is_over and not self._is_over:  # one choice was cancelled: nobody wants the others
                self._end()
                self.cancel()

    def _end_satisfied(self, choice: int) -> None:
        """Have the engine end an answer that has all that was asked for."""
        if choice in self.reply.satisfied and choice not in self._told_to_end and self._call is not None:
            self._told_to_end.add(choice)
            self._call.cancel_one(self._planned.generates[choice].request_id)

    def _take_place(self, event: Accepted | Alive) -> None:
        if event.queue_position == 0 and self._left_queue_s is None:
            self._left_queue_s = time.monotonic()
        if self.first_place is None:
            self.first_place = event.queue_position
        if event.queue_position != self._place:
            self._place = event.queue_position
            if self.reply.media_type == EVENTS:
                self._put(0, place_comment(self._place), is_growing=False)

    def _decided(self, choice: int) -> None:
        self._undecided.discard(choice)
        if not self._undecided:
            self._opened.set()

    def _done(self, choice: int, event: Done) -> None:
        self.last[choice] = event
        if len(self.last) == len(self._planned.generates):
            self._put(choice, self.reply.end(), is_growing=False)
            self._end()

    def fail(self, choice: int, error: ApiError, event: Error | None = None) -> None:
        """End the answer with an error, all its choices included."""
        if self._is_over:
            return
        self.refusal = error
        frames = self.reply.on_error(choice, event if event is not None else error)
        self._frames.append(frames)
        self._count(len(frames))
        self._end()
        self.cancel()

    def _put(self, choice: int, frames: bytes, *, is_growing: bool = True) -> None:
        """Keep frames for the client. What begins or ends an answer comes once, and repeats all of it in the Responses API: it is
        bounded by the request and the context, and says nothing about how fast the client reads (`is_growing` false).
        """
        if not frames or not self._planned.stream:
            return
        if is_growing and self._num_bytes + len(frames) > self._limits.buffer_bytes:
            self._metrics.slow_reader_dropped()
            held = f"{self._limits.buffer_bytes >> 10} KiB of this answer were waiting to be read"
            self.fail(
                choice, ApiError(503, SERVER, "slow_reader", None, f"the client reads too slowly: {held}; it was cancelled")
            )
            return
        if self.write_now is not None and self._is_waited_for() and self.write_now(frames):
            self._written_s = time.monotonic()
            return
        self._frames.append(frames)
        self._count(len(frames))
        self._wake_up()

    def _is_waited_for(self) -> bool:
        """Whether the one who writes has written all there was, and waits."""
        return not self._frames and self._wake is not None and not self._wake.done()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._metrics.buffered(num_bytes)

    def _end(self) -> None:
        self._is_over = True
        self._over_s = time.monotonic()
        self._opened.set()
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # ---- for the one who writes ----
    async def opened(self, limit_s: float | None) -> None:
        """Wait until the engine has taken, or refused, all of it; with a limit, no longer than that."""
        try:
            async with asyncio.timeout(limit_s):
                await self._opened.wait()
        except TimeoutError:
            pass

    async def next_bytes(self) -> bytes:
        """All frames that are ready, at least one; b"" when the answer is complete or has ended."""
        while not self._frames:
            if self._is_over:
                return b""
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        taken = self._frames[0] if len(self._frames) == 1 else b"".join(self._frames)
        self._frames.clear()
        self._count(-self._num_bytes)
        self._written_s = time.monotonic()
        return taken

    async def ended(self) -> None:
        """Wait for the end, of an answer that is not streamed."""
        while not self._is_over:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def abandon(self) -> None:
        """The client is gone: cancel what runs, forget what waits. A second call does nothing."""
        if not self._is_over:
            self.is_abandoned = True
            self._metrics.client_disconnected()
            self._end()
        self.cancel()
        self._frames.clear()
        self._count(-self._num_bytes)

    def cancel(self) -> None:
        """Tell the engine that nobody wants the rest."""
        if self._call is not None:
            self._call.cancel()
