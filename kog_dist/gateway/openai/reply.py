"""What the gateway's process does with a request of any API: send `generates`, hand their events to `reply`."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

from kog_dist.gateway.openai.errors import ApiError
from kog_dist.records import dataclass
from kog_dist.rpc.messages import Accepted, Alive, Done, Error, Generate, PrefillProgress, PromptLogprobs, Tokens

StreamEvent: TypeAlias = Accepted | Alive | PrefillProgress | PromptLogprobs | Tokens | Done

EVENTS: Final = "text/event-stream; charset=utf-8"
KEEPALIVE = b": keep-alive\n\n"  # a comment: clients skip it


def place_comment(num_before: int) -> bytes:
    """The comment that says how many requests the engine takes before this one; `kog-chat` and the page show it."""
    return b": %d before this one\n\n" % num_before


def prompt_comment(position: int, num_prompt_tokens: int) -> bytes:
    """The comment that says how many tokens of a prompt have been read; `kog-chat` and the page show it."""
    return b": %d of %d prompt tokens\n\n" % (position, num_prompt_tokens)


class Reply(Protocol):
    """Turns the events of a request's choices into an answer, streamed or whole. Pure, for one request, not thread-safe.

    Events of a choice come in the order of the engine; choices may be interleaved. Every event is handed over, also of an answer
    that is not streamed; then the bytes are empty.
    """

    keepalive: bytes
    media_type: str  # of a stream; EVENTS may have comments between them
    satisfied: set[int]  # choices that have all that was asked for: cancel them, which is no error then
    is_over: bool  # an error or a cancelled choice has ended it: cancel the other choices, expect nothing more

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, of all choices."""

    @property
    def num_calls(self) -> int:
        """Calls so far, of all choices."""

    def on_event(self, choice: int, event: StreamEvent) -> bytes:
        """SSE frames for an event of the choice `choice` (its place in `generates`), b"" if there is nothing to say."""

    def on_error(self, choice: int, error: Error | ApiError) -> bytes:
        """The frames that end the stream because of an error: no `[DONE]` follows, `end` and later events give nothing."""

    def end(self) -> bytes:
        """The last frames, once every choice is done: usage, timings, `[DONE]`."""

    def whole(self) -> dict[str, Any]:
        """The JSON of an answer that is not streamed, once every choice is done.

        Raises ApiError if a choice ended with an error or was cancelled.
        """


@dataclass(frozen=True)
class Planned:
    """A checked request. `generates`: one per choice, with ids of their own, to be sent in this order. `left_out`: names of its
    fields that nobody here knows. `unseen`: paths of what the prompt does not show."""

    generates: tuple[Generate, ...]
    stream: bool
    reply: Reply
    left_out: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
