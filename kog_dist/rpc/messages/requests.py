"""What a client sends to a coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kog_dist.records import dataclass
from kog_dist.rpc.fields import array, checked, choice, flag, integer, number, optional, text, token_ids
from kog_dist.rpc.messages.checks import ID, NAME, TEXT, BadMessage, Checked, tagged
from kog_dist.rpc.messages.codes import ErrorCode
from kog_dist.rpc.messages.limits import (
    LEAST_DEADLINE_S,
    MAX_PROMPT_IDS,
    MAX_REGEX_BYTES,
    MAX_SALT_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SECONDS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
)
from kog_dist.sampling_params import DEFAULTS, GREEDY, SamplingParams
from kog_dist.speculation import Speculation


def _sampling(value: object) -> SamplingParams:
    """The parameters, or a map of those that differ from their defaults."""
    if type(value) is SamplingParams:
        return value
    if type(value) is not dict or not value.keys() <= DEFAULTS.keys():
        raise ValueError(f"must be a map of {', '.join(DEFAULTS)}")
    flat = value.get("logit_bias", [])
    if type(flat) is not list or len(flat) % 2:
        raise ValueError("must have logit_bias as an array of ids and biases in turn")
    try:
        return SamplingParams(**(value | {"logit_bias": tuple(zip(flat[::2], flat[1::2], strict=True))}))
    except ValueError as error:
        raise BadMessage(f"generate: {error}", ErrorCode.INVALID_REQUEST) from None


def sampling_on_the_wire(params: SamplingParams) -> dict[str, object]:
    """What `Generate` sends of them: those that differ from their defaults. Biases are one flat array, a container of its own."""
    flat = [value for pair in params.logit_bias for value in pair]
    return params.given() | ({"logit_bias": flat} if flat else {})


@dataclass(frozen=True, slots=True)
class Hello(Checked):
    """Asks who is there; answered by `Welcome`. Optional: every message carries the protocol version."""

    build: str = checked(NAME, default="")


@dataclass(slots=True)  # not frozen like the others: to make it would take twice as long, which is time to the first token
class Generate(Checked):
    """Decode one prompt. `request_id` is chosen by the client and names the request from any connection.

    What has its default is not sent: another default needs another PROTOCOL_VERSION.

    `deadline_s` counts from the reception by the coordinator. `reuse_kv` false: prefill the whole prompt, as for a measurement.
    `cache_salt`: what earlier requests left counts only where theirs is equal; so nobody learns from a time what others asked.
    `prompt_logprobs`: the prompt's tokens are reported, too, as many alternatives of each as `sampling.logprobs` says; then
    `max_tokens` may be 0.
    `json_schema`, `regex`, `grammar`: what the answer must be. With `thought_end` that begins behind this id: until then the
    answer is free, but for special tokens, and has at most `thought_tokens` tokens before the id.
    `speculate`: whether tokens may be drafted; `prediction_ids`: what the answer may be like, for drafts. No answer depends on
    them.
    """

    request_id: str = checked(ID)
    prompt: str | None = checked(optional(TEXT), default=None)
    prompt_ids: Sequence[int] | None = checked(optional(token_ids(MAX_PROMPT_IDS)), default=None)
    max_tokens: int | None = checked(optional(integer(0, MAX_TOKENS)), default=None)  # None: what fits, at most 256
    sampling: SamplingParams = checked(_sampling, default=GREEDY)
    stop: tuple[str, ...] = checked(array(text(1, MAX_STOP_BYTES), MAX_STOP_STRINGS), default=())
    ignore_eos: bool = checked(flag, default=False)
    logit_digests: bool = checked(flag, default=False)
    stamps: bool = checked(flag, default=False)
    deadline_s: float | None = checked(optional(number(LEAST_DEADLINE_S, MAX_SECONDS)), default=None)
    reuse_kv: bool = checked(flag, default=True)
    conversation: str | None = checked(optional(ID), default=None)  # shared by requests that extend one another
    json_schema: str | None = checked(optional(text(1, MAX_SCHEMA_BYTES)), default=None)  # the answer is JSON that satisfies it
    regex: str | None = checked(optional(text(1, MAX_REGEX_BYTES)), default=None)  # the answer, as a whole, matches it
    cache_salt: str | None = checked(optional(text(1, MAX_SALT_BYTES)), default=None)
    prompt_logprobs: bool = checked(flag, default=False)
    grammar: str | None = checked(
        optional(text(1, MAX_SCHEMA_BYTES)), default=None
    )  # workers/grammar/compiler.py says of which form
    thought_end: int | None = checked(optional(integer(0, MAX_TOKENS)), default=None)  # the id that ends a thought before it
    thought_tokens: int | None = checked(optional(integer(0, MAX_TOKENS)), default=None)  # then it is forced
    speculate: Speculation | None = checked(optional(choice(Speculation)), default=None)  # None: as the engine was told
    prediction_ids: Sequence[int] | None = checked(optional(token_ids(MAX_PROMPT_IDS)), default=None)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if (self.prompt is None) == (self.prompt_ids is None):
            raise BadMessage("generate: give either prompt or prompt_ids", ErrorCode.INVALID_REQUEST)
        if len(names := self.constraints) > 1:
            raise BadMessage(f"generate: {names[0]} and {names[1]} exclude each other", ErrorCode.INVALID_REQUEST)
        if self.thought_tokens is not None and self.thought_end is None:
            raise BadMessage("generate: thought_tokens needs thought_end, the id that ends a thought", ErrorCode.INVALID_REQUEST)
        if self.prompt_logprobs:
            self._check_prompt_logprobs()
        elif self.max_tokens == 0:
            raise BadMessage(f"generate: max_tokens must be from 1 to {MAX_TOKENS}, got 0")

    @property
    def constraints(self) -> tuple[str, ...]:
        """Names of the fields that say what the answer must be."""
        given = (("json_schema", self.json_schema), ("regex", self.regex), ("grammar", self.grammar))
        return tuple(name for name, text in given if text is not None)

    def _check_prompt_logprobs(self) -> None:
        if self.sampling.logprobs is None:
            raise BadMessage("generate: prompt_logprobs needs logprobs, the number of alternatives", ErrorCode.INVALID_REQUEST)
        if names := (*self.constraints, *(("thought_end",) if self.thought_end is not None else ())):
            raise BadMessage(f"generate: prompt_logprobs and {names[0]} exclude each other", ErrorCode.INVALID_REQUEST)


@dataclass(frozen=True, slots=True)
class Cancel(Checked):
    """End a request; its own client gets `Done` with `cancelled`. Answered by `StatusReport`."""

    request_id: str = checked(ID)


@dataclass(frozen=True, slots=True)
class Status(Checked):
    """Asks for a `StatusReport`."""


@dataclass(frozen=True, slots=True)
class Drain(Checked):
    """Finish the running request, refuse the others, then stop the engine. Answered by `StatusReport`."""


Request: TypeAlias = Hello | Generate | Cancel | Status | Drain
REQUESTS = tagged({"hello": Hello, "generate": Generate, "cancel": Cancel, "status": Status, "drain": Drain})
