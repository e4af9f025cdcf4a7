"""Long texts are read in a thread; who asked is told once it has been read."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.rpc.messages import Generate
from kog_dist.workers.text_reader import LONG_TEXT, MAX_ASKERS, TextReader

DEADLINE_S = 30.0


class Book:
    """A text that is read to its end when `may_end` is set."""

    def __init__(self, *prompt: int) -> None:
        self.request = DecodeRequest(prompt, max_tokens=1)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def read(self) -> DecodeRequest:
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return self.request


@pytest.fixture
def reader() -> Iterator[TextReader[str]]:
    reader = TextReader[str]()
    yield reader
    reader.close()


def heard(reader: TextReader[str]) -> list[tuple[str, DecodeRequest | RequestError]]:
    """What there is to tell, once there is something."""
    assert select.select(reader.fds, [], [], DEADLINE_S)[0]
    return reader.answers()


def test_only_long_texts_are_for_it(reader: TextReader[str]) -> None:
    assert reader.is_for(Generate("r", "x" * (LONG_TEXT + 1)))
    assert not reader.is_for(Generate("r", "x" * LONG_TEXT))
    assert not reader.is_for(Generate("r", None, (1,) * (LONG_TEXT + 1)))
    assert reader.fds == [], "no thread before the first"


def test_texts_are_read_one_after_the_other(reader: TextReader[str]) -> None:
    first, second = Book(1), Book(2)
    reader.ask("first", first.read)
    reader.ask("second", second.read)
    assert first.begun.wait(DEADLINE_S)
    assert (reader.askers, reader.answers(), second.begun.is_set()) == (["first", "second"], [], False)
    first.may_end.set()
    assert heard(reader) == [("first", first.request)]
    assert reader.askers == ["second"]
    second.may_end.set()
    assert heard(reader) == [("second", second.request)]
    assert not reader.has_answers()
    assert not select.select(reader.fds, [], [], 0)[0], "nobody is woken again"


def test_a_refusal_is_an_answer_and_a_defect_is_none(reader: TextReader[str]) -> None:
    def refuse() -> DecodeRequest:
        raise RequestError("invalid_text", "no")

    reader.ask("refused", refuse)
    ((asker, refusal),) = heard(reader)
    assert asker == "refused"
    assert isinstance(refusal, RequestError)
    reader.ask("broken", lambda: DecodeRequest(None, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        heard(reader)


def test_who_is_forgotten_hears_nothing_and_others_do(reader: TextReader[str]) -> None:
    books, names = [Book(number) for number in range(3)], ["first", "second", "third"]
    for name, book in zip(names, books, strict=True):
        reader.ask(name, book.read)
    assert books[0].begun.wait(DEADLINE_S)
    reader.forget(names[0])  # while it is read
    reader.forget(names[1])  # before it is
    for book in books:
        book.may_end.set()
    answers = list[tuple[str, DecodeRequest | RequestError]]()
    while not answers:
        answers = heard(reader)
    assert answers == [("third", books[2].request)]
    assert not books[1].begun.is_set()


def test_no_more_than_a_number_wait(reader: TextReader[str]) -> None:
    book = Book(1)
    for number in range(MAX_ASKERS):
        reader.ask(str(number), book.read)
    with pytest.raises(RequestError, match="long texts are waiting"):
        reader.ask("one too many", book.read)
    book.may_end.set()
