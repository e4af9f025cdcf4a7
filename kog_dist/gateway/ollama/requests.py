"""The bodies of `/api/chat`, `/api/generate` and `/api/show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from kog_dist.gateway.openai.request_model import (
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    ModelName,
    Penalty,
    Refusal,
    RequestModel,
    Schema,
    Seed,
    Speculate,
    StopString,
    Temperature,
    TopP,
    ignored,
)
from kog_dist.rpc.messages import MAX_STOP_STRINGS

_OF_THE_START: Final = "the engine was started with what it has"
_NO_SAMPLER: Final = "there is no such sampler here; docs/sampling.md lists those there are"
_TEXT_ONLY: Final = Refusal("the model reads text only", (None, []))


class Options(RequestModel):
    """How tokens are chosen. Where a field is absent the model's defaults count, and not Ollama's."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "mirostat": Refusal(_NO_SAMPLER, (None, 0)),
        "tfs_z": Refusal(_NO_SAMPLER, (None, 1)),
        "typical_p": Refusal(_NO_SAMPLER, (None, 1)),
        "repeat_last_n": Refusal("penalties count all tokens", (None, -1), counts_with=("repeat_penalty",)),
        "penalize_newline": Refusal("penalties count all tokens", (None, True), counts_with=("repeat_penalty",)),
    }

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(default=None, description="-1, -2: what fits.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: object = ignored(_OF_THE_START)
    num_batch: object = ignored(_OF_THE_START)
    num_gpu: object = ignored(_OF_THE_START)
    num_thread: object = ignored(_OF_THE_START)
    num_keep: object = ignored("prompts are never cut")


class OllamaFunction(RequestModel):
    """What an earlier answer called."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    arguments: dict[str, object] | None = None
    index: object = ignored("calls are in their order")


class OllamaCall(RequestModel):
    """A call of an earlier answer."""

    function: OllamaFunction
    id: object = ignored("results follow their calls in order")
    type: object = ignored("there is one")


class OllamaMessage(RequestModel):
    """One message. A tool's is the result of a call before it."""

    refused: ClassVar[Mapping[str, Refusal]] = {"images": _TEXT_ONLY}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_call_id: object = ignored("results follow their calls in order")


class Body(RequestModel):
    """What both have."""

    inert: ClassVar[frozenset[str]] = frozenset({"speculate"})

    model: ModelName
    stream: bool | None = Field(default=None, description="Default: yes.")
    format: Literal["", "json"] | Schema | None = Field(default=None, description="JSON, or what it must satisfy.")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    speculate: Speculate = None
    keep_alive: object = ignored("the model stays loaded")
    truncate: object = ignored("prompts are never cut")
    shift: object = ignored("prompts are never cut")


class ChatBody(Body):
    """A conversation to be answered; an empty one only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: list[object] | None = Field(default=None, max_length=MAX_TOOLS)


class GenerateBody(Body):
    """A prompt to be answered, or with `raw` or `suffix`, or of a model without a chat template, to be continued."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "images": _TEXT_ONLY,
        "template": Refusal("the template is the model's own", (None, "")),
        "context": Refusal("send the messages before to /api/chat", (None, [])),
    }

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowBody(RequestModel):
    """A model by its name."""

    model: ModelName | None = None
    name: ModelName | None = Field(default=None, description="The same, as it was called.")
    verbose: object = ignored("there is one answer")
