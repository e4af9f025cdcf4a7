"""What a coordinator sends to a client."""

from __future__ import annotations

from typing import Any, TypeAlias

from kog_dist.records import dataclass
from kog_dist.rpc.fields import array, checked, choice, flag, integer, number, optional, text
from kog_dist.rpc.messages.checks import COUNT, ID, NAME, SECONDS, TEXT, BadMessage, Checked, tagged
from kog_dist.rpc.messages.codes import EngineState, ErrorCode, FinishReason
from kog_dist.rpc.messages.limits import MAX_ARRAY, MAX_FLOAT32, MAX_STOP_BYTES
from kog_dist.rpc.messages.status import StatusReport
from kog_dist.runtime.stages import STAGES

_LOGPROB = number(-MAX_FLOAT32, 0.0)
_TOKEN_ID = integer(0, 2**31 - 1)
_DIGEST = text(64, 64)
_NONE: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome(Checked):
    """Who serves here. `max_context` counts prompt and answer together, in tokens."""

    build: str = checked(NAME)
    instance: str = checked(NAME)
    model: str = checked(NAME)
    state: EngineState = checked(choice(EngineState))
    world_size: int = checked(COUNT)
    max_context: int = checked(COUNT)
    vocab_size: int = checked(COUNT)
    has_tokenizer: bool = checked(flag)


@dataclass(frozen=True, slots=True)
class Accepted(Checked):
    """The request waits or runs; from here on it ends in exactly one `Done` or `Error`."""

    request_id: str = checked(ID)
    queue_position: int = checked(COUNT)  # 0 = next, or decoding at once
    num_prompt_tokens: int = checked(COUNT)
    max_tokens: int = checked(COUNT)


@dataclass(frozen=True, slots=True)
class Alive(Checked):
    """The request is not forgotten. Sent when its place in the queue has changed, and after 250 ms in which nothing else was."""

    request_id: str = checked(ID)
    queue_position: int = checked(COUNT)


@dataclass(frozen=True, slots=True)
class PrefillProgress(Checked):
    """The ranks read the prompt: `position` of its tokens are in the KV cache. At most one in 100 ms; none for short prompts."""

    request_id: str = checked(ID)
    position: int = checked(COUNT)
    num_prompt_tokens: int = checked(COUNT)


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Checked):
    """Log-probabilities of the prompt's tokens `index`, `index + 1`, ... if the request asked for them, before all `Tokens`.

    The first token has none, so the first `index` is 1. `top_ids` and `top_logprobs` as in `Tokens`.
    """

    request_id: str = checked(ID)
    index: int = checked(COUNT)
    token_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY))
    logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY))
    top_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY))
    top_logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY))


@dataclass(slots=True)  # not frozen like the others: there is one for each token, and to make it would take ten times as long
class Tokens(Checked):
    """Tokens `index`, `index + 1`, ... and the text that became certain with them.

    `text` may lag behind `token_ids`: a character split over tokens and what may become a stop string are held back. An event
    may have text and no tokens. `stamps_s`: when the engine produced each token, in seconds after the request's reception, if the
    request asked for `stamps`, else empty.
    `digests`: SHA-256 (hex) of each step's float32 logits when the request asked for them, else empty.
    `logprobs`: the tokens' log-probabilities when the request asked for them, else empty. `top_ids` and `top_logprobs`: of the
    most likely tokens in the place of each, best first, as many for each token.
    """

    request_id: str = checked(ID)
    index: int = checked(COUNT)
    token_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY))
    text: str = checked(TEXT)
    stamps_s: tuple[float, ...] = checked(array(SECONDS, MAX_ARRAY))
    digests: tuple[str, ...] = checked(array(_DIGEST, MAX_ARRAY), default=())
    logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY), default=())
    top_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY), default=())
    top_logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY), default=())

    @classmethod
    def one(cls, request_id: str, index: int, token_id: int, text: str) -> Tokens:
        """An event of one token and its text, and nothing else. The values are not checked: the caller knows them."""
        event = cls.__new__(cls)
        event.request_id, event.index, event.token_ids, event.text = request_id, index, (token_id,), text
        event.stamps_s = event.digests = event.logprobs = event.top_ids = event.top_logprobs = _NONE
        return event

    @property
    def is_plain(self) -> bool:
        """Whether there is one token, and nothing is said of it but its text: so it is with almost every token."""
        return (
            self.stamps_s is _NONE
            and self.digests is _NONE
            and self.logprobs is _NONE
            and self.top_ids is _NONE
            and self.top_logprobs is _NONE
            and type(self.token_ids) is tuple
            and len(self.token_ids) == 1
        )


@dataclass(frozen=True, slots=True)
class Done(Checked):
    """The request ended well. Times are None where there was no such moment; workers/coordinator/timings.py defines them."""

    request_id: str = checked(ID)
    finish_reason: FinishReason = checked(choice(FinishReason))
    num_prompt_tokens: int = checked(COUNT)
    num_generated_tokens: int = checked(COUNT)
    queue_s: float = checked(SECONDS)
    total_s: float = checked(SECONDS)
    prefill_s: float | None = checked(optional(SECONDS), default=None)
    ttft_s: float | None = checked(optional(SECONDS), default=None)
    itl_p50_s: float | None = checked(optional(SECONDS), default=None)
    itl_p99_s: float | None = checked(optional(SECONDS), default=None)
    tokens_per_s: float | None = checked(optional(number(0.0, 1e12)), default=None)
    num_cached_tokens: int = checked(COUNT, default=0)  # of the prompt, which were not prefilled again
    received_s: float | None = checked(optional(SECONDS), default=None)  # on the monotonic clock of the engine's machine
    stages_s: tuple[float | None, ...] = checked(array(optional(SECONDS), len(STAGES)), default=())  # one for each, or none
    stop_string: str | None = checked(optional(text(1, MAX_STOP_BYTES)), default=None)  # that ended the answer
    num_drafted_tokens: int = checked(COUNT, default=0)
    num_accepted_tokens: int = checked(COUNT, default=0)  # of them those that were right
    num_drafted_predictions: int = checked(COUNT, default=0)  # of those that were drafted: from the request's prediction
    num_accepted_predictions: int = checked(COUNT, default=0)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if len(self.stages_s) not in (0, len(STAGES)):
            raise BadMessage(f"done: stages_s must have {len(STAGES)} elements or none, got {len(self.stages_s)}")


@dataclass(frozen=True, slots=True)
class Error(Checked):
    """A refusal, or the end of a request without its answer. No `request_id`: it could not be read.

    `retry_after_s`, with `queue_full`: an estimate of when there will be room.
    """

    code: ErrorCode = checked(choice(ErrorCode))
    message: str = checked(text(1, 16384))
    request_id: str | None = checked(optional(ID), default=None)
    retry_after_s: float | None = checked(optional(SECONDS), default=None)


Event: TypeAlias = Welcome | Accepted | Alive | PrefillProgress | PromptLogprobs | Tokens | Done | Error | StatusReport
EVENTS = tagged({
    "welcome": Welcome, "accepted": Accepted, "alive": Alive, "prefill": PrefillProgress, "prompt_logprobs": PromptLogprobs,
    "tokens": Tokens, "done": Done, "error": Error, "status_report": StatusReport,
})  # fmt: skip
