"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from kog_dist.gateway.openai.peer_fields import (
    REFUSED_EVERYWHERE,
    REFUSED_IN_CALLS,
    REFUSED_IN_FUNCTIONS,
    REFUSED_IN_MESSAGES,
)
from kog_dist.gateway.openai.request_model import (
    CACHE_CONTROL,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_ALONE,
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
    Whole,
    ignored,
)


class TextPart(RequestModel):
    """A piece of a message. Only text, or the refusal of an earlier answer: images, audio and files are refused."""

    type: Annotated[Literal["text", "input_text", "output_text", "refusal"], TEXT_ALONE]
    text: str
    prompt_cache_breakpoint: object = ignored("beginnings are cached wherever they end")
    cache_control: object = ignored(CACHE_CONTROL)

    @model_validator(mode="before")
    @classmethod
    def _with_text_of_refusal(cls, raw: object) -> object:
        if not isinstance(raw, dict) or raw.get("type") != "refusal" or "refusal" not in raw:
            return raw
        return {name: value for name, value in raw.items() if name != "refusal"} | {"text": raw["refusal"]}


class CalledFunction(RequestModel):
    """What an earlier answer called."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_CALLS

    name: str
    arguments: str | dict[str, object] | None = Field(
        default=None, description="A JSON object, or its text. A text that is none is shown to the model as it is."
    )


class ToolCall(RequestModel):
    """A call of an earlier answer, sent back."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_CALLS

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: object = ignored("of a streamed call")


REASONING_NAMES: Final = ("reasoning", "thinking")  # of reasoning_content, in OpenRouter and vLLM, and in Ollama


class ChatMessage(RequestModel):
    """One message. An assistant's has content or tool_calls, a tool's has tool_call_id."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None, description="Handed to the chat template. Also `reasoning` and `thinking`, as other servers call it."
    )
    prefix: bool | None = Field(default=None, description="Of the last message: the answer goes on with it. Also `partial`.")
    partial: bool | None = None
    refusal: str | None = Field(default=None, description="Of an earlier answer: its text where it has no content.")
    annotations: object = ignored("of an earlier answer")
    cache_control: object = ignored(CACHE_CONTROL)

    @model_validator(mode="before")
    @classmethod
    def _with_one_name_of_reasoning(cls, raw: object) -> object:
        if not isinstance(raw, dict) or not any(isinstance(raw.get(name), str) for name in REASONING_NAMES):
            return raw
        kept = {name: value for name, value in raw.items() if name not in REASONING_NAMES or not isinstance(value, str)}
        if kept.get("reasoning_content") is None:
            kept["reasoning_content"] = next(raw[name] for name in REASONING_NAMES if isinstance(raw.get(name), str))
        return kept


class FunctionDefinition(RequestModel):
    """What the model may call."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_FUNCTIONS

    name: FormatName
    description: str | None = None
    parameters: Schema | None = None
    strict: object = ignored("where arguments are enforced they follow the schema")


class Tool(RequestModel):
    """A function; other kinds of tools are refused."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: object = ignored(CACHE_CONTROL)


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

    name: object = ignored("the model is not told of it")
    description: object = ignored("the model is not told of it")
    schema_: Schema = Field(alias="schema")
    strict: object = ignored("it is always followed")


class JsonSchemaFormat(RequestModel):
    """JSON of a given shape."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Prediction(RequestModel):
    """A text that the answer may be like, such as the file that is to be edited. It changes no answer."""

    inert: ClassVar[frozenset[str]] = frozenset({"type", "content"})

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


def _or_none(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """What passes the check, else nothing: for what changes no answer."""
    try:
        return check(value)
    except ValidationError:
        return None


MAX_TEMPLATE_VALUES = 32
TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateValue = Annotated[str, Field(max_length=4096)] | bool | int | float | None
TemplateValues = Annotated[dict[TemplateName, TemplateValue], Field(max_length=MAX_TEMPLATE_VALUES)]

_CHAT_ONLY: Mapping[str, Refusal] = {
    "functions": Refusal("it is deprecated; use tools", (None, [])),
    "function_call": Refusal("it is deprecated; use tool_choice", (None, "none", "auto")),
    "audio": Refusal("the model speaks text only"),
    "modalities": Refusal("the model speaks text only", (None, ["text"])),
    "web_search_options": Refusal("there is no web search"),
    "chat_template": Refusal("the template is the model's own"),
    "documents": Refusal("put them into messages", (None, [])),
    "mm_processor_kwargs": Refusal("the model reads text only", (None, {})),
    "echo": Refusal("the prompt is not repeated", (None, False)),
    "prompt": Refusal("here it is called messages"),
    "input": Refusal("here it is called messages"),
    "inputs": Refusal("here it is called messages"),
    "instructions": Refusal("send a system message", (None, "")),
    "system": Refusal("send a system message", (None, "", [])),
    "system_prompt": Refusal("send a system message", (None, "")),
    "text": Refusal("use messages and response_format", (None, {}, "")),
    "max_output_tokens": Refusal("here it is called max_tokens"),
    "reasoning": Refusal("use reasoning_effort, or chat_template_kwargs", (None, {})),
    "add_special_tokens": Refusal("the template writes them", (None, False)),
    "previous_response_id": Refusal("nothing is stored here; send the earlier messages"),
}


class ChatRequest(SamplingFields):
    """A conversation to be answered."""

    refused: ClassVar[Mapping[str, Refusal]] = {**REFUSED_EVERYWHERE, **_CHAT_ONLY}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: AnswerTokens = Field(default=None, description="Default, and -1: what fits the context.")
    max_completion_tokens: AnswerTokens = Field(default=None, description="The same; with both, the smaller one counts.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = Field(default=None, description="Needs logprobs.")
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(default=None, discriminator="type")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: the first call, and no other.")
    chat_template_kwargs: TemplateValues | None = Field(
        default=None, description="Variables of the model's chat template, such as enable_thinking; see its model card."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="As in vLLM: false ends the prompt with the last message, not where an answer begins."
    )
    continue_final_message: bool | None = Field(
        default=None, description="As in vLLM: the answer goes on with the last message, which is an assistant's."
    )
    reasoning_effort: object = Field(default=None, description="In the words of the model's template; docs/answers.md.")
    verbosity: object = ignored("the model does not know it")
    prediction: Annotated[Prediction | None, WrapValidator(_or_none)] = Field(
        default=None, description="What the answer may be like: drafts come from it. Of another form it is left out."
    )
