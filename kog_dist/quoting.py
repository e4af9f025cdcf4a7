"""Text from outside as it may appear on a terminal or in a log: nothing in it acts, and its length is bounded."""

from __future__ import annotations

import json
import re

MAX_MESSAGE_CHARS = 1500
# Control characters but the line feed, what turns the direction of text, line ends that are none of ours, lone surrogates.
_ACTS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_ACTING_BYTES = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")  # UTF-8; a tab harms no log
_CUT = " ... (cut)"


def escaped(text: str) -> str:
    """The text with everything escaped that would act on a terminal; its lines stay."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)


class Verbatim(str):
    """Text that streams of a command pass on as it is: our own codes for a terminal, with what they surround `quoted` or
    harmless, and answers of a model for a file or a pipe. Every other text is `quoted` where it leaves the process, wherever
    it came from.
    """

    __slots__ = ()


def json_text(value: object) -> str:
    """JSON of ASCII in which nothing acts, so that it is the same `quoted`."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def quoted(text: str) -> str:
    """What a stream writes: `escaped` but for tabs, unless it is Verbatim."""
    if isinstance(text, Verbatim) or _ACTS.search(text) is None:
        return text
    return "\t".join(map(escaped, text.split("\t")))


def escaped_bytes(chunk: bytes) -> bytes:
    """The same for what another process has printed."""
    return _ACTING_BYTES.sub(lambda found: ascii(found[0])[2:-1].encode(), chunk)


def printable(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """A message with everything escaped that would act on a terminal; lines after the first are indented, the end may be cut."""
    shown = escaped(text.rstrip("\n")[: most + 1]).replace("\n", "\n  ")
    return shown if len(shown) <= most else f"{shown[: most - len(_CUT)]}{_CUT}"


def short(untrusted: object, most: int = 80) -> str:
    """A value from outside inside a message: ASCII, quoted, on one line, bounded."""
    try:
        text = ascii(untrusted[: most + 1] if isinstance(untrusted, str | bytes | list | tuple) else untrusted)
    except RecursionError:
        text = f"a {type(untrusted).__name__} nested too deeply"
    return text if len(text) <= most else f"{text[: most - 4]}..."
