"""What a client sends to a coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TypeAlias

from kog_dist.rpc.fields import (
    MAX_LOGIT_BIAS,
    SHAPING_LIMITS,
    any_number,
    array,
    check_shaping,
    check_temperature,
    checked,
    flag,
    integer,
    number,
    optional,
    text,
    token_ids,
)
from kog_dist.rpc.messages.checks import ID, NAME, TEXT, BadMessage, Checked, tagged
from kog_dist.rpc.messages.codes import ErrorCode
from kog_dist.rpc.messages.limits import (
    LEAST_DEADLINE_S,
    MAX_ARRAY,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SECONDS,
    MAX_SEED,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
)

_LIMITED_NAMES = tuple(name for name in SHAPING_LIMITS if name != "logit_bias")
_LIMITED = attrgetter(*_LIMITED_NAMES)
_ANY_INTEGER = integer(-(2**63), 2**63 - 1)  # the message's own check, or the model, says which are allowed


@dataclass(frozen=True, slots=True)
class Hello(Checked):
    """Asks who is there; answered by `Welcome`. Optional: every message carries the protocol version."""

    build: str = checked(NAME, default="")


@dataclass(slots=True)  # not frozen like the others: to make it would take twice as long, which is time to the first token
class Generate(Checked):
    """Decode one prompt. `request_id` is chosen by the client and names the request from any connection.

    What has its default is not sent: another default needs another PROTOCOL_VERSION.

    `deadline_s` counts from the reception by the coordinator. `reuse_kv` false: prefill the whole prompt, as for a measurement.
    """

    request_id: str = checked(ID)
    prompt: str | None = checked(optional(TEXT), default=None)
    prompt_ids: Sequence[int] | None = checked(optional(token_ids(MAX_ARRAY)), default=None)
    max_tokens: int | None = checked(optional(integer(1, 2**31 - 1)), default=None)  # None: what fits, at most 256
    temperature: float = checked(any_number, default=0.0)
    seed: int = checked(integer(0, MAX_SEED), default=0)
    stop: tuple[str, ...] = checked(array(text(1, MAX_STOP_BYTES), MAX_STOP_STRINGS), default=())
    ignore_eos: bool = checked(flag, default=False)
    logit_digests: bool = checked(flag, default=False)
    stamps: bool = checked(flag, default=False)
    deadline_s: float | None = checked(optional(number(LEAST_DEADLINE_S, MAX_SECONDS)), default=None)
    reuse_kv: bool = checked(flag, default=True)
    conversation: str | None = checked(optional(ID), default=None)  # shared by requests that extend one another
    top_k: int = checked(_ANY_INTEGER, default=0)  # limits of what follows: fields.SHAPING_LIMITS; meaning: docs/sampling.md
    top_p: float = checked(any_number, default=1.0)
    min_p: float = checked(any_number, default=0.0)
    repetition_penalty: float = checked(any_number, default=1.0)
    presence_penalty: float = checked(any_number, default=0.0)
    frequency_penalty: float = checked(any_number, default=0.0)
    logit_bias_ids: tuple[int, ...] = checked(array(_ANY_INTEGER, MAX_LOGIT_BIAS), default=())
    logit_biases: tuple[float, ...] = checked(array(any_number, MAX_LOGIT_BIAS), default=())
    min_tokens: int = checked(_ANY_INTEGER, default=0)
    logprobs: int | None = checked(optional(_ANY_INTEGER), default=None)  # alternatives of each token; None: not even its own
    json_schema: str | None = checked(optional(text(1, MAX_SCHEMA_BYTES)), default=None)  # the answer is JSON that satisfies it
    regex: str | None = checked(optional(text(1, MAX_REGEX_BYTES)), default=None)  # the answer, as a whole, matches it

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if (self.prompt is None) == (self.prompt_ids is None):
            raise BadMessage("generate: give either prompt or prompt_ids", ErrorCode.INVALID_REQUEST)
        if len(self.logit_bias_ids) != len(self.logit_biases):
            found = f"{len(self.logit_bias_ids)} logit_bias_ids and {len(self.logit_biases)} logit_biases"
            raise BadMessage(f"generate: there are {found}; they belong together", ErrorCode.INVALID_REQUEST)
        if self.json_schema is not None and self.regex is not None:
            raise BadMessage("generate: json_schema and regex exclude each other", ErrorCode.INVALID_REQUEST)
        try:
            check_temperature(self.temperature)
            if self.is_shaped:
                check_shaping(dict(zip(_LIMITED_NAMES, _LIMITED(self), strict=True)), self.logit_bias)
        except ValueError as error:
            raise BadMessage(f"generate: {error}", ErrorCode.INVALID_REQUEST) from None

    @property
    def is_shaped(self) -> bool:
        """Whether it asks for more than a temperature: few do, and the others' limits need not be looked at."""
        return bool(self.logit_bias_ids) or _LIMITED(self) != _LIMITED_DEFAULTS

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """(id, bias) pairs."""
        return tuple(zip(self.logit_bias_ids, self.logit_biases, strict=True))


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


_DEFAULTS = {item.name: item.default for item in fields(Generate)}
_LIMITED_DEFAULTS = tuple(_DEFAULTS[name] for name in _LIMITED_NAMES)
Request: TypeAlias = Hello | Generate | Cancel | Status | Drain
REQUESTS = tagged({"hello": Hello, "generate": Generate, "cancel": Cancel, "status": Status, "drain": Drain})
