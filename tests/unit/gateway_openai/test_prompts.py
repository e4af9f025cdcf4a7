"""What a request becomes: the prompt, the grammar, the choice of tokens, the conversation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.tokens import tokenize
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Generate
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind, GrammarCompiler
from tests.unit.gateway_openai.engine_script import TAGGED_TEMPLATE

NODE = {
    "$defs": {"Node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                       "required": ["next"], "additionalProperties": False}},
    "$ref": "#/$defs/Node",
}  # fmt: skip
SELF = {"type": "object", "properties": {"$ref": {"const": "#/x"}, "me": {"$ref": "#"}}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "node", "description": "a list", "parameters": NODE, "strict": True}},
    {"type": "function", "function": {"name": "self", "parameters": SELF}},
    {"type": "function", "function": {"name": "nothing"}},
]


def prompt_of(message: Generate, served: ServedModel) -> str:
    assert served.tokenizer is not None
    return served.tokenizer.decode(message.prompt_ids or ())


def chat(served: ServedModel, *messages: dict[str, Any], **fields: Any) -> Generate:
    return plan_chat({"messages": list(messages or [{"role": "user", "content": "hi"}]), **fields}, served).generates[0]


# ---- prompts ----
def test_a_base_model_continues_the_text_of_a_chat(base_model: ServedModel) -> None:
    first: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}]}
    assert prompt_of(chat(base_model, first), base_model) == "def add(a, b):"
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "\n    return a + b",
        "refusal": None,
        "tool_calls": None,
        "annotations": None,
    }
    more = [{"role": "developer", "content": "# sums"}, first, answer, {"role": "user", "content": "def sub(a, b):"}]
    assert prompt_of(chat(base_model, *more), base_model) == (
        "# sums\n\ndef add(a, b):\n    return a + b\n\ndef sub(a, b):"
    )  # fmt: skip
    assert base_model.card()["chat"] == "plain"


def test_a_template_gets_messages_and_tools(tagged_model: ServedModel) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "node", "arguments": '{"next": null}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "go", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    text = prompt_of(chat(tagged_model, *messages, tools=TOOLS[2:]), tagged_model)
    shown = '{"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}}'
    assert text == (
        f"<tools>{shown}</tools><|system|>be brief\n<|user|>go\n"
        '<|assistant|><tool_call>{"name": "node", "arguments": {"next": null}}</tool_call>\n<|tool|>a\nb\n<|assistant|>'
    )
    assert "<tools>" not in prompt_of(chat(tagged_model, *messages, tools=TOOLS, tool_choice="none"), tagged_model)


def test_a_template_gets_the_variables_of_a_request(tagged_model: ServedModel, base_model: ServedModel) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    asked = plan_chat({**chat, "chat_template_kwargs": {"enable_thinking": False, "unused": None}}, tagged_model)
    assert prompt_of(asked.generates[0], tagged_model).endswith("<|assistant|><think></think>")
    for wrong, param in (
        ({"messages": "x"}, "messages is given"), ({"bos_token": "x"}, "bos_token is given"), ({"a b": 1}, "pattern"),
        ({"a": [1]}, "chat_template_kwargs"), ({f"a{i}": i for i in range(33)}, "at most 32"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=param):
            plan_chat({**chat, "chat_template_kwargs": wrong}, tagged_model)
    with pytest.raises(ApiError, match="no chat template"):
        plan_chat({**chat, "chat_template_kwargs": {"a": 1}}, base_model)
    assert plan_chat({**chat, "chat_template_kwargs": {}}, base_model)


def test_a_response_has_the_prompt_of_the_same_chat(tagged_model: ServedModel) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c1", "name": "node",
         "arguments": '{"next": null}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "node", "arguments": '{"next": null}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "go"},
        {"role": "assistant", "content": "so", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]  # fmt: skip
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    planned = plan_response({"input": items, "instructions": "be brief", "tools": flat}, tagged_model)
    same = chat(tagged_model, *messages, tools=TOOLS)
    assert planned.generates[0].prompt_ids == same.prompt_ids
    assert planned.generates[0].conversation == same.conversation
    text = plan_response({"input": "go"}, tagged_model).generates[0]
    assert text.prompt_ids == chat(tagged_model, {"role": "user", "content": "go"}).prompt_ids


def test_what_a_template_refuses_is_a_400(base_model: ServedModel) -> None:
    with ChatTemplate(TAGGED_TEMPLATE) as template:
        served = dataclasses.replace(base_model, chat_template=template)
        assert prompt_of(chat(served), served) == "<|user|>hi\n<|assistant|>"
        with pytest.raises(ApiError, match="no such thing") as caught:
            chat(served, {"role": "user", "content": "refuse me"})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "chat_rejected", "messages")


def test_special_tokens_in_messages_are_text_unless_they_are_allowed(base_model: ServedModel) -> None:
    """In chats, responses and token counts, with a template and without one; a completion's prompt is the client's own."""
    attack, end = "a<|endoftext|>b", "<|endoftext|>"
    assert base_model.tokenizer is not None
    end_id = base_model.tokenizer.id_of(end)
    assert end_id is not None
    with ChatTemplate("{{ messages[0].content }}<|endoftext|>", specials=base_model.tokenizer.special_texts) as template:
        for served in (base_model, dataclasses.replace(base_model, chat_template=template)):
            allowed = dataclasses.replace(served, obeys_special_tokens=True)
            own = int(served.chat_template is not None)
            for model, count in ((served, own), (allowed, own + 1)):
                ids = chat(model, {"role": "user", "content": attack}).prompt_ids or ()
                assert ids == plan_response({"input": attack}, model).generates[0].prompt_ids
                assert list(ids).count(end_id) == count
                if own:
                    assert list(ids) == tokenize({"messages": [{"role": "user", "content": attack}]}, model)["tokens"]
                    assert ids[-1] == end_id
            assert prompt_of(chat(served, {"role": "user", "content": attack}), served) == attack
    assert list(plan_completion({"prompt": attack}, base_model).generates[0].prompt_ids or ()).count(end_id) == 1


def test_prompts_fill_long_contexts(base_model: ServedModel) -> None:
    """One token of the context is left for an answer; where the context is longer than any prompt, the sentence says so."""

    def num_planned(prompt: str | list[int], max_context: int) -> int:
        served = dataclasses.replace(base_model, max_context=max_context)
        return len(plan_completion({"prompt": prompt, "max_tokens": 1}, served).generates[0].prompt_ids or ())

    ten = "def add(a, b): return a\n"
    for text, most in ((True, 131_072), (False, 131_072), (True, 262_144), (False, 262_144)):
        num_tokens = (most - 1) // 10 * 10
        assert num_planned(ten * (num_tokens // 10) if text else [5] * num_tokens, most) == num_tokens
    with pytest.raises(ApiError, match="the prompt has 131080 tokens, at most 131071 leave room for an answer"):
        num_planned(ten * 13_108, 131_072)
    with pytest.raises(ApiError, match="the prompt has 262150 tokens, at most 262144 are taken in one prompt"):
        num_planned(ten * 26_215, 1_000_000)
    with pytest.raises(ApiError, match="at most 262144 items"):
        num_planned([5] * 262_145, 1_000_000)


# ---- how tokens are chosen ----
def test_defaults_are_the_models_then_openais(base_model: ServedModel) -> None:
    message = chat(base_model)
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)
    assert message.max_tokens == base_model.max_context - len(message.prompt_ids or ())
    assert chat(base_model).sampling.seed != chat(base_model).sampling.seed
    tuned = dataclasses.replace(base_model, defaults=SamplingParams(temperature=0.2, top_k=40))
    assert (chat(tuned).sampling.temperature, chat(tuned).sampling.top_k) == (0.2, 40)
    assert (chat(tuned, temperature=0, top_k=-1).sampling.temperature, chat(tuned, top_k=-1).sampling.top_k) == (0.0, 0)
    assert plan_completion({"prompt": "x"}, base_model).generates[0].max_tokens == 16
    for fields in ({"max_tokens": -1}, {"max_tokens": -1, "max_completion_tokens": -1}, {"max_tokens": 2**31 - 1}):
        unlimited = plan_completion({"prompt": [5, 6], "seed": -1, **fields}, base_model).generates[0]
        assert unlimited.max_tokens == base_model.max_context - 2, "what others call no limit"
    assert plan_completion({"prompt": [5], "max_tokens": -1, "max_completion_tokens": 7}, base_model).generates[0].max_tokens == 7


def test_no_limit_is_refused_where_nobody_here_can_count_the_prompt(base_model: ServedModel) -> None:
    text_only = dataclasses.replace(base_model, tokenizer=None, engine_takes_text=True)
    assert plan_completion({"prompt": "x", "max_tokens": 7}, text_only).generates[0].max_tokens == 7
    with pytest.raises(ApiError, match="the engine alone has the tokenizer; give a number") as caught:
        plan_completion({"prompt": "x", "max_tokens": -1}, text_only)
    assert caught.value.param == "max_tokens"


def test_what_a_request_says_reaches_the_engine(base_model: ServedModel) -> None:
    message = chat(
        base_model, temperature=0.5, top_p=0, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1,
        frequency_penalty=2, seed=7, stop=["a", "b"], logit_bias={"5": -100, "0": 3.5}, ignore_eos=True, min_tokens=3,
        max_tokens=20, max_completion_tokens=10, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    assert message == dataclasses.replace(
        message, stop=("a", "b"), ignore_eos=True, max_tokens=10,
        sampling=SamplingParams(
            temperature=0.5, top_p=1e-6, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1.0,
            frequency_penalty=2.0, seed=7, logit_bias=((5, -100.0), (0, 3.5)), min_tokens=3, logprobs=4,
        ),
    )  # fmt: skip
    assert chat(base_model, stop="x", logprobs=True).stop == ("x",)
    assert chat(base_model, logprobs=True).sampling.logprobs == 0


def test_prompts_of_a_completion(base_model: ServedModel) -> None:
    planned = plan_completion({"prompt": ["a", "b"], "n": 2, "seed": 5}, base_model)
    assert [prompt_of(message, base_model) for message in planned.generates] == ["a", "a", "b", "b"]
    assert [message.sampling.seed for message in planned.generates] == [5, 6, 5, 6]
    assert list(plan_completion({"prompt": [7, 8]}, base_model).generates[0].prompt_ids or ()) == [7, 8]


# ---- conversations ----
def test_each_choice_has_a_conversation_of_its_own(base_model: ServedModel) -> None:
    """So that replicas share them; that of the first one goes on."""
    planned = plan_chat({"messages": [{"role": "user", "content": "a"}], "n": 3}, base_model)
    first, *others = [generate.conversation for generate in planned.generates]
    assert others == [f"{first}.1", f"{first}.2"]


def test_a_chat_keeps_its_conversation_while_it_grows(base_model: ServedModel) -> None:
    first = {"role": "user", "content": "a"}
    more = [first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert chat(base_model, first).conversation == chat(base_model, *more).conversation
    assert chat(base_model, first).conversation != chat(base_model, {"role": "user", "content": "x"}).conversation
    assert chat(base_model, first, user="ann").conversation != chat(base_model, first, user="bob").conversation
    keyed = chat(base_model, first, prompt_cache_key="k").conversation
    assert keyed == plan_response({"input": "other", "prompt_cache_key": "k"}, base_model).generates[0].conversation
    assert plan_completion({"prompt": "x"}, base_model).generates[0].conversation is None


# ---- grammars ----
@pytest.fixture(scope="module")
def compiler(base_model: ServedModel) -> GrammarCompiler:
    assert isinstance(base_model.tokenizer, Tokenizer)
    return GrammarCompiler(base_model.tokenizer, base_model.vocab_size)


def accepts(compiler: GrammarCompiler, schema: str | None, served: ServedModel, text: str) -> bool:
    """Whether `text` is a complete answer."""
    assert schema is not None
    assert served.tokenizer is not None
    matcher = compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, schema))
    for token_id in [*served.tokenizer.encode(text, add_special_tokens=False), served.tokenizer.eos_ids[0]]:
        if not int(matcher.mask()[token_id // 32]) >> token_id % 32 & 1:
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("choice", "text", "is_accepted"),
    [
        ("required", '{"name":"node","arguments":{"next":{"next":null}}}', True),
        ("required", '{"name":"self","arguments":{"$ref":"#/x","me":{"me":{}}}}', True),
        ("required", '{"name":"self","arguments":{"next":null}}', False),
        ("required", '{"name":"nothing","arguments":{}}', True),
        ("required", '{"name":"nothing","arguments":{"a":1}}', False),
        ("required", '{"name":"other","arguments":{}}', False),
        ({"type": "function", "function": {"name": "node"}}, '{"next": {"next": null}}', True),
        ({"type": "function", "function": {"name": "self"}}, '{"me":{"$ref":"#/x"}}', True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "nothing"}}]}}, "{}", True),
    ],
)  # fmt: skip
def test_required_calls_are_enforced(
    base_model: ServedModel, compiler: GrammarCompiler, choice: Any, text: str, is_accepted: bool
) -> None:
    schema = chat(base_model, tools=TOOLS, tool_choice=choice).json_schema
    assert accepts(compiler, schema, base_model, text) == is_accepted


def test_formats_are_enforced(base_model: ServedModel, compiler: GrammarCompiler) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": NODE, "strict": False}}
    flat = {"format": {"type": "json_schema", "name": "n", "schema": NODE}}
    schemas = {
        chat(base_model, response_format=wanted).json_schema,
        plan_response({"input": "x", "text": flat}, base_model).generates[0].json_schema,
        plan_completion({"prompt": "x", "response_format": wanted}, base_model).generates[0].json_schema,
    }
    assert schemas == {json.dumps(NODE, separators=(",", ":"))}
    anything = chat(base_model, response_format={"type": "json_object"}).json_schema
    assert accepts(compiler, anything, base_model, '{"a":[1]}')
    assert not accepts(compiler, anything, base_model, "[1]")
    assert chat(base_model, response_format={"type": "text"}).json_schema is None
    assert chat(base_model, tools=TOOLS).json_schema is None
    assert "const" in (chat(base_model, tools=TOOLS, tool_choice="required", response_format=wanted).json_schema or "")


def test_schemas_have_a_limit(base_model: ServedModel) -> None:
    schema = {"type": "object", "properties": {"x" * 70_000: {}}}
    with pytest.raises(ApiError, match="65536") as caught:
        chat(base_model, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert caught.value.param == "response_format"


def test_a_thought_that_the_prompt_begins_goes_before_a_grammar(base_model: ServedModel) -> None:
    """Also of a vocabulary that has no token for its end; a low effort is no reason to refuse then, a budget is."""
    source = "{{ messages[0].content }}<think>\n{# ends with </think> #}"
    with ChatTemplate(source) as template:
        served = dataclasses.replace(base_model, chat_template=template)
        form = {"response_format": {"type": "json_object"}}
        message = chat(served, **form, reasoning_effort="low")
        assert "</think>" in json.loads(message.grammar or "{}")["lark"]
        assert (message.json_schema, message.thought_end) == (None, None)
        assert chat(served, reasoning_effort="low").thought_tokens is None
        with pytest.raises(ApiError, match="no single token"):
            chat(served, chat_template_kwargs={"thinking_budget": 5})


def test_how_messages_become_a_prompt_is_told(base_model: ServedModel, tagged_model: ServedModel) -> None:
    assert (base_model.chat_style, tagged_model.chat_style) == ("plain", "template")
    assert dataclasses.replace(tagged_model, tokenizer=None).chat_style == "none"
