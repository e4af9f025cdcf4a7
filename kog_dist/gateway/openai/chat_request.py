"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kog_dist.gateway.openai.request_model import (
    CACHE_CONTROL,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    REFUSED_EVERYWHERE,
    AnswerTokens,
    FormatName,
    JsonObjectFormat,
    Refusal,
    RequestModel,
    SamplingFields,
    Schema,
    StreamOptions,
    TextFormat,
    TopLogprobs,
    ignored,
)


class TextPart(RequestModel):
    """A piece of a message. Only text: images, audio and files are refused."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = ignored("beginnings are cached wherever they end")
    cache_control: Any = ignored(CACHE_CONTROL)


class CalledFunction(RequestModel):
    """What an earlier answer called."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(RequestModel):
    """A call of an earlier answer, sent back."""

    id: Annotated[str, Field(max_length=MAX_NAME)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = ignored("of a streamed call")


class ChatMessage(RequestModel):
    """One message. An assistant's has content or tool_calls, a tool's has tool_call_id."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    reasoning_content: str | None = Field(default=None, description="Handed to the chat template.")
    refusal: Any = ignored("of an earlier answer")
    annotations: Any = ignored("of an earlier answer")
    cache_control: Any = ignored(CACHE_CONTROL)
    audio: None = None
    function_call: None = None


class FunctionDefinition(RequestModel):
    """What the model may call."""

    name: FormatName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(default=None, description="Ignored: where arguments are enforced they follow the schema.")


class Tool(RequestModel):
    """A function; other kinds of tools are refused."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = ignored(CACHE_CONTROL)


class FunctionName(RequestModel):
    """A function that is in `tools`."""

    name: FormatName


class NamedTool(RequestModel):
    """This function must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolList(RequestModel):
    """Of all tools only these."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(RequestModel):
    """`auto` or `required` with a part of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class JsonSchema(RequestModel):
    """What the answer must satisfy. It is enforced by a grammar, with or without `strict`."""

    name: FormatName
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON of a given shape."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


MAX_TEMPLATE_VALUES = 32
TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateValue = Annotated[str, Field(max_length=4096)] | bool | int | float | None

_CHAT_ONLY: Mapping[str, Refusal] = {
    "functions": Refusal("it is deprecated; use tools", (None, [])),
    "function_call": Refusal("it is deprecated; use tool_choice", (None, "none", "auto")),
    "audio": Refusal("the model speaks text only"),
    "modalities": Refusal("the model speaks text only", (None, ["text"])),
    "web_search_options": Refusal("there is no web search"),
    "chat_template": Refusal("the template is the model's own"),
    "continue_final_message": Refusal("an answer is always a new message", (None, False)),
    "add_generation_prompt": Refusal("an answer is always a new message", (None, True)),
    "documents": Refusal("put them into messages", (None, [])),
    "mm_processor_kwargs": Refusal("the model reads text only", (None, {})),
    "echo": Refusal("the prompt is not repeated", (None, False)),
}


class ChatRequest(SamplingFields):
    """A conversation to be answered."""

    refused: ClassVar[Mapping[str, Refusal]] = {**REFUSED_EVERYWHERE, **_CHAT_ONLY}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: AnswerTokens = Field(default=None, description="Default, and -1: what fits the context.")
    max_completion_tokens: AnswerTokens = Field(default=None, description="The same; with both, the smaller one counts.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = Field(default=None, description="Needs logprobs.")
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(default=None, discriminator="type")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="An enforced answer has one call in either case.")
    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], Field(max_length=MAX_TEMPLATE_VALUES)] | None = Field(
        default=None, description="Variables of the model's chat template, such as enable_thinking; see its model card."
    )
    reasoning_effort: Any = Field(default=None, description="Of gpt-oss: low, medium or high. Else accepted and ignored.")
    verbosity: Any = ignored("the model does not know it")
    prediction: Any = ignored("it would make the answer no other")
