"""The reply of `/v1/responses`: an object, or the events that it comes into being by, numbered and in OpenAI's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kog_dist.gateway.openai.accounting import response_usage, timings
from kog_dist.gateway.openai.chat import call_name
from kog_dist.gateway.openai.chunks import quoted
from kog_dist.gateway.openai.errors import INVALID_REQUEST, ApiError
from kog_dist.gateway.openai.logprobs import TokenNames, entries, to_json
from kog_dist.gateway.openai.one_choice import OneChoiceReply
from kog_dist.gateway.openai.reply import EVENTS, KEEPALIVE, StreamEvent
from kog_dist.gateway.openai.tools import ToolUse
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore
from kog_dist.gateway.reading.reader import PlainText
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Accepted, FinishReason, Tokens

_DELTA: Final = b"response.output_text.delta"
_REASONING: Final = "response.reasoning_text"


class ResponseReply(OneChoiceReply):
    """`outline`: what the response says of its request. One choice. Every kind of event is described in docs/openai.md."""

    keepalive = KEEPALIVE
    media_type = EVENTS

    def __init__(
        self,
        outline: Mapping[str, Any],
        use: ToolUse,
        names: TokenNames | None,
        tokenizer: Tokenizer | None = None,
        prompt_ids: Sequence[int] = (),
        *,
        stream: bool,
    ) -> None:
        super().__init__(use, tokenizer, prompt_ids, stream=stream)
        self.outline, self.names = dict(outline), names
        self._id: str = outline["id"]
        self._has_begun = False
        self._num_events = 0
        self._output: list[dict[str, object]] = []  # finished items
        self._open: dict[str, object] | None = None  # the item that grows
        self._pieces: list[str] = []  # its text or arguments
        self._entries: list[dict[str, object]] = []
        self._untold: list[dict[str, object]] = []
        self._is_plain = stream and names is None and isinstance(self._parser, PlainText)
        self._before_number = self._before_text = b""

    # ---- Reply ----
    def on_event(self, choice: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if type(event) is Tokens and not self.is_over:
            return self._on_tokens(event)
        if isinstance(event, Accepted) and not self.is_over:
            return self._begin()
        return super().on_event(choice, event)

    def end(self) -> bytes:
        """The terminal event. This API has no `[DONE]`."""
        if self.is_over or not self.stream:
            return b""
        status = self._status
        ended = self._event(f"response.{status}", {"response": self._response(status)})
        self.is_over = True
        return ended

    def whole(self) -> dict[str, Any]:
        """See Reply."""
        if self._error is not None:
            raise self._error
        return self._response(self._status)

    # ---- the answer ----
    def _failed(self, error: ApiError) -> bytes:
        # The codes are OpenAI's and few; ours stands in the sentence.
        code = "invalid_prompt" if error.type == INVALID_REQUEST else "server_error"
        failure = {"code": code, "message": f"{error.message} ({error.code})" if error.code else error.message}
        return self._begin() + self._event("response.failed", {"response": self._response("failed", error=failure)})

    def _on_tokens(self, event: Tokens) -> bytes:
        if self._is_plain and self._open is not None:  # the path of almost every token
            text = event.text
            if not text:
                return b""
            self._pieces.append(text)
            number = self._num_events
            self._num_events = number + 1
            return b'%b%d%b%b,"logprobs":[]}\n\n' % (self._before_number, number, self._before_text, quoted(text))
        told = [] if self.names is None else entries(event, self.names)
        for entry in told:  # unlike those of a chat they have bytes always
            for each in (entry, *entry["top_logprobs"]):
                each["bytes"] = each["bytes"] or []
        deltas = self._parser.push(event.token_ids, event.text)
        if self._parser.is_enough:
            self.satisfied.add(0)
        return self._begin() + self._tell(deltas, told)

    def _take(self, deltas: Sequence[Delta]) -> bytes:
        return self._begin() + self._tell(deltas, [])

    def _tell(self, deltas: Sequence[Delta], told: list[dict[str, object]]) -> bytes:
        told = self._untold + told  # of tokens whose text was held back
        self._untold = []
        if told and not deltas:
            if self._open is not None and self._open["type"] == "message":
                deltas = (TextDelta(""),)
            else:
                self._untold = told
        elif not any(isinstance(delta, TextDelta) for delta in deltas):
            told = []  # of a thought or a call, which have no place for them
        frames = b""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                if self._open is None or self._open["type"] != "message":
                    frames += self._close() + self._open_message()
                frames += self._add_text(delta.text, told)
                told = []
            elif isinstance(delta, ReasoningDelta):
                if self._open is None or self._open["type"] != "reasoning":
                    frames += self._close() + self._open_reasoning()
                frames += self._add_reasoning(delta.text)
            elif isinstance(delta, ThoughtBefore):
                self._recall()
            elif isinstance(delta, CallStart):
                frames += self._close() + self._open_call(delta)
            else:
                frames += self._add_arguments(delta)
        return frames

    def _last(self) -> bytes:
        is_empty = self._open is None and not self._output
        opened = self._open_message() if is_empty else b""  # an answer without text is an answer
        return opened + self._close()

    def _open_message(self) -> bytes:
        idx = len(self._output)
        item_id = f"msg_{self._id.removeprefix('resp_')}_{idx}"
        self._open = {"type": "message", "id": item_id, "status": "in_progress", "role": "assistant", "content": []}
        place = f'"item_id":"{item_id}","output_index":{idx},"content_index":0,'.encode()
        self._before_number = b'event: %b\ndata: {"type":"%b",%b"sequence_number":' % (_DELTA, _DELTA, place)
        self._before_text = b',"delta":'
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", {"output_index": idx, "item": self._open}) + self._event(
            "response.content_part.added", {"item_id": item_id, "output_index": idx, "content_index": 0, "part": part}
        )

    def _open_reasoning(self) -> bytes:
        idx = len(self._output)
        item_id = f"rs_{self._id.removeprefix('resp_')}_{idx}"
        self._open = {"type": "reasoning", "id": item_id, "status": "in_progress", "summary": [], "content": []}
        at_part = {"item_id": item_id, "output_index": idx, "content_index": 0}
        return self._event("response.output_item.added", {"output_index": idx, "item": self._open}) + self._event(
            "response.content_part.added", {**at_part, "part": {"type": "reasoning_text", "text": ""}}
        )

    def _recall(self) -> None:
        """The open message was a thought; a stream has said it."""
        if self._open is None or self.stream:
            return
        text = "".join(self._pieces).strip()
        self._open, self._pieces, self._entries = None, [], []
        self._open_reasoning()
        self._add_reasoning(text)

    def _add_reasoning(self, text: str) -> bytes:
        assert self._open is not None, "its item has been opened"
        self._pieces.append(text)
        at_part = {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(f"{_REASONING}.delta", {**at_part, "delta": text})

    def _add_text(self, text: str, told: list[dict[str, object]]) -> bytes:
        self._pieces.append(text)
        self._entries += told
        if not self.stream:
            return b""
        number, self._num_events = self._num_events, self._num_events + 1
        logprobs = to_json(told)
        return b'%b%d%b%b,"logprobs":%b}\n\n' % (self._before_number, number, self._before_text, quoted(text), logprobs)

    def _open_call(self, start: CallStart) -> bytes:
        idx = len(self._output)
        self._open = {
            "type": "function_call",
            "id": f"fc_{self._id.removeprefix('resp_')}_{idx}",
            "status": "in_progress",
            "call_id": call_name(self._id, 0, start.idx, self.use.reading.style),
            "name": start.name,
            "arguments": "",
        }
        return self._event("response.output_item.added", {"output_index": idx, "item": self._open})

    def _add_arguments(self, delta: CallArguments) -> bytes:
        assert self._open is not None, "arguments follow the start of their call"
        self._pieces.append(delta.text)
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        return self._event("response.function_call_arguments.delta", {**place, "delta": delta.text})

    def _close(self) -> bytes:
        """Finish the open item, if there is one. The last item of an answer that was cut is incomplete."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, self._pieces = "".join(self._pieces), []
        told, self._entries = self._entries, []
        status = "completed" if self._done is None else self._status
        place = {"item_id": item["id"], "output_index": len(self._output)}
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": told}
            item = {**item, "status": status, "content": [part]}
            at_part = {**place, "content_index": 0}
            frames = self._event("response.output_text.done", {**at_part, "text": text, "logprobs": told})
            frames += self._event("response.content_part.done", {**at_part, "part": part})
        elif item["type"] == "reasoning":
            thought = {"type": "reasoning_text", "text": text}
            item = {**item, "status": status, "content": [thought]}
            at_part = {**place, "content_index": 0}
            frames = self._event(f"{_REASONING}.done", {**at_part, "text": text})
            frames += self._event("response.content_part.done", {**at_part, "part": thought})
        else:
            item = {**item, "status": status, "arguments": text}
            frames = self._event("response.function_call_arguments.done", {**place, "arguments": text, "name": item["name"]})
        self._output.append(item)
        return frames + self._event("response.output_item.done", {"output_index": place["output_index"], "item": item})

    # ---- events ----
    @property
    def _status(self) -> str:
        return "completed" if self._finished().finish_reason is FinishReason.STOP else "incomplete"

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._response("in_progress")
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def _event(self, kind: str, members: Mapping[str, object]) -> bytes:
        if not self.stream:
            return b""
        number, self._num_events = self._num_events, self._num_events + 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, "sequence_number": number, **members}))

    def _response(self, status: str, error: Mapping[str, object] | None = None) -> dict[str, object]:
        done = self._done
        response = {
            **self.outline,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": None if done is None else response_usage(done, self._parser.num_reasoning_tokens),
        }
        return response if done is None else {**response, "timings": timings([done])}
