"""The body of `/v1/messages`, and of `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from kog_dist.gateway.openai.request_model import (
    CACHE_CONTROL,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    FormatName,
    ModelName,
    Refusal,
    RequestModel,
    Schema,
    Speculate,
    StopString,
    Temperature,
    Tokens,
    TopP,
    ignored,
)
from kog_dist.rpc.messages import MAX_STOP_STRINGS

ServerTool = Annotated[str, Field(pattern=r"^(web_search|web_fetch|code_execution|tool_search_tool|mcp_toolset|memory)")]
_TEXT_ONLY: Final = "the model reads text only"


class TextBlock(RequestModel):
    """Words."""

    type: Literal["text"]
    text: str
    cache_control: object = ignored(CACHE_CONTROL)
    citations: object = ignored("nothing is cited")


class MediaBlock(RequestModel):
    """What a model that reads text cannot see: refused by its name where it is used."""

    type: Literal["image", "document", "audio", "video", "search_result", "container_upload"]


class ThinkingBlock(RequestModel):
    """What an earlier answer thought; a template shows of it what its model wants to see again."""

    type: Literal["thinking"]
    thinking: str
    signature: object = ignored("thoughts are taken as they are")


class RedactedThinkingBlock(RequestModel):
    """A thought that only another service can read."""

    type: Literal["redacted_thinking"]
    data: object = ignored("only who wrote it can read it")


class ToolUseBlock(RequestModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=MAX_NAME)]
    name: Annotated[str, Field(max_length=MAX_NAME)]
    input: dict[str, object]
    cache_control: object = ignored(CACHE_CONTROL)


class ToolReference(RequestModel):
    """A deferred tool that was found: from then on the model is shown it."""

    type: Literal["tool_reference"]
    tool_name: Annotated[str, Field(max_length=MAX_NAME)]
    cache_control: object = ignored(CACHE_CONTROL)


ResultBlock = Annotated[TextBlock | MediaBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(RequestModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=MAX_NAME)]
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: object = ignored(CACHE_CONTROL)


class ToolDefinition(RequestModel):
    """A function of the client's."""

    refused: ClassVar[Mapping[str, Refusal]] = {}

    name: FormatName
    description: str | None = None
    input_schema: Schema
    type: Literal["custom"] | None = None
    defer_loading: bool | None = Field(default=None, description="The model is shown it from when a result refers to it.")
    cache_control: object = ignored(CACHE_CONTROL)
    strict: object = ignored("where arguments are enforced they follow the schema")
    eager_input_streaming: object = ignored("arguments are always streamed as they come")


class ToolByName(RequestModel):
    """A tool of the request, or one that an earlier message has defined."""

    type: Literal["tool_reference"]
    name: Annotated[str, Field(max_length=MAX_NAME)]


class DefinedTool(RequestModel):
    """A tool that is defined where it is added."""

    type: Literal["tool_definition"]
    definition: ToolDefinition


class ToolAdditionBlock(RequestModel):
    """From here on the model may call a tool."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolByName | DefinedTool, Field(discriminator="type")]
    cache_control: object = ignored(CACHE_CONTROL)


class ToolRemovalBlock(RequestModel):
    """From here on it may not."""

    type: Literal["tool_removal"]
    tool: ToolByName
    cache_control: object = ignored(CACHE_CONTROL)


Block = Annotated[
    TextBlock
    | MediaBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock,
    Field(discriminator="type"),
]


class TurnConfig(RequestModel):
    """How much the model thinks from here on, in the words of its template."""

    effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class TurnParam(RequestModel):
    """A turn, or what the system says between two. An assistant's that is last is gone on with."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]
    clear_at: Literal["next_user_message", "never"] | None = Field(default=None, description="When its text is left out.")
    output_config: TurnConfig | None = None


class AnyChoice(RequestModel):
    """auto: the model decides; any: it must call; none: it must not."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    """This tool must be called."""

    type: Literal["tool"]
    name: FormatName
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(RequestModel):
    """Whether the model thinks before it answers, where its template lets one choose, and how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: object = ignored("thoughts are shown")


class ThinkingTurns(RequestModel):
    """Those of so many turns, counted from the last; a turn goes on over its calls."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(RequestModel):
    """Those of all turns."""

    type: Literal["all"]


class ClearThinking(RequestModel):
    """Thoughts of earlier turns are left out. Without `keep` those of the last turn stay."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")] | None = None


class OtherEdit(RequestModel):
    """What is refused by its name."""

    type: Literal["clear_tool_uses_20250919", "compact_20260112"]


class ContextManagement(RequestModel):
    """What of the conversation the model is not shown."""

    edits: list[Annotated[ClearThinking | OtherEdit, Field(discriminator="type")]] | None = None


class OutputFormat(RequestModel):
    """What the answer follows."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(RequestModel):
    """How much the model thinks, in the words of its template, and what its answer follows."""

    effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    format: OutputFormat | None = None
    task_budget: object = ignored("the model does not know it")


_REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("nothing is run here"),
    "mcp_servers": Refusal("the client talks to MCP servers", (None, [])),
    "n": Refusal("there is one answer", (None, 1)),
}


class CountTokensRequest(RequestModel):
    """What of a request becomes the prompt."""

    inert: ClassVar[frozenset[str]] = frozenset({"tool_choice", "max_tokens"})

    model: ModelName
    messages: Annotated[list[TurnParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[AnyChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: ThinkingParam | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to be answered. `top_k`, `temperature`, `top_p`: the model's own where they are left out."""

    refused: ClassVar[Mapping[str, Refusal]] = _REFUSED
    inert: ClassVar[frozenset[str]] = frozenset({"speculate"})

    max_tokens: Tokens = Field(description="Of the answer at most; what does not fit the context is cut to what does.")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    speculate: Speculate = None
    metadata: object = ignored("nobody is reported")
    service_tier: object = ignored("there is one")
    inference_geo: object = ignored("there is one place")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="The same as output_config.format.")
    speed: object = ignored("there is one")
