"""An answer in pieces: first bytes say how it is read and cut, the rest is its text; the cut makes no difference."""

from __future__ import annotations

from tests.unit.gateway_reading.readings import parser, said

FORMS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "channels")
BEGINNINGS = ("free", "open", "closed")


def one_input(data: bytes) -> None:
    """The same thoughts, content and calls however the text is cut; arguments that are JSON objects; no call in a thought."""
    if len(data) < 4:
        return
    form, begins, step = FORMS[data[0] % len(FORMS)], BEGINNINGS[data[1] % 3], 1 + data[2] % 7
    reasoning = ("channels" if form == "channels" else ("think", "deepseek_r1", "mistral")[data[3] % 3], form)
    text = data[4:].decode("utf-8", "replace")
    whole = said(parser(*reasoning, begins), [text])
    pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
    assert said(parser(*reasoning, begins), pieces) == whole
    if form != "channels":
        thought = text.replace("</think>", "").replace("[/THINK]", "")
        assert {kind for kind, _ in said(parser(*reasoning, "open"), [thought])} <= {"reasoning"}
