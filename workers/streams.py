"""One accepted request in the coordinator: token entries of the ranks in, events for the client out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from kog_dist.control import DecodeRequest
from kog_dist.decode.ring import NO_TOKEN, Finish, TokenEntry
from kog_dist.rpc.messages import Done, FinishReason, Tokens
from kog_dist.workers.stop_strings import StopFilter


class TextDecoder(Protocol):
    """Ids to text, piece by piece (`kog_dist.model.tokenizer.IncrementalDecoder`)."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""

    def flush(self) -> str:
        """What is left at the end."""


class RequestStream:
    """What one client has asked for and what it has been told. Times are nanoseconds on the monotonic clock.

    `decoder` is None for a model without a tokenizer: then there is no text and no stop string can occur.
    """

    def __init__(
        self, peer: bytes, request_id: str, request: DecodeRequest, *, stops: Sequence[str] = (),
        decoder: TextDecoder | None = None, arrived_ns: int,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.request_id = request_id
        self.request = request
        self.arrived_ns = arrived_ns
        self.submitted_ns: int | None = None
        self.last_sent_ns = arrived_ns
        self.num_tokens = 0
        self._decoder = decoder
        self._stop_filter = StopFilter(stops)
        self._stamps_s: list[float] = []

    def take(self, entries: Sequence[TokenEntry]) -> tuple[Tokens | None, FinishReason | None]:
        """The event for entries that follow those taken before, and the reason if the answer ends with them.

        After a stop string nothing more is taken. An entry with NUMERICAL_FAULT is the caller's to handle.
        """
        token_ids: list[int] = []
        digests: list[str] = []
        stamps_s: list[float] = []
        text = ""
        reason = None
        for entry in entries:
            if entry.token_id != NO_TOKEN:
                token_ids.append(entry.token_id)
                stamps_s.append(self._since_arrival_s(entry.stamp_ns))
                if entry.digest is not None:
                    digests.append(entry.digest.hex())
                if self._decoder is not None and entry.finish is not Finish.STOP:  # an end token has no text
                    text += self._stop_filter.push(self._decoder.push(entry.token_id))
            reason = FinishReason.STOP if self._stop_filter.stopped else _REASONS.get(entry.finish)
            if reason is not None:
                text += self.rest() if not self._stop_filter.stopped else ""
                break
        first = self.num_tokens
        self.num_tokens += len(token_ids)
        self._stamps_s += stamps_s
        if not token_ids and not text:
            return None, reason
        event = Tokens(self.request_id, first, tuple(token_ids), text, tuple(stamps_s), tuple(digests))
        return event, reason

    def rest(self) -> str:
        """The text that was still held back; called once, when the answer ends."""
        if self._decoder is None or self._stop_filter.stopped:
            return ""
        return self._stop_filter.push(self._decoder.flush()) + self._stop_filter.flush()

    def done(self, reason: FinishReason, now_ns: int) -> Done:
        """The terminal event of an answer that went well."""
        stamps_s = self._stamps_s
        gaps_s = sorted(late - early for early, late in itertools.pairwise(stamps_s))
        queue_end_ns = self.submitted_ns if self.submitted_ns is not None else now_ns
        queue_s = self._since_arrival_s(queue_end_ns)
        first_s = stamps_s[0] if stamps_s else None
        return Done(
            self.request_id,
            reason,
            num_prompt_tokens=len(self.request.prompt),
            num_generated_tokens=self.num_tokens,
            queue_s=queue_s,
            total_s=self._since_arrival_s(now_ns),
            prefill_s=None if first_s is None else max(0.0, first_s - queue_s),
            ttft_s=first_s,
            itl_p50_s=percentile(gaps_s, 0.50),
            itl_p99_s=percentile(gaps_s, 0.99),
        )

    def _since_arrival_s(self, stamp_ns: int) -> float:
        return max(0, stamp_ns - self.arrived_ns) / 1e9


_REASONS = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH, Finish.CANCELLED: FinishReason.CANCELLED}


def percentile(ascending: Sequence[float], fraction: float) -> float | None:
    """Nearest-rank percentile of sorted values; None of nothing. Never negative: clocks of ranks are one clock."""
    if not ascending:
        return None
    return max(0.0, ascending[max(0, math.ceil(fraction * len(ascending)) - 1)])
