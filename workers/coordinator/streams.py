"""One accepted request in the coordinator: token entries of the ranks in, events for the client out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Protocol

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest
from kog_dist.rpc.messages import Done, FinishReason, Generate, Tokens
from kog_dist.runtime.ring import NO_TOKEN, Drafted, Finish, TokenEntry
from kog_dist.workers.coordinator.prompt_scoring import PromptScoring
from kog_dist.workers.coordinator.stop_strings import StopFilter
from kog_dist.workers.coordinator.timings import RequestTimings
from kog_dist.workers.grammar.compiler import constraint_of


class TextDecoder(Protocol):
    """Ids to text, piece by piece (`kog_dist.model.tokenizer.IncrementalDecoder`)."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""

    def flush(self) -> str:
        """What is left at the end."""

    def special_name(self, token_id: int) -> str:
        """The name of a special token, which has no text; empty for others."""


class RequestStream:
    """What one client has asked for and what it has been told. Times are nanoseconds on the monotonic clock.

    `decoder` may be set until the first token is taken. It is None for a model without a tokenizer: then there is no text and no
    stop string can occur.
    """

    def __init__(
        self, peer: bytes, message: Generate, request: DecodeRequest, decoder: TextDecoder | None, received_ns: int
    ) -> None:
        self.peer = peer
        self.request_id = message.request_id
        self.request = request
        self.constraint = constraint_of(message)
        self.reuses_kv, self.cache_salt = message.reuse_kv, message.cache_salt or ""
        self.speculate, self._has_prediction = message.speculate, bool(message.prediction_ids)
        self.commons = dict[
            int, int
        ]()  # tokens that its prompt begins with as running requests do; see DecodeSlots.is_being_read
        self.scoring: PromptScoring | None = None  # from its beginning until the answer begins
        self.deadline_ns = None if message.deadline_s is None else received_ns + round(message.deadline_s * 1e9)
        self.timings = RequestTimings(received_ns)
        self.last_sent_ns = received_ns
        self.told_position = -1  # place in the queue that the client knows of
        self.num_tokens = 0
        self._sends_stamps, self._prompt_logprobs = message.stamps, message.prompt_logprobs
        self.decoder = decoder
        self._stop_filter = StopFilter(message.stop)
        self._drafted = [0, 0]  # tokens; of them those that were right
        self._drafted_predictions = [0, 0]  # the same of drafts from the prediction

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt come before the answer; its first token has none."""
        return self._prompt_logprobs and len(self.request.prompt) > 1

    @property
    def next_mask(self) -> int | None:
        """Epoch of the mask that its next token is chosen with; None without a grammar."""
        return None if self.constraint is None else self.request.mask_epoch + self.num_tokens

    def take(self, entries: Sequence[TokenEntry]) -> tuple[Tokens | None, FinishReason | None]:
        """The event for entries that follow those taken before, and the reason if the answer ends with them.

        After a stop string nothing more is taken. An entry with NUMERICAL_FAULT is the caller's to handle.
        """
        token_ids: list[int] = []
        digests: list[str] = []
        stamps_s: list[float] = []
        logprobs: list[TokenLogprobs] = []
        text = ""
        reason = None
        for entry in entries:
            if entry.drafted.num_tokens:
                self._count(entry.drafted)
            if entry.token_id != NO_TOKEN:
                token_ids.append(entry.token_id)
                stamp_s = self.timings.add_token(entry.stamp_ns)
                if self._sends_stamps:
                    stamps_s.append(stamp_s)
                if entry.digest is not None:
                    digests.append(entry.digest.hex())
                if entry.logprobs is not None:
                    logprobs.append(entry.logprobs)
                if self.decoder is not None and entry.finish is not Finish.STOP:  # an end token has no text
                    special = self.decoder.special_name(entry.token_id) if self._stop_filter.has_stops else ""
                    text += self._stop_filter.push(self.decoder.push(entry.token_id), special)
            if self._stop_filter.stopped:
                reason = FinishReason.STOP
                break
            if entry.finish is not Finish.NONE and (reason := _REASONS.get(entry.finish)) is not None:
                text += self.rest(reason)
                break
        first = self.num_tokens
        self.num_tokens += len(token_ids)
        if not token_ids and not text:
            return None, reason
        if len(token_ids) == 1 and not (stamps_s or digests or logprobs):
            return Tokens.one(self.request_id, first, token_ids[0], text), reason
        event = Tokens(
            self.request_id,
            first,
            tuple(token_ids),
            text,
            tuple(stamps_s),
            tuple(digests),
            logprobs=tuple(token.chosen for token in logprobs),
            top_ids=tuple(chain.from_iterable(token.top_ids for token in logprobs)),
            top_logprobs=tuple(chain.from_iterable(token.top_logprobs for token in logprobs)),
        )
        return event, reason

    def _count(self, drafted: Drafted) -> None:
        for counts in (self._drafted, *([self._drafted_predictions] if drafted.is_predicted and self._has_prediction else [])):
            counts[0] += drafted.num_tokens
            counts[1] += drafted.num_right

    def rest(self, reason: FinishReason) -> str:
        """The text that was still held back; called once, when the answer ends.

        Bytes of an unfinished character become U+FFFD where the model itself has ended there; of an answer that was cut they are
        no text: the next token would have finished it.
        """
        if self.decoder is None or self._stop_filter.stopped:
            return ""
        last = self._stop_filter.push(self.decoder.flush()) if reason is FinishReason.STOP else ""
        return last + self._stop_filter.flush()

    def last_events(self, reason: FinishReason, now_ns: int) -> list[Tokens | Done]:
        """Those that end an answer: the text that is left, if there is any, and the terminal event."""
        rest = self.rest(reason)
        return [*([Tokens(self.request_id, self.num_tokens, (), rest, ())] if rest else []), self._done(reason, now_ns)]

    def _done(self, reason: FinishReason, now_ns: int) -> Done:
        return Done(
            self.request_id,
            reason,
            num_prompt_tokens=len(self.request.prompt),
            num_generated_tokens=self.num_tokens,
            num_cached_tokens=self.request.kv.num_cached,
            stop_string=self._stop_filter.stopped_by if reason is FinishReason.STOP else None,
            num_drafted_tokens=self._drafted[0],
            num_accepted_tokens=self._drafted[1],
            num_drafted_predictions=self._drafted_predictions[0],
            num_accepted_predictions=self._drafted_predictions[1],
            **asdict(self.timings.figures(now_ns)),
        )


_REASONS = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH, Finish.CANCELLED: FinishReason.CANCELLED}
