"""The answers of `/api/chat` and `/api/generate`: lines of JSON, or one object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kog_dist.gateway.ollama.errors import error_body
from kog_dist.gateway.openai.accounting import draft_counts
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.one_choice import OneChoiceReply
from kog_dist.gateway.openai.tools import ToolUse
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import FinishReason

LINES: Final = "application/x-ndjson"


def loaded(model: str, *, is_chat: bool) -> dict[str, object]:
    """The answer to a request that asks for nothing but the model."""
    said: dict[str, object] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": _now(), **said, "done": True, "done_reason": "load"}


class OllamaReply(OneChoiceReply):
    """See Reply. One choice. Calls are told whole, as Ollama does."""

    keepalive = b""  # lines of JSON have no comments
    media_type = LINES

    def __init__(
        self, model: str, use: ToolUse, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, stream: bool, is_chat: bool
    ) -> None:
        """`model`: as the client calls it."""
        super().__init__(use, tokenizer, prompt_ids, stream=stream)
        self.model, self.is_chat = model, is_chat
        self._call: tuple[str, list[str]] | None = None  # name and arguments of the one that is being written
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []

    # ---- Reply ----
    def end(self) -> bytes:
        """See Reply."""
        if self.is_over or not self.stream:
            return b""
        self.is_over = True
        return _line({**self._chunk(""), **self._figures()})

    def whole(self) -> dict[str, Any]:
        """See Reply."""
        if self._error is not None:
            raise self._error
        return {**self._chunk("".join(self._text), "".join(self._thought), self._calls), **self._figures()}

    # ---- lines ----
    def _failed(self, error: ApiError) -> bytes:
        return _line(error_body(error))

    def _last(self) -> bytes:
        return self._end_call()

    def _take(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(map(self._said, deltas))

    def _said(self, delta: Delta) -> bytes:
        if isinstance(delta, CallArguments):
            assert self._call is not None, "a call begins with its name"
            self._call[1].append(delta.text)
            return b""
        ended = self._end_call()
        if isinstance(delta, CallStart):
            self._call = delta.name, []
            return ended
        if isinstance(delta, ThoughtBefore):  # a stream has said it
            self._thought, self._text = [*self._thought, "".join(self._text).strip()], []
            return ended
        assert isinstance(delta, TextDelta | ReasoningDelta), "there are no other deltas"
        is_text = isinstance(delta, TextDelta)
        (self._text if is_text else self._thought).append(delta.text)
        return ended + self._told(self._chunk(delta.text) if is_text else self._chunk("", delta.text))

    def _end_call(self) -> bytes:
        if self._call is None:
            return b""
        (name, arguments), self._call = self._call, None
        call = {"function": {"name": name, "arguments": json.loads("".join(arguments) or "{}")}}
        self._calls.append(call)
        return self._told(self._chunk("", calls=[call]))

    def _told(self, chunk: dict[str, Any]) -> bytes:
        return _line({**chunk, "done": False}) if self.stream else b""

    def _chunk(self, text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        head = {"model": self.model, "created_at": _now()}
        thinking = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {**head, "response": text, **thinking}
        message = {"role": "assistant", "content": text, **thinking, **({"tool_calls": list(calls)} if calls else {})}
        return {**head, "message": message}

    def _figures(self) -> dict[str, object]:
        """How it ended, and durations in nanoseconds."""
        done = self._finished()
        gaps = max(0, done.num_generated_tokens - 1)
        return {
            "done": True,
            "done_reason": "stop" if done.finish_reason is FinishReason.STOP else "length",
            "total_duration": _ns(done.total_s),
            "load_duration": 0,
            "prompt_eval_count": done.num_prompt_tokens,
            "prompt_eval_duration": _ns(done.prefill_s or 0.0),
            "eval_count": done.num_generated_tokens,
            "eval_duration": _ns(gaps / done.tokens_per_s if done.tokens_per_s else 0.0),
            **draft_counts([done]),
        }


def _line(chunk: dict[str, object]) -> bytes:
    return json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
