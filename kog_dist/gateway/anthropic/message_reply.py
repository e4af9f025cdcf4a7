"""The answer of `/v1/messages`: events with blocks, or one message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kog_dist.gateway.anthropic.errors import error_body
from kog_dist.gateway.openai.chat import assembled
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.logprobs import to_json
from kog_dist.gateway.openai.one_choice import OneChoiceReply
from kog_dist.gateway.openai.reply import EVENTS, StreamEvent
from kog_dist.gateway.openai.tools import ToolUse
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Accepted, Done, FinishReason

_SIGNATURE: Final = "none"  # thoughts are not signed; clients want to send one back
_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


def event(kind: str, fields: Mapping[str, object]) -> bytes:
    """A server-sent event; its data has its type, too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


class MessageReply(OneChoiceReply):
    """See Reply. One choice."""

    keepalive = _PING
    media_type = EVENTS

    def __init__(
        self, message_id: str, model: str, use: ToolUse, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, stream: bool
    ) -> None:
        """`model`: as the client calls it."""
        super().__init__(use, tokenizer, prompt_ids, stream=stream)
        self.id, self.model = message_id, model
        self._deltas: list[Delta] = []
        self._num_prompt = 0
        self._has_begun = False
        self._block: type[Delta] | int | None = None  # kind of the block that is open, or the index of its call
        self._num_blocks = 0

    # ---- Reply ----
    def on_event(self, choice: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if isinstance(event, Accepted):
            self._num_prompt = event.num_prompt_tokens
        return super().on_event(choice, event)

    def end(self) -> bytes:
        """See Reply."""
        if self.is_over or not self.stream:
            return b""
        self.is_over = True
        done = self._finished()
        told = {"delta": {"stop_reason": self._stop_reason(done), "stop_sequence": done.stop_string}, "usage": _usage(done)}
        return self._closed() + event("message_delta", told) + event("message_stop", {})

    def whole(self) -> dict[str, Any]:
        """See Reply."""
        if self._error is not None:
            raise self._error
        done = self._finished()
        said = assembled(self._deltas, self.id, 0, self.use.reading.style)
        blocks: list[dict[str, Any]] = []
        if said.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": _SIGNATURE})
        if said["content"]:
            blocks.append({"type": "text", "text": said["content"]})
        for idx, call in enumerate(said.get("tool_calls", ())):
            function = call["function"]
            blocks.append(
                {
                    "type": "tool_use",
                    "id": self._call_id(idx),
                    "name": function["name"],
                    "input": json.loads(function["arguments"] or "{}"),
                }
            )
        ending = {"stop_reason": self._stop_reason(done), "stop_sequence": done.stop_string}
        return {**self._head(), "content": blocks, **ending, "usage": _usage(done)}

    # ---- frames ----
    def _failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % to_json(error_body(error))

    def _take(self, deltas: Sequence[Delta]) -> bytes:
        if not self.stream:
            self._deltas += deltas
            return b""
        return self._begin() + b"".join(map(self._frames, deltas))

    def _begin(self) -> bytes:
        """The first event, before the first token and not earlier: clients measure the first token by it."""
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", {"message": message})

    def _frames(self, delta: Delta) -> bytes:
        if isinstance(delta, ThoughtBefore):
            return b""  # a stream has said it
        if isinstance(delta, TextDelta):
            return self._opened(TextDelta, {"type": "text", "text": ""}) + self._more({"type": "text_delta", "text": delta.text})
        if isinstance(delta, ReasoningDelta):
            opened = self._opened(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._more({"type": "thinking_delta", "thinking": delta.text})
        if isinstance(delta, CallStart):
            return self._opened(delta.idx, {"type": "tool_use", "id": self._call_id(delta.idx), "name": delta.name, "input": {}})
        assert isinstance(delta, CallArguments), "there are no other deltas"
        return self._more({"type": "input_json_delta", "partial_json": delta.text})

    def _opened(self, block: type[Delta] | int, content: Mapping[str, Any]) -> bytes:
        """What ends the block before, and begins this one, unless it is open."""
        if self._block == block:
            return b""
        closed = self._closed()
        self._block = block
        self._num_blocks += 1
        return closed + event("content_block_start", {"index": self._num_blocks - 1, "content_block": content})

    def _closed(self) -> bytes:
        if self._block is None:
            return b""
        signed = self._more({"type": "signature_delta", "signature": _SIGNATURE}) if self._block is ReasoningDelta else b""
        self._block = None
        return signed + event("content_block_stop", {"index": self._num_blocks - 1})

    def _more(self, delta: Mapping[str, object]) -> bytes:
        return event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    # ---- facts ----
    def _head(self) -> dict[str, object]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _call_id(self, idx: int) -> str:
        return f"toolu_{self.id.rpartition('_')[2][:22]}_{idx}"

    def _stop_reason(self, done: Done) -> str:
        if done.finish_reason is not FinishReason.STOP:
            return "max_tokens"
        if self._parser.num_calls:
            return "tool_use"
        return "stop_sequence" if done.stop_string is not None else "end_turn"


def _usage(done: Done) -> dict[str, int]:
    """Anthropic counts tokens that were cached beside the others."""
    return {
        "input_tokens": done.num_prompt_tokens - done.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.num_cached_tokens,
        "output_tokens": done.num_generated_tokens,
    }
