"""`/api/chat` and `/api/generate`: bodies become chats and completions, so that every field has one meaning."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.gateway.ollama.reply import OllamaReply, loaded
from kog_dist.gateway.ollama.requests import Body, ChatBody, GenerateBody, OllamaMessage
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.chat import ChatPlan, chat_plan
from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.planning import asked, check_model
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.tools import ToolUse

_LATEST = ":latest"


def plan_chat(body: object, served: ServedModel, key_scope: str = "") -> Planned | dict[str, object]:
    """The RPC request and the reply of a chat; an answer without a word to one without messages. Raises ApiError."""
    request = parse(ChatBody, body, leaves_out=served.leaves_out_unknown)
    check_model(own_name(request.model, served), served)
    if not request.messages:
        return loaded(request.model, is_chat=True)
    chat = _common(request) | {"messages": _messages(request.messages), "tools": request.tools}
    return _planned(request, chat_plan(asked(ChatRequest, chat, served, key_scope), served, "ollama-"), served, is_chat=True)


def plan_generate(body: object, served: ServedModel, key_scope: str = "") -> Planned | dict[str, object]:
    """The same of a prompt. Raises ApiError."""
    request = parse(GenerateBody, body, leaves_out=served.leaves_out_unknown)
    check_model(own_name(request.model, served), served)
    if not request.prompt:
        return loaded(request.model, is_chat=False)
    if request.raw or request.suffix or served.chat_template is None:
        return _completion(request, served, key_scope)
    system = [{"role": "system", "content": request.system}] if request.system else []
    chat = _common(request) | {"messages": [*system, {"role": "user", "content": request.prompt}]}
    return _planned(request, chat_plan(asked(ChatRequest, chat, served, key_scope), served, "ollama-"), served, is_chat=False)


def own_name(name: str, served: ServedModel) -> str:
    """The name without the tag that Ollama's clients add to it."""
    return name if served.answers_to(name) else name.removesuffix(_LATEST)


def _completion(request: GenerateBody, served: ServedModel, key_scope: str) -> Planned:
    fields = {name: value for name, value in _common(request).items() if name != "reasoning_effort"}
    prompt = f"{request.system}\n\n{request.prompt}" if request.system and not request.raw else request.prompt
    body = fields | {"prompt": prompt, "suffix": request.suffix}
    planned = plan_completion({name: value for name, value in body.items() if value is not None}, served, key_scope)
    reply = OllamaReply(request.model, ToolUse(), None, (), stream=_streams(request), is_chat=False)
    return Planned(planned.generates, _streams(request), reply, request.left_out)


def _planned(request: Body, plan: ChatPlan, served: ServedModel, *, is_chat: bool) -> Planned:
    stream = _streams(request)
    reply = OllamaReply(request.model, plan.use, served.tokenizer, plan.prompt_ids, stream=stream, is_chat=is_chat)
    return Planned(plan.generates, stream, reply, request.left_out, plan.unseen)


def _streams(request: Body) -> bool:
    return request.stream is not False


def _common(request: Body) -> dict[str, object]:
    """The fields of a chat or a completion that both bodies have."""
    options = request.options
    fields: dict[str, object] = {"max_tokens": -1, "speculate": request.speculate}
    if options is not None:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
        fields |= {name: getattr(options, name) for name in names}
        fields["repetition_penalty"] = options.repeat_penalty
        fields["max_tokens"] = -1 if options.num_predict is None or options.num_predict < 0 else options.num_predict
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.format}}
    if request.think is not None:
        fields["reasoning_effort"] = request.think if isinstance(request.think, str) else "medium" if request.think else "none"
    return fields


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, object]]:
    """The messages of a chat. Calls have no ids here: results follow their calls in order, or name their tools."""
    found: list[dict[str, object]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls whose results are still to come
    num_calls = 0
    for message in messages:
        plain: dict[str, object] = {"role": message.role, "content": message.content}
        if message.role == "assistant" and message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.role == "tool":
            place = next((idx for idx, (_, name) in enumerate(waiting) if name == message.tool_name), 0)
            plain["tool_call_id"] = waiting.pop(place)[0] if waiting else f"call_{num_calls}"
        if message.tool_calls:
            calls = [(f"call_{num_calls + idx}", call.function) for idx, call in enumerate(message.tool_calls)]
            num_calls += len(calls)
            waiting = [(call_id, function.name) for call_id, function in calls]
            plain["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": function.arguments or {}}}
                for call_id, function in calls
            ]
        found.append(plain)
    return found
