"""Ctrl-C in `kog-chat`: what it ends, and what it leaves whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from kog_dist.chat.conversation import Conversation
from kog_dist.chat.interrupts import Interrupts
from kog_dist.chat.screen import Screen
from kog_dist.chat.service import ChatService, Piece, ServiceFacts
from kog_dist.chat.session import ChatSession
from kog_dist.chat.wire import ServiceUrl
from tests.unit.chat.typing_user import types


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def ended_by(clean_up: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        clean_up()


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts()


def test_what_may_be_ended_is_ended_once(interrupts: Interrupts) -> None:
    with interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.may_end(), ended_by(press):  # what cleans up is not ended, too
            press()
        with pytest.raises(KeyboardInterrupt), interrupts.may_end():
            pytest.fail("the second one has come before")
        with interrupts.may_end():
            pass


def test_a_ctrl_c_between_two_things_ends_the_next_one(interrupts: Interrupts) -> None:
    with interrupts:
        with interrupts.may_end():
            pass
        press()
        with pytest.raises(KeyboardInterrupt), interrupts.may_end():
            pytest.fail("it was pressed before")


def test_signals_mean_what_they_did_before_once_it_is_left(interrupts: Interrupts) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGALRM)]
    with interrupts, interrupts.may_end():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class PressedService(ChatService):
    """Ctrl-C is pressed in the middle of its answer."""

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        yield Piece("half")
        press()
        yield Piece(" and more")


class PressedScreen(Screen):
    """Ctrl-C is pressed again while the terminal is put in order after an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.said: list[str] = []
        self.is_terminal = True

    def flush(self) -> None:
        super().flush()
        if self.written[1:]:
            press()

    def say(self, text: str) -> None:
        self.said.append(text)

    def _out(self, text: str) -> None:
        self.written.append(text)


def test_two_of_them_leave_terminal_and_conversation_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, "hi")
    monkeypatch.setenv("LINES", "24")
    screen, conversation = PressedScreen(), Conversation("m")
    chat = ChatSession(PressedService(ServiceUrl.parse("http://127.0.0.1:9")), ServiceFacts("m"), conversation, screen)
    assert chat.talk() == 0
    assert [message["content"] for message in conversation.messages] == ["hi", "half"]
    assert "\x1b[r" in screen.written[-1], "all rows of the terminal scroll again"
    assert "[cancelled]" in screen.said
    assert screen.said[-2:] == ["\n(Ctrl-D ends kog-chat)", ""], "the second one has come to the next prompt"
