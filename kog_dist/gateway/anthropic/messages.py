"""`/v1/messages`: a body becomes a chat, so that prompts, tools and readers are those of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kog_dist.gateway.anthropic.message_reply import MessageReply
from kog_dist.gateway.anthropic.messages_request import (
    CountTokensRequest,
    MediaBlock,
    MessagesRequest,
    NamedChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingParam,
    ToolResultBlock,
    ToolUseBlock,
    TurnParam,
)
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.chat import chat_plan
from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.errors import invalid, unsupported
from kog_dist.gateway.openai.planning import asked, check_model
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import BUDGET
from kog_dist.gateway.tokens import MAX_TEXT_BYTES

HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset")  # kinds of tools that Anthropic runs


def plan_messages(body: object, served: ServedModel, key_scope: str = "") -> Planned:
    """The RPC request and the reply of a message. May take up to a second in the template's process. Raises ApiError."""
    kept, hosted = without_hosted_tools(body)
    request = parse(MessagesRequest, kept, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    chat = asked(ChatRequest, as_chat(request), served, key_scope)
    plan = chat_plan(chat, served, "msg_", cuts_limit=True)
    reply = MessageReply(
        plan.stamp.id, request.model, plan.use, served.tokenizer, plan.prompt_ids, stream=bool(request.stream)
    )  # fmt: skip
    return Planned(plan.generates, bool(request.stream), reply, (*request.left_out, *hosted), plan.unseen)


def count_tokens(body: object, served: ServedModel) -> dict[str, Any]:
    """`{"input_tokens": n}` of the prompt that `/v1/messages` would make. Raises ApiError."""
    kept, _ = without_hosted_tools(body)
    request = parse(CountTokensRequest, kept, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    longest = replace(served, max_context=MAX_TEXT_BYTES)  # who counts may want to know how much too long a chat is
    plan = chat_plan(asked(ChatRequest, as_chat(request), served, ""), longest, "msg_")
    return {"input_tokens": len(plan.prompt_ids)}


def without_hosted_tools(body: object) -> tuple[object, tuple[str, ...]]:
    """The body without tools that Anthropic would run, and their places: the model is not told of them, so it calls none."""
    tools = body.get("tools") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(tools, list):
        return body, ()
    is_hosted = [isinstance(tool, dict) and str(tool.get("type")).startswith(HOSTED) for tool in tools]
    kept = [tool for tool, hosted in zip(tools, is_hosted, strict=True) if not hosted]
    return {**body, "tools": kept}, tuple(f"tools[{idx}]" for idx, hosted in enumerate(is_hosted) if hosted)


# ---- to a chat ----
def as_chat(request: CountTokensRequest) -> dict[str, Any]:
    """The body of a chat that means the same. Raises ApiError naming a block that cannot be read."""
    messages = [*_system(request), *(chat for idx, message in enumerate(request.messages) for chat in _messages(message, idx))]
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") and not messages[-1].get("tool_calls"):
        chat["continue_final_message"] = True
    if request.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in request.tools
        ]
    if request.tools and request.tool_choice is not None:
        chat |= _choice(request)
    if request.thinking is not None:
        chat |= _thinking(request.thinking)
    if isinstance(request, MessagesRequest):
        chat |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
        chat |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    return chat


def _thinking(asked_for: ThinkingParam) -> dict[str, Any]:
    """Whether the model thinks, and how many tokens at most."""
    if asked_for.type == "disabled":
        return {"reasoning_effort": "none"}
    budget = {"chat_template_kwargs": {BUDGET: asked_for.budget_tokens}} if asked_for.budget_tokens is not None else {}
    return budget | ({"reasoning_effort": "medium"} if asked_for.type == "enabled" else {})


def _choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    assert choice is not None
    one_call = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, NamedChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **one_call}
    return {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type], **one_call}


def _system(request: CountTokensRequest) -> list[dict[str, Any]]:
    system = request.system
    text = system if isinstance(system, str) else "\n".join(block.text for block in system or ())
    return [{"role": "system", "content": text}] if text else []


def _messages(message: TurnParam, idx: int) -> Iterator[dict[str, Any]]:
    """The messages of a chat that a turn stands for: results of calls are messages of their own."""
    blocks: Sequence[Any] = (
        [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    )
    where = f"messages[{idx}].content"
    for place, block in enumerate(blocks):
        _check_block(block, message.role, f"{where}[{place}]")
    if message.role == "assistant":
        yield _answer(blocks)
        return
    texts: list[str] = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}[{place}]")}
    if texts or not blocks:
        yield {"role": "user", "content": "\n".join(texts)}


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks if isinstance(block, ToolUseBlock)
    ]  # fmt: skip
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return answer | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock, where: str) -> str:
    parts = block.content
    if not isinstance(parts, str):
        for place, part in enumerate(parts or ()):
            _check_block(part, "user", f"{where}.content[{place}]")
        parts = "\n".join(part.text for part in parts or () if isinstance(part, TextBlock))
    return f"Error: {parts}" if block.is_error and not parts.lower().startswith("error") else parts


def _check_block(block: object, role: str, where: str) -> None:
    if isinstance(block, MediaBlock):
        raise unsupported(where, f"{where}: a block of type {block.type} is not supported: the model reads text only")
    of_answers = isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock)
    if of_answers and role != "assistant":
        raise invalid(where, f"{where}: only an assistant's message has a block of this type")
    if isinstance(block, ToolResultBlock) and role != "user":
        raise invalid(where, f"{where}: only a user's message has results of calls")
