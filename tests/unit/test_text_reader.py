"""Long texts are read in a thread, one at a time, of clients in turn; who asked is told once it has been read."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import until
from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import RequestError
from kog_dist.rpc.messages import Generate
from kog_dist.workers.coordinator.text_reader import LONG_TEXT, TextReader

DEADLINE_S = 30.0
A, B = b"a", b"b"


class Book:
    """A text that is read to its end when `may_end` is set."""

    def __init__(self, number: int) -> None:
        self.request = DecodeRequest((number,), max_tokens=1)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def read(self) -> DecodeRequest:
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)
        return self.request


@pytest.fixture
def reader() -> Iterator[TextReader[str]]:
    reader = TextReader[str]()
    reader.start()
    yield reader
    reader.close()


def heard(reader: TextReader[str]) -> tuple[str, DecodeRequest | BaseException] | None:
    """What there is to tell, once a text has been read."""
    while not reader.has_answer():
        assert select.select(reader.fds, [], [], DEADLINE_S)[0]
    return reader.answer()


def test_only_long_texts_are_for_it(reader: TextReader[str]) -> None:
    assert reader.is_for(Generate("r", "x" * (LONG_TEXT + 1)))
    assert not reader.is_for(Generate("r", "x" * LONG_TEXT))
    assert not reader.is_for(Generate("r", None, (1,) * (LONG_TEXT + 1)))


def test_clients_take_turns(reader: TextReader[str]) -> None:
    names = ["a1", "a2", "a3", "b1", "b2"]
    books = {name: Book(number) for number, name in enumerate(names)}
    for name in names:
        reader.ask(name, A if name[0] == "a" else B, books[name].read)
    order = ["a1", "a2", "b1", "a3", "b2"]  # the second one stood there alone when the first began
    assert books["a1"].begun.wait(DEADLINE_S)
    for place, name in enumerate(order):
        assert reader.askers == order[place:]
        assert not reader.has_answer()
        assert [other for other in names if books[other].begun.is_set()] == sorted(order[: place + 1])
        books[name].may_end.set()
        assert heard(reader) == (name, books[name].request)
        assert place == 4 or books[order[place + 1]].begun.wait(DEADLINE_S)
    assert not select.select(reader.fds, [], [], 0)[0], "nobody is woken again"


def test_what_it_raises_is_an_answer(reader: TextReader[str]) -> None:
    def refuse() -> DecodeRequest:
        raise RequestError("invalid_text", "no")

    reader.ask("refused", A, refuse)
    reader.ask("broken", A, lambda: DecodeRequest(None, 1))  # type: ignore[arg-type]
    kinds = [type(answer[1]) for answer in (heard(reader), heard(reader)) if answer is not None]
    assert kinds == [RequestError, TypeError]


def test_who_is_forgotten_hears_nothing_and_others_do(reader: TextReader[str]) -> None:
    books, names = [Book(number) for number in range(3)], ["first", "second", "third"]
    for name, book in zip(names, books, strict=True):
        reader.ask(name, A, book.read)
    assert books[0].begun.wait(DEADLINE_S)
    reader.forget(names[0])  # while it is read
    reader.forget(names[1])  # before it is
    assert reader.askers == ["third"]
    for book in books:
        book.may_end.set()
    assert [heard(reader), heard(reader)] == [None, ("third", books[2].request)]
    assert not books[1].begun.is_set()


def test_it_closes_while_it_reads() -> None:
    reader, book = TextReader[str](), Book(1)
    reader.start()
    reader.ask("first", A, book.read)
    assert book.begun.wait(DEADLINE_S)
    thread = next(thread for thread in threading.enumerate() if thread.name == "text-reader")
    reader.close()
    book.may_end.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


class Refused:
    """A text that a model refuses."""

    def read(self) -> DecodeRequest:
        try:
            raise ValueError("the library's")
        except ValueError:
            raise RequestError("context_length_exceeded", "no") from None


def test_nobody_holds_a_text_that_has_been_read(reader: TextReader[str]) -> None:
    """Neither the thread while it waits for another one, nor the answer by its traceback; without collecting cycles."""
    text = Refused()
    is_alive = weakref.ref(text)
    reader.ask("refused", A, text.read)
    del text
    answer = heard(reader)
    assert answer is not None
    assert isinstance(answer[1], RequestError)
    until(lambda: is_alive() is None, DEADLINE_S, lambda: "it is still held")


def test_what_a_text_took_goes_back_to_the_kernel(reader: TextReader[str]) -> None:
    """Although some of it stays: the C library keeps what is below that."""
    kept: list[bytes] = []

    def read() -> DecodeRequest:
        kept.extend([bytes(3000) for _ in range(10_000)][::100])
        return DecodeRequest((1,), max_tokens=1)

    before = resident_mb()
    reader.ask("long", A, read)
    assert heard(reader) is not None
    until(lambda: resident_mb() < before + 10, DEADLINE_S, lambda: f"{resident_mb() - before:.1f} MB of 30 have stayed")
    assert len(kept) == 100


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
