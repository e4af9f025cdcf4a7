"""The body of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kog_dist.gateway.openai.peer_fields import REFUSED_EVERYWHERE, REFUSED_IN_FUNCTIONS, REFUSED_IN_MESSAGES
from kog_dist.gateway.openai.request_model import (
    CACHE_CONTROL,
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
    TextFormat,
    TopLogprobs,
    ignored,
)

# Tools that OpenAI runs itself, or that are no functions: left out, since a model that is never told of them never calls them.
HOSTED_TOOLS = (
    "web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search",
    "computer", "computer_use_preview", "code_interpreter", "image_generation", "local_shell", "shell", "mcp", "custom",
    "apply_patch", "tool_search", "namespace",
)  # fmt: skip


class InputPart(RequestModel):
    """A piece of a message: of a user, or of an earlier answer. Only text."""

    type: Annotated[Literal["input_text", "output_text", "text", "refusal", "reasoning_text"], TEXT_ALONE]
    text: str = ""
    refusal: str = ""
    annotations: object = ignored("of an earlier answer")
    logprobs: object = ignored("of an earlier answer")
    prompt_cache_breakpoint: object = ignored("beginnings are cached wherever they end")
    cache_control: object = ignored(CACHE_CONTROL)


class InputItem(RequestModel):
    """A message, a call that an earlier answer made, or what came of it. Reasoning without text is left out."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED_IN_MESSAGES,
        "tool_calls": Refusal("send items of type function_call", (None, [])),
        "tool_call_id": Refusal("send an item of type function_call_output"),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = Field(default=None, description="Of a message.")
    content: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = Field(default=None, description="Of a message.")
    call_id: str | None = None
    name: str | None = Field(default=None, description="Of a function_call.")
    arguments: str | dict[str, object] | None = Field(default=None, description="Of a function_call.")
    output: str | Annotated[list[InputPart], Field(fail_fast=True)] | None = Field(
        default=None, description="Of a function_call_output."
    )
    id: object = ignored("nothing is stored")
    status: object = ignored("of an earlier answer")
    phase: object = ignored("of an earlier answer")
    namespace: object = ignored("functions have one")
    caller: object = ignored("of an earlier answer")
    summary: object = ignored("of reasoning")
    encrypted_content: object = ignored("of reasoning")
    cache_control: object = ignored(CACHE_CONTROL)


class FunctionTool(RequestModel):
    """What the model may call."""

    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_FUNCTIONS

    type: Literal["function"]
    name: FormatName
    description: str | None = None
    parameters: Schema | None = None
    strict: object = ignored("where arguments are enforced they follow the schema")
    defer_loading: object = ignored("tools are always there")
    output_schema: object = ignored("outputs are not checked")
    allowed_callers: object = ignored("there is one")


class NamedFunction(RequestModel):
    """This function must be called."""

    type: Literal["function"]
    name: FormatName


class AllowedFunctions(RequestModel):
    """`auto` or `required` with a part of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class ResponsesJsonSchema(RequestModel):
    """JSON of a given shape. It is enforced by a grammar, with or without `strict`."""

    type: Literal["json_schema"]
    name: object = ignored("the model is not told of it")
    description: object = ignored("the model is not told of it")
    schema_: Schema = Field(alias="schema")
    strict: object = ignored("it is always followed")


class TextOptions(RequestModel):
    """What the text of the answer must be."""

    format: TextFormat | JsonObjectFormat | ResponsesJsonSchema | None = Field(default=None, discriminator="type")
    verbosity: object = ignored("the model does not know it")


class ResponsesStreamOptions(RequestModel):
    """Nothing that counts here."""

    include_obfuscation: object = ignored("streams are not padded")


LOGPROBS_INCLUDED = "message.output_text.logprobs"

_RESPONSES_ONLY: Mapping[str, Refusal] = {
    "previous_response_id": Refusal("nothing is stored here; send the earlier items as input"),
    "conversation": Refusal("nothing is stored here; send the earlier items as input"),
    "background": Refusal("an answer lives as long as its connection; use stream", (None, False)),
    "background_options": Refusal("an answer lives as long as its connection; use stream"),
    "prompt": Refusal("no prompts are stored here; send instructions and input"),
    "truncation": Refusal("a prompt that is too long is refused, never cut", (None, "disabled")),
    "context_management": Refusal("a prompt that is too long is refused, never shortened", (None, [])),
    "n": Refusal("a response is one answer", (None, 1)),
    "max_tokens": Refusal("here it is called max_output_tokens"),
    "max_completion_tokens": Refusal("here it is called max_output_tokens"),
    "messages": Refusal("here they are called input"),
    "response_format": Refusal("here it is called text.format"),
    "inputs": Refusal("here they are called input"),
    "system": Refusal("here it is called instructions", (None, "")),
    "system_prompt": Refusal("here it is called instructions", (None, "")),
    "functions": Refusal("use tools", (None, [])),
    "chat_template": Refusal("the template is the model's own"),
    "chat_template_kwargs": Refusal("use /v1/chat/completions", (None, {})),
    "reasoning_effort": Refusal("here it is called reasoning.effort"),
    "logprobs": Refusal(f"include {LOGPROBS_INCLUDED}", (None, False)),
}


class ResponsesRequest(SamplingFields):
    """A conversation to be answered, in the form of the Responses API."""

    refused: ClassVar[Mapping[str, Refusal]] = {**REFUSED_EVERYWHERE, **_RESPONSES_ONLY}

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: AnswerTokens = Field(default=None, description="Default, and -1: what fits the context.")
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions. Tools that OpenAI runs itself (web_search and others) are accepted and left out."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: the first call, and no other.")
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = Field(
        default=None, description=f"`{LOGPROBS_INCLUDED}` adds log-probabilities; the others ask for what does not exist here."
    )
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: object = ignored("it limits tools that OpenAI runs itself")
    reasoning: object = Field(default=None, description="Its effort, in the words of the model's template; docs/answers.md.")
    client_metadata: object = ignored("nothing is stored")
    access_programs: object = ignored("there are none")

    @property
    def effort(self) -> str | None:
        """How much the model shall reason, in the client's word."""
        effort = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        return effort if isinstance(effort, str) else None
