"""Bodies as clients of OpenAI's APIs send them, unchanged: benchmarks, frameworks, coding agents."""

from __future__ import annotations

from typing import Any

import pytest

from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
USER = {"role": "user", "content": "hi"}
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": ["ls"]}'}}

CLIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vllm bench serve, chat": (plan_chat, {
        "model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 32,
        "temperature": 0.0, "ignore_eos": True, **STREAM}),
    "vllm bench serve, completions": (plan_completion, {
        "model": "demo", "prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 32, "logprobs": None, **STREAM}),
    "guidellm": (plan_chat, {
        "model": "demo", "messages": [USER], "max_tokens": 32, "max_completion_tokens": 32, "stop": None, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "aiperf": (plan_chat, {
        "model": "demo", "messages": [USER], "max_completion_tokens": 32, "min_tokens": 32, "ignore_eos": True, **STREAM}),
    "lm-eval": (plan_completion, {
        "model": "demo", "prompt": [[5, 6], [7]], "max_tokens": 16, "temperature": 0, "stop": ["<|endoftext|>", "\n\n"],
        "seed": 1234}),
    "lm-eval, log-likelihoods": (plan_completion, {
        "model": "demo", "prompt": [[5, 6], [7, 8]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True,
        "seed": 1234}),
    "llama.vscode, the middle of nothing": (plan_completion, {
        "model": "demo", "prompt": "def f(", "suffix": "", "max_tokens": 8, "stream": True}),
    "LangChain": (plan_chat, {
        "model": "demo", "n": 1, "temperature": 0.7, "parallel_tool_calls": False, "stream": False,
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "x"},
        ],
        "tools": [{"type": "function",
                   "function": {"name": "shell", "description": "d", "strict": True, "parameters": PARAMETERS}}],
        "tool_choice": {"type": "function", "function": {"name": "shell"}}}),
    "openai package, an answer sent back": (plan_chat, {
        "model": "demo", "messages": [USER, {
            "role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None,
            "tool_calls": None}, USER]}),
    "Codex": (plan_response, {
        "model": "demo", "instructions": "You are a coding agent.", "stream": True, "store": False, "tool_choice": "auto",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be careful"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": PARAMETERS},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar"}},
        ],
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0198", "client_metadata": {"session": "1"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_it_is_understood(base_model: ServedModel, tagged_model: ServedModel, name: str) -> None:
    plan, body = CLIENTS[name]
    for served in (base_model, tagged_model):
        planned = plan(body, served)
        assert planned.stream == body.get("stream", False)
        assert all(message.prompt_ids for message in planned.generates)


@pytest.mark.parametrize("name", CLIENTS)
def test_its_body_is_valid_by_our_own_document(name: str) -> None:
    """What /openapi.json says of a body must not refuse what the service takes."""
    jsonschema = pytest.importorskip("jsonschema")
    from kog_dist.gateway.openai.chat_request import ChatRequest
    from kog_dist.gateway.openai.completion_request import CompletionRequest
    from kog_dist.gateway.openai.responses import without_hosted_tools
    from kog_dist.gateway.openai.responses_request import ResponsesRequest

    plan, body = CLIENTS[name]
    models: dict[Any, Any] = {plan_chat: ChatRequest, plan_completion: CompletionRequest, plan_response: ResponsesRequest}
    jsonschema.validate(without_hosted_tools(body), models[plan].model_json_schema())
