"""An engine on paper: the events of an answer with a given text, cut anywhere, and readers of what a reply makes of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kog_dist.errors import RequestError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.model.chat_template import RenderedChat
from kog_dist.model.template_sandbox import RaisedByTemplate, make_environment, render_marked
from kog_dist.model.template_trials import TemplateFacts
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import Accepted, Done, FinishReason, Generate, PrefillProgress, PromptLogprobs, Tokens

TAGGED_TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>' ~ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}{% endfor %}
{%- if message.content == 'refuse me' %}{{ raise_exception('no such thing') }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}
"""


CHANNELS_TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' ~ (tools | length) ~ ' tools<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}{% endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson ~ '<|call|>' }}
{%- else %}{{ '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}{% endif %}
{%- endfor %}
{{- '<|start|>assistant' }}
"""


class TemplateTwin:
    """A chat template rendered in this process."""

    def __init__(self, source: str) -> None:
        self.source = self.tool_source = source
        self._environment = make_environment()
        self._template = self._environment.from_string(source)
        self.facts = TemplateFacts(shows_tools="tools" in source, variables=frozenset({"reasoning_effort"}))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        given = {**(variables or {}), "messages": list(messages), "tools": tools}
        request = {"given": given, "own": {"add_generation_prompt": add_generation_prompt}}
        rules = {"specials": (), "everything": False, "max_characters": 1 << 20, "source": self.source}
        try:
            text, runs = render_marked(self._environment, self._template, request, rules)
            return RenderedChat(text, runs)
        except RaisedByTemplate as error:
            raise RequestError("chat_rejected", f"the chat template refuses the conversation: {error}") from None


def events_of(
    message: Generate,
    pieces: Sequence[str],
    finish: FinishReason = FinishReason.STOP,
    num_cached: int = 0,
    tokenizer: Tokenizer | None = None,
) -> list[Any]:
    """Accepted, a little prefill, one event with one token for each piece, and the end token with Done.

    With a tokenizer an event has the tokens of its piece, and the text of those.
    """
    num_prompt = len(message.prompt_ids or ())
    assert message.max_tokens is not None
    events: list[Any] = [
        Accepted(message.request_id, 0, num_prompt, message.max_tokens),
        PrefillProgress(message.request_id, 1, num_prompt),
    ]
    num_top = message.sampling.logprobs or 0
    if message.prompt_logprobs:
        top = tuple(range(num_top)), tuple(-0.25 * i for i in range(num_top))
        ids = tuple(message.prompt_ids or ())
        events += [PromptLogprobs(message.request_id, idx, (ids[idx],), (-0.125 * idx,), *top) for idx in range(1, len(ids))]
    num_tokens = 0
    for idx, piece in enumerate(pieces):
        if tokenizer is not None:
            token_ids = tuple(tokenizer.encode(piece, add_special_tokens=False))
            events.append(Tokens(message.request_id, num_tokens, token_ids, tokenizer.decode(token_ids), ()))
            num_tokens += len(token_ids)
            continue
        has = message.sampling.logprobs is not None
        events.append(
            Tokens(
                message.request_id, idx, (300 + idx % 50,), piece, (), (),
                logprobs=(-0.5 - idx,) if has else (),
                top_ids=tuple(range(num_top)), top_logprobs=tuple(-0.25 * i for i in range(num_top)),
            )
        )  # fmt: skip
    events.append(
        Done(
            message.request_id, finish, num_prompt, num_tokens or len(pieces), queue_s=0.5, total_s=2.0,
            prefill_s=0.25, ttft_s=0.75, itl_p50_s=0.01, itl_p99_s=0.02, num_cached_tokens=num_cached,
            tokens_per_s=100.0 if len(pieces) > 1 else None,
        )
    )  # fmt: skip
    return events


def play(
    planned: Planned,
    pieces: Sequence[str],
    finish: FinishReason = FinishReason.STOP,
    num_cached: int = 0,
    tokenizer: Tokenizer | None = None,
) -> bytes:
    """Everything that a stream says when every choice has this answer; choices are interleaved."""
    scripts = [events_of(message, pieces, finish, num_cached, tokenizer) for message in planned.generates]
    said = b""
    for events in zip(*scripts, strict=True):
        for choice, event in enumerate(events):
            said += planned.reply.on_event(choice, event)
    return said + planned.reply.end()


def data_of(stream: bytes) -> list[Any]:
    """The JSON of each event; "[DONE]" stays text, comments are left out. Checks the framing."""
    assert stream == b"" or stream.endswith(b"\n\n")
    found: list[Any] = []
    for frame in stream.decode("ascii").split("\n\n")[:-1]:
        if frame.startswith(": ") and "\n" not in frame:
            continue
        *names, line = frame.split("\n")
        assert line.startswith("data: ")
        content = line.removeprefix("data: ")
        found.append(content if content == "[DONE]" else json.loads(content))
        for name in names:
            assert name == f"event: {found[-1]['type']}"
    return found


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in pieces, cut at these places (any numbers)."""
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)] or [""]
