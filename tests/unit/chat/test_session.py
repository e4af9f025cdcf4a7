"""Turns of `kog-chat` without an engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest

from kog_dist.chat.conversation import Conversation
from kog_dist.chat.screen import Screen
from kog_dist.chat.service import ChatService, Piece, ServiceFacts
from kog_dist.chat.session import ChatSession
from kog_dist.chat.wire import ServiceUrl
from tests.unit.chat.typing_user import types


class SaidService(ChatService):
    """Answers with a text that is given."""

    text = ""

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        yield Piece(self.text)


class SilentScreen(Screen):
    """Shows nothing."""

    def say(self, text: str) -> None:
        pass

    def _out(self, text: str) -> None:
        pass


@pytest.mark.parametrize(("text", "ends"), [("hi", "\n"), ("hi\n", ""), ("", ""), ("\n", ""), ("a\nb", "\n")])
def test_an_answer_ends_its_line_once(
    text: str, ends: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    types(monkeypatch, "hi")
    monkeypatch.setattr(SaidService, "text", text)
    chat = ChatSession(SaidService(ServiceUrl.parse("http://127.0.0.1:9")), ServiceFacts("m"), Conversation("m"), SilentScreen())
    assert chat.talk() == 0
    assert capsys.readouterr().out == ends
