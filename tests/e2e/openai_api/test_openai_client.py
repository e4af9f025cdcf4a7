"""The official openai package against the service of the demo model: chats, completions, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

MODEL = "default"
TEXT = "def add(a, b):"
MESSAGES: Any = [{"role": "user", "content": TEXT}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
UNITS = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "set_unit", "parameters": UNITS}},
]
FLAT_TOOLS: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
GREEDY: Any = {"model": MODEL, "temperature": 0.0}


class Verdict(BaseModel):
    """What a parsed answer becomes."""

    is_python: bool
    grade: Literal["a", "b", "c"]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


# ---- models, text ----
def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == client.models.retrieve("default").id == client.models.retrieve(card.id).id


def test_all_three_apis_give_the_same_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=24)
    completion = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=24)
    response = client.responses.create(**GREEDY, input=TEXT, max_output_tokens=24)
    assert chat.choices[0].message.content == completion.choices[0].text == response.output_text
    assert (chat.choices[0].finish_reason, completion.choices[0].finish_reason, response.status) == (
        "length",
        "length",
        "incomplete",
    )
    assert chat.usage is not None
    assert completion.usage is not None
    assert response.usage is not None
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens == response.usage.input_tokens > 0
    assert chat.usage.completion_tokens == completion.usage.completion_tokens == response.usage.output_tokens == 24
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == completion.usage.prompt_tokens - 1  # by the chat before it
    timings: Any = chat.model_extra["timings"] if chat.model_extra else {}
    assert timings["predicted_n"] == 24
    assert timings["predicted_per_second"] > 0


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=24).choices[0].text
    with client.completions.create(**GREEDY, prompt=TEXT, max_tokens=24, stream=True) as completion:
        assert "".join(chunk.choices[0].text for chunk in completion) == whole
    with client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=24, stream=True, stream_options={"include_usage": True}
    ) as chat:
        chunks = list(chat)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    with client.responses.create(**GREEDY, input=TEXT, max_output_tokens=24, stream=True) as response:
        events = list(response)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stop_seed_and_n(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=48).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    stopped = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=48, stop=[stop, "\x00\x00"]).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", whole[: whole.index(stop)])
    warm: Any = {"model": MODEL, "temperature": 1.0}
    several = client.chat.completions.create(**warm, messages=MESSAGES, max_tokens=16, seed=11, n=3)
    again = client.chat.completions.create(**warm, messages=MESSAGES, max_tokens=16, seed=11)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts[0] == again.choices[0].message.content
    assert len(set(texts)) == 3
    two = client.completions.create(**GREEDY, prompt=["def ", "class "], max_tokens=4)
    assert [choice.index for choice in two.choices] == [0, 1]


def test_token_ids_and_extras_of_vllm(client: openai.OpenAI) -> None:
    extras = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 4}
    answer = client.completions.create(model=MODEL, prompt=[[5, 6, 7]], max_tokens=8, logit_bias={"0": -100}, extra_body=extras)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == chat.choices[0].message.content
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy takes the best one
    legacy = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=6, logprobs=2).choices[0]
    assert legacy.logprobs is not None
    assert legacy.logprobs.token_logprobs == [entry.logprob for entry in logprobs.content]
    assert legacy.logprobs.tokens is not None
    assert "".join(legacy.logprobs.tokens) == legacy.text


# ---- the prompt's own log-probabilities ----
def test_a_text_has_the_log_probabilities_with_which_it_was_generated(client: openai.OpenAI) -> None:
    """To the bit: on CPU ranks a token that a mask forces is computed like one that was chosen."""
    answer = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=24, logprobs=2).choices[0]
    whole = client.completions.create(**GREEDY, prompt=TEXT + answer.text, max_tokens=1, logprobs=2, echo=True).choices[0]
    assert answer.logprobs is not None
    assert whole.logprobs is not None
    assert whole.text.startswith(TEXT + answer.text)
    tokens, expected = whole.logprobs.tokens or [], answer.logprobs.tokens or []
    begin = len(tokens) - 1 - len(expected)
    assert tokens[begin:-1] == expected
    assert (whole.logprobs.token_logprobs or [])[begin:-1] == answer.logprobs.token_logprobs
    assert (whole.logprobs.top_logprobs or [])[begin:-1] == answer.logprobs.top_logprobs
    assert (whole.logprobs.token_logprobs or [0.0])[0] is None


def test_a_batch_of_prompts_is_scored_as_lm_eval_asks_for_it(client: openai.OpenAI) -> None:
    body: Any = {**GREEDY, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    alone = [client.completions.create(**body, prompt=[ids]).choices[0] for ids in ([5, 6, 7], [8, 9])]
    together = client.completions.create(**body, prompt=[[5, 6, 7], [8, 9]])
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [choice.logprobs for choice in together.choices] == [choice.logprobs for choice in alone]
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (5, 2)
    with client.completions.create(**body, prompt=[[5, 6, 7], [8, 9]], stream=True) as chunks:
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [choice.text for choice in together.choices]


def test_an_answer_begins_the_same_behind_an_echo(client: openai.OpenAI) -> None:
    plain = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=16).choices[0]
    scored = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=16, logprobs=0, echo=True)
    assert scored.choices[0].text == TEXT + plain.text
    nothing = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=0, logprobs=0, echo=True)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == (TEXT, "length")
    assert nothing.usage is not None
    assert nothing.usage.completion_tokens == 0
    assert client.completions.create(**GREEDY, prompt=TEXT, max_tokens=16, echo=True).choices[0].text == TEXT + plain.text


# ---- structure ----
def test_answers_are_parsed_into_models(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(**GREEDY, messages=MESSAGES, response_format=Verdict, max_tokens=100)
    assert isinstance(chat.choices[0].message.parsed, Verdict)
    response = client.responses.parse(**GREEDY, input=TEXT, text_format=Verdict, max_output_tokens=100)
    assert response.output_parsed == chat.choices[0].message.parsed
    with client.chat.completions.stream(**GREEDY, messages=MESSAGES, response_format=Verdict, max_tokens=100) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == chat.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_unit"}}])
def test_required_tools_are_called(client: openai.OpenAI, choice: Any) -> None:
    body: Any = {**GREEDY, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert arguments in ({"city": "Paris"}, {"city": "Oslo"}, {"unit": "C"}, {"unit": "F"})
    assert choice == "required" or call.function.name == "set_unit"
    with client.chat.completions.stream(**body) as stream:
        stream.until_done()
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    (streamed,) = calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    history = [*MESSAGES, answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(**GREEDY, messages=history, tools=TOOLS, max_tokens=4).choices[0].message.content


def test_a_response_calls_tools_and_goes_on(client: openai.OpenAI) -> None:
    body: Any = {**GREEDY, "tools": FLAT_TOOLS, "tool_choice": "required", "max_output_tokens": 100}
    response = client.responses.create(**body, input=TEXT)
    (call,) = response.output
    assert call.type == "function_call"
    json.loads(call.arguments)
    with client.responses.stream(**body, input=TEXT) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call.arguments
        assert stream.get_final_response().output[0].type == "function_call"
    items: Any = [{"role": "user", "content": TEXT}, call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    assert client.responses.create(**GREEDY, input=items, max_output_tokens=4).output_text


def test_tools_are_text_where_the_model_has_no_way_to_call_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=MESSAGES, tools=TOOLS, max_tokens=8).choices[0]
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "length")


# ---- errors ----
@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"temperature": 300}, openai.BadRequestError, None, "temperature"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter", "temprature"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, None, "logit_bias"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            openai.BadRequestError, "invalid_constraint", None,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_packages_own(
    client: openai.OpenAI,
    stream: bool,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": MESSAGES, "stream": stream, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert client.completions.create(**GREEDY, prompt=TEXT, max_tokens=1).choices[0].text is not None


def test_a_response_of_an_earlier_one_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
        client.responses.create(**GREEDY, input=TEXT, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
