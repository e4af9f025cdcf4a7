"""Replies of chats and text completions: chunks with choices, or one object."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from kog_dist.gateway.openai.accounting import timings, usage, usage_of
from kog_dist.gateway.openai.errors import ApiError, cancelled, from_rpc
from kog_dist.gateway.openai.logprobs import to_json
from kog_dist.gateway.openai.planning import Stamp
from kog_dist.gateway.openai.reply import EVENTS, KEEPALIVE, StreamEvent
from kog_dist.gateway.openai.request_model import StreamOptions
from kog_dist.records import dataclass
from kog_dist.rpc.messages import Accepted, Done, Error, FinishReason, PromptLogprobs, Tokens

DONE: Final = b"data: [DONE]\n\n"
# A deadline cuts an answer as a limit does. Cancelled answers end with an error instead.
_FINISH: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.DEADLINE: "length"}


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a client asked for, apart from the answer."""

    stamp: Stamp
    model: str
    num_choices: int = 1
    choices_per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @classmethod
    def of(
        cls, stamp: Stamp, model: str, num_choices: int, n: int, stream: bool | None, options: StreamOptions | None
    ) -> ReplyForm:
        """From the fields of a request."""
        return cls(
            stamp,
            model,
            num_choices,
            n,
            bool(stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )


class ChunkReply(abc.ABC):
    """The part of both that is the same: frames, ends, errors, usage. A stream ends once, with `[DONE]` or with an error."""

    keepalive = KEEPALIVE
    media_type = EVENTS
    object_whole: str
    object_chunk: str

    def __init__(self, form: ReplyForm, *, has_names: bool) -> None:
        """`has_names`: the request asked for log-probabilities."""
        self.form, self.has_names = form, has_names
        self._stream = form.stream
        self._dones: dict[int, Done] = {}
        self._error: ApiError | None = None
        self.is_over = False
        self.satisfied: set[int] = set()
        self._num_prompt = [0] * form.num_choices
        self._num_generated = [0] * form.num_choices
        head = {"id": form.stamp.id, "object": self.object_chunk, "created": form.stamp.created_s, "model": form.model}
        self._head = b"data: " + to_json(head)[:-1]
        self._before = [self._head + b',"choices":[{"index":%d,' % choice for choice in range(form.num_choices)]
        self._after = b',"usage":null}\n\n' if form.include_usage else b"}\n\n"

    # ---- what the two APIs differ in ----
    @abc.abstractmethod
    def _on_tokens(self, choice: int, event: Tokens) -> bytes:
        """Take a piece of the answer; its frames if the answer is streamed."""

    def _on_prompt(self, choice: int, event: PromptLogprobs) -> bytes:
        """Take log-probabilities of the prompt; their frames if the answer is streamed. Only text completions ask for them."""
        return b""

    @abc.abstractmethod
    def _on_done(self, choice: int, done: Done) -> bytes:
        """The same for the end of a choice."""

    @abc.abstractmethod
    def _choice(self, choice: int, finish_reason: str) -> dict[str, object]:
        """The choice of an answer that is not streamed."""

    def _finish_reason(self, choice: int, done: Done) -> str:
        """In OpenAI's words."""
        return _FINISH[done.finish_reason]

    # ---- Reply ----
    @property
    def num_reasoning_tokens(self) -> int:
        """See Reply."""
        return 0

    @property
    def num_calls(self) -> int:
        """See Reply."""
        return 0

    def on_event(self, choice: int, event: StreamEvent) -> bytes:
        """See Reply."""
        if self.is_over:
            return b""
        kind = type(event)
        if kind is Tokens:
            return self._on_tokens(choice, event)  # type: ignore[arg-type]
        if isinstance(event, Done):
            if event.finish_reason is FinishReason.CANCELLED:
                return self.on_error(choice, cancelled())
            self._dones[choice] = event
            self._num_prompt[choice] = event.num_prompt_tokens
            self._num_generated[choice] = event.num_generated_tokens
            return self._on_done(choice, event)
        if isinstance(event, Accepted):
            self._num_prompt[choice] = event.num_prompt_tokens
        return self._on_prompt(choice, event) if isinstance(event, PromptLogprobs) else b""

    def on_error(self, choice: int, error: Error | ApiError) -> bytes:
        """See Reply."""
        if self.is_over:
            return b""
        self.is_over = True
        self._error = from_rpc(error) if isinstance(error, Error) else error
        return b"data: " + to_json(self._error.body()) + b"\n\n" if self._stream else b""

    def end(self) -> bytes:
        """See Reply."""
        if self.is_over or not self._stream:
            return b""
        self.is_over = True
        if not self.form.include_usage:
            return DONE
        tail = to_json({"choices": [], "usage": self._usage(), "timings": timings(self._in_order())})
        return self._head + b"," + tail[1:] + b"\n\n" + DONE

    def whole(self) -> dict[str, Any]:
        """See Reply."""
        if self._error is not None:
            raise self._error
        dones = self._in_order()
        return {
            "id": self.form.stamp.id,
            "object": self.object_whole,
            "created": self.form.stamp.created_s,
            "model": self.form.model,
            "choices": [self._choice(choice, self._finish_reason(choice, done)) for choice, done in enumerate(dones)],
            "usage": self._usage(),
            "timings": timings(dones),
        }

    # ---- frames ----
    def _in_order(self) -> list[Done]:
        assert len(self._dones) == self.form.num_choices, "every choice is done before the end"
        return [self._dones[choice] for choice in range(self.form.num_choices)]

    def _usage(self) -> dict[str, object]:
        return usage(self._in_order(), self.form.choices_per_prompt)

    def _frame(self, choice: int, body: bytes, logprobs: bytes = b"null") -> bytes:
        """A chunk that is not a choice's last; `body` is the member with the piece of the answer."""
        end = b',"finish_reason":null}]'
        return b'%b%b,"logprobs":%b%b%b' % (self._before[choice], body, logprobs, end, self._ending(choice))

    def _last_frame(self, choice: int, body: bytes, done: Done) -> bytes:
        """A choice's last chunk, with its timings."""
        reason = self._finish_reason(choice, done).encode()
        end = b'%b,"logprobs":null,"finish_reason":"%b"}],"timings":%b' % (body, reason, to_json(timings([done])))
        return self._before[choice] + end + self._ending(choice)

    def _ending(self, choice: int) -> bytes:
        if not self.form.continuous_usage:
            return self._after
        first = choice - choice % self.form.choices_per_prompt
        so_far = usage_of(self._num_prompt[first], self._num_generated[choice])
        return b',"usage":%b}\n\n' % to_json(so_far)


def quoted(text: str) -> bytes:
    """A JSON string."""
    return encode_basestring_ascii(text).encode("ascii")


def merged(pieces: Sequence[Mapping[str, list[object]]]) -> dict[str, list[object]]:
    """Lists of the same names, one after the other."""
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]} if pieces else {}
