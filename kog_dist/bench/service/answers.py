"""What the payloads of a streamed answer mean: text, tokens, moments, and whether the answer is one.

Times to tokens are times to chunks: a server may put several tokens into one. A chunk counts if it brings something a reader
sees (text, reasoning, a tool call), so that the role, which servers send before the first token, does not pass for it.
"""

from __future__ import annotations

import json
from dataclasses import field
from itertools import pairwise
from typing import Any

from kog_dist.bench.service.client import SentRequest
from kog_dist.chat.wire import error_text
from kog_dist.records import dataclass


@dataclass(slots=True)
class RequestRecord:
    """One request as it is reported. Seconds count from its sending; `error` is empty if it was answered."""

    input_tokens: int
    output_tokens: int = 0
    counts_from: str = "usage"  # or "chunks": the server did not say how many tokens there were
    started_ns: int = 0
    queue_s: float = 0.0  # from when it was due to its sending
    ttft_s: float = 0.0
    latency_s: float = 0.0  # to the last chunk with a choice
    stamps_s: list[float] = field(default_factory=list)  # of each chunk that counts
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int | None = None
    drafted_tokens: int = 0  # and those that were right, where the server says so in llama.cpp's `timings`
    accepted_tokens: int = 0
    error: str = ""

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks."""
        return [late - early for early, late in pairwise(self.stamps_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for fewer than two."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def answer_of(exchange: SentRequest, num_words: int) -> RequestRecord:
    """Read an exchange. `num_words` stands for the prompt's tokens if the server does not count them."""
    answer = RequestRecord(num_words, started_ns=exchange.sent_ns, queue_s=(exchange.sent_ns - exchange.wanted_ns) / 1e9)
    answer.error = exchange.error
    if not answer.error and exchange.response.status != 200:
        answer.error = error_text(exchange.response.status, exchange.plain or b"".join(exchange.payloads[:1]))
    if not answer.error:
        try:
            _read_chunks(exchange, answer)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
            answer.error = f"the server sent a chunk that is not OpenAI's: {type(error).__name__} {error}"[:300]
    if answer.error:
        return RequestRecord(
            num_words, started_ns=answer.started_ns, queue_s=answer.queue_s, text=answer.text, error=answer.error
        )
    return answer


def _read_chunks(exchange: SentRequest, answer: RequestRecord) -> None:
    pieces: list[str] = []
    usage: dict[str, object] | None = None
    timings: dict[str, object] = {}
    is_finished = False
    for stamp_ns, payload in zip(exchange.stamps_ns, exchange.payloads, strict=True):
        if payload == b"[DONE]":
            is_finished = True
            continue
        chunk = json.loads(payload)
        if error := chunk.get("error"):
            answer.error = f"error in the stream: {error.get('message', error) if isinstance(error, dict) else error}"[:300]
            break
        usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
        for choice in chunk.get("choices") or ():
            stamp_s = (stamp_ns - exchange.sent_ns) / 1e9
            answer.latency_s = stamp_s
            if choice.get("finish_reason"):
                answer.finish_reason, is_finished = choice["finish_reason"], True
            piece, is_visible = _content(choice)
            if is_visible:
                pieces.append(piece)
                answer.stamps_s.append(stamp_s)
    answer.text = "".join(pieces)
    answer.ttft_s = answer.stamps_s[0] if answer.stamps_s else 0.0
    answer.error = answer.error or _flaw(exchange, answer, is_finished=is_finished)
    _count(answer, usage)
    drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
    if isinstance(drafted, int) and isinstance(accepted, int):
        answer.drafted_tokens, answer.accepted_tokens = drafted, accepted


def _content(choice: dict[str, Any]) -> tuple[str, bool]:
    """Text of a choice, and whether it brings anything."""
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
        return text, bool(text)
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return text, bool(text or delta.get("tool_calls"))


def _flaw(exchange: SentRequest, answer: RequestRecord, *, is_finished: bool) -> str:
    if not exchange.payloads:
        kind = exchange.response.fields.get("content-type", "no type")
        return f"the server did not stream: it sent {kind} and no event"
    if not answer.stamps_s:
        return "the stream ended without a token"
    return "" if is_finished else "the stream ended without a finish reason: it was cut off"


def _count(answer: RequestRecord, usage: dict[str, Any] | None) -> None:
    output_tokens = (usage or {}).get("completion_tokens")
    if usage is None or not isinstance(output_tokens, int):
        answer.output_tokens, answer.counts_from = len(answer.stamps_s), "chunks"
        return
    answer.output_tokens = output_tokens
    num_prompt, cached = usage.get("prompt_tokens"), (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    answer.input_tokens = num_prompt if isinstance(num_prompt, int) and num_prompt else answer.input_tokens
    answer.cached_tokens = cached if isinstance(cached, int) else None
