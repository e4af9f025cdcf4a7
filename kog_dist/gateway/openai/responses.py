"""`/v1/responses`, without a memory: what a request does not send, nobody knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kog_dist.gateway.openai.chat_request import CalledFunction, ChatMessage, ToolCall
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.logprobs import TokenNames, to_json
from kog_dist.gateway.openai.planning import (
    Stamp,
    answer_limit,
    asked,
    conversation_of,
    object_schema,
    plan_choices,
    sampling_params,
    schema_text,
)
from kog_dist.gateway.openai.prompt import beginning_of, prompt_of
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import JsonObjectFormat, TextFormat
from kog_dist.gateway.openai.responses_reply import ResponseReply
from kog_dist.gateway.openai.responses_request import (
    HOSTED_TOOLS,
    LOGPROBS_INCLUDED,
    AllowedFunctions,
    InputItem,
    InputPart,
    NamedFunction,
    ResponsesJsonSchema,
    ResponsesRequest,
)
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import begin_answer, thinking_of
from kog_dist.gateway.openai.tools import Function, ToolUse, tool_use
from kog_dist.sampling_params import SamplingParams

__all__ = ["ResponseReply", "ResponsesRequest", "plan_response"]


def plan_response(body: object, served: ServedModel, key_scope: str = "") -> Planned:
    """The RPC request and the reply of a response. May take up to a second in the template's process. Raises ApiError."""
    request = asked(ResponsesRequest, without_hosted_tools(body), served, key_scope)
    answer_schema = _format_schema(request)
    use = _tool_use(request, served, has_format=answer_schema is not None)
    messages = _messages(request)
    tools = [function.as_chat_tool() for function in use.offered]
    thinking = thinking_of(request.effort, None, served)
    is_enforced = use.is_enforced or answer_schema is not None
    prompt = prompt_of(messages, tools, served, "input", variables=thinking.variables, scope=request.cache_salt)
    begun = begin_answer(prompt.ids, thinking, served, is_enforced=is_enforced)
    has_logprobs = request.top_logprobs is not None or LOGPROBS_INCLUDED in (request.include or ())
    stamp = Stamp.new("resp_")
    params = sampling_params(request, served, (request.top_logprobs or 0) if has_logprobs else None)
    fields = {
        **begun.fields(),
        "max_tokens": answer_limit((request.max_output_tokens,), len(begun.prompt_ids), served, "input"),
        **use.fields(begun, answer_schema, served),
    }
    generates = plan_choices("input", request, stamp, [fields], 1, params, conversation_of(request, beginning_of(messages)))
    outline = _outline(request, stamp, served, params)
    names = TokenNames(served.tokenizer) if has_logprobs else None
    reply = ResponseReply(outline, use.after(begun), names, served.tokenizer, begun.prompt_ids, stream=bool(request.stream))
    return Planned(generates, bool(request.stream), reply, request.left_out, prompt.unseen)


def without_hosted_tools(body: object) -> object:
    """The body without tools that OpenAI would run: the model is not told of them, and so never calls them."""
    tools = body.get("tools") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(tools, list):
        return body
    kept = [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") in HOSTED_TOOLS)]
    return {**body, "tools": kept}


def _format_schema(request: ResponsesRequest) -> str | None:
    wanted = request.text.format if request.text is not None else None
    if isinstance(wanted, ResponsesJsonSchema):
        return schema_text(wanted.schema_, "text.format.schema")
    return object_schema(wanted, "text.format.schema") if isinstance(wanted, JsonObjectFormat) else None


def _tool_use(request: ResponsesRequest, served: ServedModel, *, has_format: bool) -> ToolUse:
    functions = [Function(tool.name, tool.description, tool.parameters) for tool in request.tools or ()]
    choice = request.tool_choice or ("auto" if functions else "none")
    names: list[str] | None = None
    if isinstance(choice, NamedFunction):
        mode, names = "required", [choice.name]
    elif isinstance(choice, AllowedFunctions):
        mode, names = choice.mode, [tool.name for tool in choice.tools]
    else:
        mode = choice
    one_call = request.parallel_tool_calls is False
    return tool_use(functions, mode, names, served, has_format=has_format, has_one_call=one_call)


# ---- items to messages ----
def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    """The input as messages of a chat: calls join the answer that they belong to."""
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, ChatMessage(role="user", content=request.input)]
    thought: str | None = None  # of the answer that comes next
    for idx, item in enumerate(request.input):
        where = f"input[{idx}]"
        if item.type == "reasoning":
            thought = _text(item.content or "") or None
        elif item.type == "message":
            messages.append(_message(item, where, thought if item.role == "assistant" else None))
            thought = None
        elif item.type == "function_call":
            call = _call(item, where)
            if messages and messages[-1].role == "assistant":
                last = messages.pop()
                messages.append(last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]}))
            else:
                messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=thought))
                thought = None
        elif item.type == "function_call_output":
            output = _needed(item.output, f"{where}.output")
            messages.append(
                ChatMessage(role="tool", content=_text(output), tool_call_id=_needed(item.call_id, f"{where}.call_id"))
            )
    if not messages:
        raise invalid("input", "input has no message")
    return messages


def _message(item: InputItem, where: str, thought: str | None) -> ChatMessage:
    role, content = _needed(item.role, f"{where}.role"), _text(_needed(item.content, f"{where}.content"))
    return ChatMessage(role=role, content=content, reasoning_content=thought)


def _call(item: InputItem, where: str) -> ToolCall:
    function = CalledFunction(name=_needed(item.name, f"{where}.name"), arguments=item.arguments)
    return ToolCall(id=_needed(item.call_id, f"{where}.call_id"), function=function)


def _needed(value: object, where: str) -> Any:
    if value is None:
        raise invalid(where, f"{where} is missing", "missing_required_parameter")
    return value


def _text(content: str | Sequence[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.refusal or part.text for part in content)


# ---- what the response says of the request ----
_MAX_REPEATED: Final = 1 << 16  # bytes of a request that its response repeats, three times in a stream


def _outline(request: ResponsesRequest, stamp: Stamp, served: ServedModel, params: SamplingParams) -> dict[str, object]:
    """The members of the response that are known before the answer. A long request is not repeated in full."""
    dumped = request.model_dump(mode="json", by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice"})
    tools = [{"description": None, "parameters": None, "strict": False, **tool} for tool in dumped.get("tools", ())]
    text = dumped.get("text", {})
    text.setdefault("format", TextFormat(type="text").model_dump())
    text.pop("verbosity", None)
    instructions = request.instructions
    metadata = request.metadata if isinstance(request.metadata, dict) else {}
    if len(to_json([tools, text, instructions, metadata])) > _MAX_REPEATED:
        instructions, metadata = None, {}
        tools = [{**tool, "description": None, "parameters": None} for tool in tools]
    return {
        "id": stamp.id,
        "object": "response",
        "created_at": stamp.created_s,
        "model": served.name,
        "background": False,
        "instructions": instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": metadata,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
