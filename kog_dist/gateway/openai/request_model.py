"""The base of the request models, and the fields that all three APIs have. Limits come from the RPC protocol's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from kog_dist.records import dataclass
from kog_dist.rpc.messages import MAX_STOP_BYTES, MAX_STOP_STRINGS
from kog_dist.sampling_params import LEAST_TEMPERATURE, LIMITS, MAX_LOGIT_BIAS, MAX_SEED, MAX_TOP_LOGPROBS

MAX_CHOICES: Final = 8  # answers to one HTTP request: n times the number of prompts
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
MAX_NAME: Final = 256  # characters of names and keys that clients choose
MOST_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field of OpenAI or another server that would change the answer: refused, unless its value is one that means nothing.

    `counts_with`: without these fields of the same object no value of it means anything. `of_harmless`: an object whose own
    fields all mean nothing means nothing.
    """

    reason: str
    harmless: tuple[object, ...] = (None,)
    counts_with: tuple[str, ...] = ()
    of_harmless: bool = False


def _with_reason(value: object, known: ValidatorFunctionWrapHandler) -> object:
    try:
        return known(value)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['msg']}: the model reads text only") from None


TEXT_ALONE: Final = WrapValidator(_with_reason)  # of the type of a message's part, which may be an image in other APIs
_IGNORED: Final = "Accepted and ignored: "


def ignored(what: str) -> object:
    """A field that is accepted because it cannot change the answer."""
    return Field(default=None, description=f"{_IGNORED}{what}.")


def is_ignored(field: FieldInfo) -> bool:
    """Whether a field is one of those."""
    return (field.description or "").startswith(_IGNORED)


CACHE_CONTROL: Final = "Anthropic's mark of what to cache; caches are used whenever they fit"


class RequestModel(BaseModel):
    """A value of another type is refused: "5" is no number. Unknown fields are kept until `unknown_fields` has seen them.

    Each class is built when it first reads something: most gateways see requests of one API, and parts of requests need no
    reader of their own.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True)
    refused: ClassVar[Mapping[str, Refusal]] = {}
    inert: ClassVar[frozenset[str]] = frozenset()  # fields that are read, and that change no answer
    _left_out: tuple[str, ...] = PrivateAttr(default=())

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of unknown fields that the request had."""
        return self._left_out

    def with_left_out(self, names: Sequence[str]) -> Self:
        """The same request, that remembers them."""
        self._left_out = tuple(names)
        return self


def _bounded(name: str, description: str) -> object:
    low, high = LIMITS[name]
    return Field(ge=low, le=high, description=description)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
Bias = Annotated[float, _bounded("logit_bias", "Added to the logit.")]
Temperature = Annotated[
    float,
    Field(
        ge=0,
        le=LIMITS["temperature"][1],
        description=f"Below {LEAST_TEMPERATURE:g} it is greedy. Default: generation_config.json of the model, else 1.",
    ),
]
TopP = Annotated[float, Field(ge=0, le=1, description="0 leaves the best token only.")]
Penalty = Annotated[float, _bounded("presence_penalty", "Of tokens that the answer has already.")]


def _as_integer(value: object) -> object:
    """100.0 is an integer of JSON, which some clients write so."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_as_integer)]
Tokens = Annotated[Whole, Field(ge=1, le=MOST_TOKENS)]


def _instead_of_minus_1(meaning: int | None) -> BeforeValidator:
    """Clients of other servers say -1 where they want no limit, or any seed."""
    return BeforeValidator(lambda value: meaning if type(value) in (int, float) and value == -1 else value)


AnswerTokens = Annotated[Tokens | None, _instead_of_minus_1(MOST_TOKENS)]
NoTokens = Annotated[Annotated[Whole, Field(ge=0, le=MOST_TOKENS)] | None, _instead_of_minus_1(MOST_TOKENS)]
Seed = Annotated[Annotated[Whole, Field(ge=-(MAX_SEED // 2) - 1, le=MAX_SEED)] | None, _instead_of_minus_1(None)]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Speculate = Annotated[
    Literal["off", "lookup", "auto"] | None,
    Field(description="Drafts of later tokens; they change no answer. Default: as the engine was started."),
]
ModelName = Annotated[str, Field(max_length=1024, description="A name of /v1/models, or `default`.")]


class StreamOptions(RequestModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the usage, and without choices.")
    continuous_usage_stats: bool | None = Field(default=None, description="As in vLLM: the usage so far in every chunk.")
    include_obfuscation: object = ignored("streams are not padded")


class SamplingFields(RequestModel):
    """How tokens are chosen; docs/sampling.md. Where a field is absent or null the model's defaults count."""

    inert: ClassVar[frozenset[str]] = frozenset({"user", "prompt_cache_key", "speculate"})

    model: ModelName | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MOST_TOKENS, description="0 and -1: all.")] | None = None
    min_p: Annotated[float, _bounded("min_p", "Least share of the best token's probability.")] | None = None
    repetition_penalty: Annotated[float, _bounded("repetition_penalty", "Of tokens in prompt or answer.")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(
        default=None, max_length=MAX_LOGIT_BIAS, description="Token ids, as strings, and what is added to their logits."
    )
    seed: Seed = Field(
        default=None,
        description="The same request with the same seed gives the same answer. A negative one counts modulo 2**64. "
        "Default, -1: a new one each time.",
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description=f"Up to {MAX_STOP_STRINGS} texts of at most {MAX_STOP_BYTES} bytes that end the answer."
    )
    ignore_eos: bool | None = Field(default=None, description="As in vLLM: go on to the limit.")
    min_tokens: Annotated[Whole, Field(ge=0, le=MOST_TOKENS)] | None = None
    user: str | None = Field(default=None, description="Tells users with the same first messages apart when a replica is chosen.")
    prompt_cache_key: str | None = Field(
        default=None, description="Requests with the same key go to the same replica, where their beginning is cached."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = Field(
        default=None, description="As in vLLM: only what requests with the same one have left is used again."
    )
    speculate: Speculate = None
    metadata: object = ignored("nothing is stored")
    store: object = ignored("nothing is stored")
    safety_identifier: object = ignored("nobody is reported")
    service_tier: object = ignored("there is one")
    prompt_cache_retention: object = ignored("the least recently used cache makes room")
    prompt_cache_options: object = ignored("caches are used whenever they fit")
    priority: object = ignored("requests run in turns")


class TextFormat(RequestModel):
    """Whatever the model says."""

    type: Literal["text"]


Schema = Annotated[dict[str, Any], Field(description="A JSON schema of at most 64 KiB.")]


class JsonObjectFormat(RequestModel):
    """A JSON object; the grammar makes sure of it."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema", description="As in llama.cpp: what it must satisfy.")


FormatName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
