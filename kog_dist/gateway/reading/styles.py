"""Which template gets which reader; docs/answers.md has the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import islice
from typing import Final

from kog_dist.gateway.reading.channels import Channels
from kog_dist.gateway.reading.delta_sink import DeltaSink
from kog_dist.gateway.reading.json_calls import CALL_BEGIN, DEEPSEEK_TAGS
from kog_dist.gateway.reading.reader import (
    PYTHON,
    TOOL_CALL,
    TOOL_CALLS,
    AnswerParser,
    AnswerReader,
    PlainText,
    Tagged,
)
from kog_dist.gateway.reading.tags import TagFinder
from kog_dist.gateway.reading.xml_call import FUNCTION, TOOL_CALL_END
from kog_dist.model.tokenizer import CHANNEL_TAGS, Tokenizer
from kog_dist.records import dataclass

_THOUGHT_TAGS: Final = {
    "think": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_CALL_TAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": (TOOL_CALL, TOOL_CALL_END, FUNCTION),
    "qwen3_coder": (TOOL_CALL, TOOL_CALL_END, FUNCTION),
    "llama3_json": (PYTHON, TOOL_CALL, TOOL_CALL_END),
    "mistral": (TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
    "deepseek": DEEPSEEK_TAGS,
}
_TAIL, _FAR = 16, 1 << 14  # tokens of a prompt that are looked at, where a tag is letters and where it is a token


@dataclass(frozen=True, slots=True)
class Style:
    """How the served model writes thoughts and calls: the choices of `--reasoning-parser` and `--tool-parser`. `thinks`: whether
    the template is of a model that does, or somebody says so.
    """

    reasoning: str = "none"
    tools: str = "none"
    thinks: bool = False

    @property
    def has_channels(self) -> bool:
        """Whether answers are messages in channels."""
        return "channels" in (self.reasoning, self.tools)

    @property
    def thought_tags(self) -> tuple[str, str] | None:
        """What stands around a thought."""
        return _THOUGHT_TAGS.get(self.reasoning)

    def begins(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> str:
        """Where an answer to this prompt begins: in a thought (`open`), behind one (`closed`), or it is not known (`free`)."""
        found = self.ends(tokenizer, prompt_ids)
        return "open" if found == "free" and self.reasoning == "deepseek_r1" else found

    def ends(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> str:
        """The same by the last tag of the prompt alone: a template that has the model think, or not think, ends with one."""
        if self.thought_tags is None or tokenizer is None:
            return "free"
        begin, end = (tokenizer.id_of(tag) for tag in self.thought_tags)
        if end is None:
            tail = tokenizer.decode(prompt_ids[-_TAIL:]).rstrip()
            return "open" if tail.endswith(self.thought_tags[0]) else "closed" if tail.endswith(self.thought_tags[1]) else "free"
        near = islice(reversed(prompt_ids), _FAR)
        last = next((token_id for token_id in near if tokenizer.is_added(token_id)), None)
        return "free" if last is None else "open" if last == begin else "closed" if last == end else "free"


@lru_cache(16)
def style_of(source: str | None, *, has_channels: bool, reasoning: str = "auto", tools: str = "auto") -> Style:
    """Of a chat template, None for a model without one. `reasoning` and `tools` overrule it."""
    found = _style_of(source, has_channels=has_channels)
    return Style(
        found.reasoning if reasoning == "auto" else reasoning,
        found.tools if tools == "auto" else tools,
        found.thinks if reasoning == "auto" else True,
    )


def _style_of(source: str | None, *, has_channels: bool) -> Style:
    if source is None:
        return Style()
    if has_channels:
        return Style("channels", "channels", thinks=True)
    if "[THINK]" in source:
        reasoning = "mistral"
    else:  # a template that ends thoughts and never begins one is of a model that always thinks, with or without the tag
        reasoning = "deepseek_r1" if "</think>" in source and "<think>" not in source else "think"
    tools = next(tools for tools, marks in _MARKS if any(mark in source for mark in marks))
    return Style(reasoning, tools, thinks=any(tag in source for tag in ("</think>", "[/THINK]")))


_MARKS: Final = (
    ("mistral", (TOOL_CALLS,)),
    ("deepseek", (CALL_BEGIN,)),
    ("qwen3_coder", (FUNCTION,)),
    ("hermes", (TOOL_CALL,)),
    ("llama3_json", (PYTHON, "<|start_header_id|>")),
    ("hermes", ("",)),
)


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read. `functions`: parameters, by the names that may be called."""

    style: Style = field(default_factory=Style)
    functions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    begins: str = "free"
    has_one_call: bool = False

    def parser(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> AnswerParser:
        """A reader for one choice."""
        style = self.style
        if style.reasoning == style.tools == "none" or (style.reasoning == "none" and not self.functions):
            return PlainText()
        functions = {} if style.tools == "none" else self.functions
        sink = DeltaSink(functions, has_one_call=self.has_one_call, parts_thoughts=style.reasoning != "none")
        if style.has_channels:
            channels = Channels(sink, is_open=self.begins == "open")
            return AnswerReader(sink, channels.run(), TagFinder(CHANNEL_TAGS, tokenizer, prompt_ids))
        thought_tags = style.thought_tags
        machine = Tagged(
            sink,
            thought_tags,
            is_open=self.begins == "open",
            thinks=style.thinks and self.begins == "free",
            is_loose=style.tools == "llama3_json" and bool(functions),
            is_bare=style.tools == "qwen3_coder",
        )
        names = [*(thought_tags or ()), *(_CALL_TAGS.get(style.tools, ()) if functions else ())]
        return AnswerReader(sink, machine.run(), TagFinder(names, tokenizer, prompt_ids))
