"""`/v1/messages`: a body becomes a chat, so that prompts, tools and readers are those of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kog_dist.gateway.anthropic.message_reply import MessageReply
from kog_dist.gateway.anthropic.messages_request import (
    ClearThinking,
    CountTokensRequest,
    DefinedTool,
    MediaBlock,
    MessagesRequest,
    NamedChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingParam,
    ThinkingTurns,
    ToolAdditionBlock,
    ToolByName,
    ToolDefinition,
    ToolReference,
    ToolRemovalBlock,
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
_SEARCH: Final = "tool_search_tool"  # the one of them that finds deferred tools
_BILLING: Final = "x-anthropic-billing-header:"  # begins a block of Claude Code that is none of the prompt's text


def plan_messages(body: object, served: ServedModel, key_scope: str = "") -> Planned:
    """The RPC request and the reply of a message. May take up to a second in the template's process. Raises ApiError."""
    kept, hosted = without_hosted_tools(body)
    request = parse(MessagesRequest, kept, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    chat = asked(ChatRequest, as_chat(request), served, key_scope)
    plan = chat_plan(chat, served, "msg_", cuts_limit=True)
    reply = MessageReply(plan.stamp.id, request.model, plan.use, served.tokenizer, plan.prompt_ids, stream=bool(request.stream))
    left_out = (*request.left_out, *hosted, *(f"system[{idx}]" for idx in _billing(request)))
    return Planned(plan.generates, bool(request.stream), reply, left_out, plan.unseen)


def count_tokens(body: object, served: ServedModel) -> dict[str, object]:
    """`{"input_tokens": n}` of the prompt that `/v1/messages` would make. Raises ApiError."""
    kept, _ = without_hosted_tools(body)
    request = parse(CountTokensRequest, kept, leaves_out=served.leaves_out_unknown)
    check_model(request.model, served)
    longest = replace(served, max_context=MAX_TEXT_BYTES)  # who counts may want to know how much too long a chat is
    plan = chat_plan(asked(ChatRequest, as_chat(request), served, ""), longest, "msg_")
    return {"input_tokens": len(plan.prompt_ids)}


def without_hosted_tools(body: object) -> tuple[object, tuple[str, ...]]:
    """The body without tools that Anthropic would run, and their places: the model is not told of them, so it calls none.

    Where a search would find deferred tools, they are deferred no more.
    """
    tools = body.get("tools") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(tools, list):
        return body, ()
    is_hosted = [isinstance(tool, dict) and str(tool.get("type")).startswith(HOSTED) for tool in tools]
    kept = [tool for tool, hosted in zip(tools, is_hosted, strict=True) if not hosted]
    if any(hosted and str(tool["type"]).startswith(_SEARCH) for tool, hosted in zip(tools, is_hosted, strict=True)):
        kept = [{**tool, "defer_loading": None} if isinstance(tool, dict) else tool for tool in kept]
    return {**body, "tools": kept}, tuple(f"tools[{idx}]" for idx, hosted in enumerate(is_hosted) if hosted)


# ---- to a chat ----
def as_chat(request: CountTokensRequest) -> dict[str, Any]:
    """The body of a chat that means the same. Raises ApiError naming a block that cannot be read."""
    messages = [*_system(request), *_turns(request)]
    if not messages:
        raise invalid("messages", "messages: there is nothing to answer")
    _clear_thoughts(messages, request)
    tools = _shown_tools(request)
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and messages[-1].get("content") and not messages[-1].get("tool_calls"):
        chat["continue_final_message"] = True
    if tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in tools
        ]
    if tools and request.tool_choice is not None:
        chat |= _choice(request)
    if request.thinking is not None:
        chat |= _thinking(request.thinking)
    if isinstance(request, MessagesRequest):
        chat |= _output(request, chat.get("reasoning_effort"))
        chat |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
        chat |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        chat["speculate"] = request.speculate
    return chat


def _thinking(asked_for: ThinkingParam) -> dict[str, object]:
    """Whether the model thinks, and how many tokens at most."""
    if asked_for.type == "disabled":
        return {"reasoning_effort": "none"}
    budget = {"chat_template_kwargs": {BUDGET: asked_for.budget_tokens}} if asked_for.budget_tokens is not None else {}
    return budget | ({"reasoning_effort": "medium"} if asked_for.type == "enabled" else {})


def _output(request: MessagesRequest, effort: str | None) -> dict[str, object]:
    """How much the model thinks where it does, and what its answer follows. `effort`: what `thinking` says of it."""
    config = request.output_config
    found: dict[str, object] = {}
    configs = (config, *(message.output_config for message in request.messages))
    efforts = [one.effort for one in configs if one is not None and one.effort is not None]
    if efforts and effort != "none":
        found["reasoning_effort"] = efforts[-1]
    form = request.output_format if config is None or config.format is None else config.format
    if form is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    return found


def _clear_thoughts(messages: Sequence[dict[str, object]], request: CountTokensRequest) -> None:
    """Take thoughts of earlier turns out of the messages where that is asked for."""
    edits = request.context_management.edits if request.context_management is not None else None
    for place, edit in enumerate(edits or ()):
        where = f"context_management.edits[{place}]"
        if not isinstance(edit, ClearThinking):
            raise unsupported(where, f"{where}: {edit.type} is not supported: send the messages that count")
        if edit.keep is not None and not isinstance(edit.keep, ThinkingTurns):
            continue
        num_kept = 1 if edit.keep is None else edit.keep.value
        num_turns, is_counted = 0, False
        for message in reversed(messages):
            if message["role"] == "user":
                is_counted = False
            elif "reasoning_content" in message:
                num_turns += not is_counted
                is_counted = True
                if num_turns > num_kept:
                    del message["reasoning_content"]


def _shown_tools(request: CountTokensRequest) -> list[ToolDefinition]:
    """Those that the model may call at the end: deferred ones when a result has referred to them, or as the system has said."""
    tools = list(request.tools or ())
    shown = {tool.name for tool in tools if not tool.defer_loading}
    for idx, message in enumerate(request.messages):
        for place, block in enumerate(message.content if not isinstance(message.content, str) else ()):
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                shown |= {part.tool_name for part in block.content or () if isinstance(part, ToolReference)}
            elif isinstance(block, ToolAdditionBlock) and isinstance(block.tool, DefinedTool):
                added = block.tool.definition
                tools = [*(tool for tool in tools if tool.name != added.name), added]
                shown.add(added.name)
            elif isinstance(block, ToolAdditionBlock | ToolRemovalBlock) and isinstance(block.tool, ToolByName):
                where, name = f"messages[{idx}].content[{place}]", block.tool.name
                if not any(tool.name == name for tool in tools):
                    raise invalid(where, f"{where}: there is no tool {name!r}")
                (shown.add if isinstance(block, ToolAdditionBlock) else shown.discard)(name)
    return [tool for tool in tools if tool.name in shown]


def _choice(request: CountTokensRequest) -> dict[str, object]:
    choice = request.tool_choice
    assert choice is not None
    one_call = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, NamedChoice):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **one_call}
    return {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}[choice.type], **one_call}


def _system(request: CountTokensRequest) -> list[dict[str, object]]:
    system, left_out = request.system, _billing(request)
    blocks = () if system is None or isinstance(system, str) else system
    text = system if isinstance(system, str) else "\n".join(block.text for idx, block in enumerate(blocks) if idx not in left_out)
    return [{"role": "system", "content": text}] if text else []


def _billing(request: CountTokensRequest) -> list[int]:
    """Places of system blocks that are for Anthropic's accounts. They change with every request, and stand before all that could
    be kept.
    """
    blocks = () if request.system is None or isinstance(request.system, str) else request.system
    return [idx for idx, block in enumerate(blocks) if block.text.startswith(_BILLING)]


def _turns(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    """The messages of all turns but those that were for an earlier turn alone."""
    last_user_idx = max((idx for idx, message in enumerate(request.messages) if message.role == "user"), default=-1)
    for idx, message in enumerate(request.messages):
        if message.clear_at != "next_user_message" or idx > last_user_idx:
            yield from _messages(message, idx)


def _messages(message: TurnParam, idx: int) -> Iterator[dict[str, object]]:
    """The messages of a chat that a turn stands for: results of calls are messages of their own."""
    blocks: Sequence[object] = (
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
                yield {"role": message.role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}[{place}]")}
    if texts or (not blocks and message.role != "system"):
        yield {"role": message.role, "content": "\n".join(texts)}


def _answer(blocks: Sequence[object]) -> dict[str, object]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    answer: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    return answer | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock, where: str) -> str:
    parts = block.content
    if not isinstance(parts, str):
        for place, part in enumerate(parts or ()):
            _check_block(part, "user", f"{where}.content[{place}]")
        parts = "\n".join(map(_result_text, parts or ()))
    return f"Error: {parts}" if block.is_error and not parts.lower().startswith("error") else parts


def _result_text(part: object) -> str:
    if isinstance(part, ToolReference):
        return f"The tool {part.tool_name} can be called now."
    return part.text if isinstance(part, TextBlock) else ""


def _check_block(block: object, role: str, where: str) -> None:
    if isinstance(block, MediaBlock):
        raise unsupported(where, f"{where}: a block of type {block.type} is not supported: the model reads text only")
    of_answers = isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock)
    if of_answers and role != "assistant":
        raise invalid(where, f"{where}: only an assistant's message has a block of this type")
    if isinstance(block, ToolAdditionBlock | ToolRemovalBlock) and role != "system":
        raise invalid(where, f"{where}: only a system's message changes tools")
    if isinstance(block, ToolResultBlock) and role != "user":
        raise invalid(where, f"{where}: only a user's message has results of calls")
