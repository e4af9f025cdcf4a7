"""The reader of answers: thoughts first, then text and calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, Protocol

from kog_dist.gateway.reading.delta_sink import DeltaSink
from kog_dist.gateway.reading.deltas import Delta, TextDelta
from kog_dist.gateway.reading.json_calls import (
    CALL_BEGIN,
    CALLS_BEGIN,
    DEEPSEEK_TAGS,
    DeepseekCalls,
    JsonCalls,
    MistralCalls,
    blanks,
    deepseek_name,
    python_call,
)
from kog_dist.gateway.reading.json_text import BLANKS
from kog_dist.gateway.reading.symbols import DEAF, Machine, quoted, shown
from kog_dist.gateway.reading.tags import END, Symbol, Tag, TagFinder
from kog_dist.gateway.reading.xml_call import FUNCTION, TOOL_CALL_END, XmlCall

TOOL_CALL: Final = "<tool_call>"
PYTHON: Final = "<|python_tag|>"
TOOL_CALLS: Final = "[TOOL_CALLS]"


class AnswerParser(Protocol):
    """Reads one choice's answer."""

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens belong to thoughts."""

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""

    @property
    def is_enough(self) -> bool:
        """Whether the rest of the answer is of no interest."""

    def push(self, token_ids: Sequence[int], text: str) -> Sequence[Delta]:
        """What is certain with these tokens and this text, which may lag behind them."""

    def finish(self) -> Sequence[Delta]:
        """What was held back, when the answer ends."""


class PlainText:
    """An answer that is nothing but text."""

    num_calls = num_reasoning_tokens = 0
    is_enough = False

    def push(self, token_ids: Sequence[int], text: str) -> Sequence[Delta]:
        """The text as it is."""
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        """Nothing is held back."""
        return ()


class AnswerReader:
    """Reads one answer by its symbols; `machine` is the outermost one, and ends with the answer."""

    def __init__(self, sink: DeltaSink, machine: Generator[None, Symbol, None], tags: TagFinder) -> None:
        self._sink, self._machine, self._tags = sink, machine, tags
        self._is_over = False
        next(self._machine)

    @property
    def num_calls(self) -> int:
        """See AnswerParser."""
        return self._sink.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """See AnswerParser."""
        return self._sink.num_reasoning_tokens

    @property
    def is_enough(self) -> bool:
        """See AnswerParser."""
        return self._sink.is_enough

    def push(self, token_ids: Sequence[int], text: str) -> Sequence[Delta]:
        """See AnswerParser."""
        self._sink.num_tokens += len(token_ids)
        self._send(self._tags.push(token_ids, text))
        return self._sink.take()

    def finish(self) -> Sequence[Delta]:
        """See AnswerParser."""
        if not self._is_over:
            self._send(self._tags.finish())
        self._sink.end()
        return self._sink.take()

    def _send(self, found: Sequence[Symbol]) -> None:
        send = self._machine.send
        try:
            for symbol in found:
                if isinstance(symbol, Tag):
                    send(symbol)
                    continue
                for place, character in enumerate(symbol):
                    if self._sink.direct is not None:
                        self._sink.direct(symbol[place:])
                        break
                    send(character)
        except StopIteration:
            self._is_over = True


class Tagged:
    """The machine of all families but gpt-oss: thoughts between two tags, calls behind a tag or, loosely, in bare JSON."""

    def __init__(
        self,
        sink: DeltaSink,
        thought_tags: tuple[str, str] | None,
        *,
        is_open: bool,
        thinks: bool,
        is_loose: bool,
        is_bare: bool,
    ) -> None:
        """`is_open`: the prompt has begun a thought. `thinks`: the model begins with one, tagged or not. `is_loose`: an answer
        that begins with the JSON of a known call is one. `is_bare`: so is `<function=NAME>` without a tag around it.
        """
        self._sink, self._thought_tags, self._is_loose = sink, thought_tags, is_loose
        self._is_open, self._thinks = is_open, thinks
        self._readers: Mapping[str, Callable[[Tag], Machine]] = {
            TOOL_CALL: self._tool_call,
            **({FUNCTION: self._function} if is_bare else {}),
            TOOL_CALLS: self._mistral,
            PYTHON: self._python,
            **dict.fromkeys((tag for tag in DEEPSEEK_TAGS if deepseek_name(tag) in (CALLS_BEGIN, CALL_BEGIN)), self._deepseek),
        }

    def run(self) -> Generator[None, Symbol, None]:
        """All of an answer."""
        if self._is_open:
            self._sink.think(0)
        symbol: Symbol = yield
        if self._is_open:
            symbol = yield from self._thought(symbol)
        while symbol is not END:
            if isinstance(symbol, Tag):
                self._sink.direct = None
                symbol = yield from self._tag(symbol)
            elif symbol == "{" and self._is_loose and self._sink.is_fresh and not self._sink.has_text:
                symbol = yield from self._loose(symbol)
            else:
                self._sink.text(symbol)
                self._sink.direct = None if self._sink.is_fresh else self._sink.text
                symbol = yield

    def _tag(self, tag: Tag) -> Machine:
        sink = self._sink
        if self._thought_tags is not None and tag.name == self._thought_tags[0]:
            is_first = self._thinks and not sink.has_thought and not sink.num_calls and tag.num_before is not None
            if is_first or (sink.is_fresh and not sink.has_text):  # else it is a quotation
                sink.think(tag.num_before if tag.num_before is not None else sink.num_tokens)
                return (yield from self._thought((yield)))
        elif self._thought_tags is not None and tag.name == self._thought_tags[1]:
            if sink.has_text and self._thinks and not sink.has_thought and not sink.num_calls:
                sink.was_thought()
                return (yield)
            if sink.is_fresh:
                sink.edge()
                return (yield)
        reader = self._readers.get(tag.name) if sink.functions else None
        if reader is None:
            sink.text(tag.text)
            return (yield)
        return (yield from reader(tag))

    # ---- thoughts ----
    def _thought(self, symbol: Symbol) -> Machine:
        """From behind the tag that begins it, to behind the one that ends it."""
        assert self._thought_tags is not None, "there are none otherwise"
        begin, end = self._thought_tags
        sink = self._sink
        sink.direct = sink.reason
        while symbol is not END and not (isinstance(symbol, Tag) and symbol.name == end):
            if not (isinstance(symbol, Tag) and symbol.name == begin and sink.is_fresh):
                sink.reason(shown(symbol))
            symbol = yield
        sink.stop_thinking(symbol)
        sink.direct = None
        return symbol if symbol is END else (yield)

    # ---- calls ----
    def _tool_call(self, tag: Tag) -> Machine:
        """Hermes' JSON or Qwen3-Coder's XML, up to behind `</tool_call>`."""
        read = [tag.text]
        symbol = yield from blanks((yield), read)
        if symbol in ("{", "["):
            calls = JsonCalls(self._sink, "".join(read))
            symbol = yield from calls.one_or_list(symbol)
            has_call = calls.num_calls > 0
        else:
            xml = XmlCall(self._sink, "".join(read) + FUNCTION)
            is_tag = isinstance(symbol, Tag) and symbol.name == FUNCTION
            if is_tag:
                symbol = yield from xml.read((yield))
            else:
                self._sink.text("".join(read))
            has_call = xml.is_call
        return (yield from self._behind_call(symbol)) if has_call else symbol

    def _function(self, tag: Tag) -> Machine:
        """Qwen3-Coder now and then forgets the tag around it. What is not on a line of its own, or is behind the letters of that
        tag, is a quotation.
        """
        before = self._sink.tail.rstrip(" \t")
        if (before and not before.endswith("\n")) or before.rstrip(BLANKS).endswith(TOOL_CALL):
            self._sink.text(tag.text)
            symbol = yield
            return (yield from quoted(self._sink, XmlCall(DEAF, "").read(symbol), symbol))
        xml = XmlCall(self._sink, tag.text)
        symbol = yield from xml.read((yield))
        return (yield from self._behind_call(symbol)) if xml.is_call else symbol

    def _behind_call(self, symbol: Symbol) -> Machine:
        read: list[str] = []
        symbol = yield from blanks(symbol, read)
        if isinstance(symbol, Tag) and symbol.name == TOOL_CALL_END:
            return (yield)
        self._sink.text("".join(read))
        return symbol

    def _mistral(self, tag: Tag) -> Machine:
        return (yield from MistralCalls(self._sink, tag.text).read((yield)))

    def _deepseek(self, tag: Tag) -> Machine:
        return (yield from DeepseekCalls(self._sink).read(tag))

    def _python(self, tag: Tag) -> Machine:
        """Behind Llama's tag: JSON, or one of the calls that it was trained with."""
        read = [tag.text]
        symbol = yield from blanks((yield), read)
        if symbol == "{":
            return (yield from self._loose(symbol, "".join(read)))
        return (yield from python_call(self._sink, "".join(read), symbol))

    def _loose(self, symbol: Symbol, before: str = "") -> Machine:
        """Llama's `{"name": ..., "parameters": ...}`, several with blanks or semicolons between them."""
        sink = self._sink
        while symbol == "{":
            calls = JsonCalls(sink, before, is_loose=True)
            symbol = yield from calls.one(symbol)
            if not calls.num_calls:
                return symbol
            read: list[str] = []
            symbol = yield from blanks(symbol, read)
            if symbol == ";":
                read.append(";")
                symbol = yield from blanks((yield), read)
            before = "".join(read)
            if symbol != "{" and symbol is not END:
                sink.text(before)
        return symbol
