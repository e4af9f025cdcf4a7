"""Texts that begin like earlier ones have the ids that the library gives, and only what is new in them is encoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kog_dist.errors import RequestError
from kog_dist.model import kept_texts
from kog_dist.model.kept_texts import KeptTexts
from kog_dist.model.tokenizer import Tokenizer
from tests.unit.test_tokenizer import every_kind, library_like, tokenizer_like

TAGS = {"<a>": 1000, "<a>>": 1001, "<b>": 1002}
PARTS = ["<|begin|>", "<|end|>", "<|größer|>", "<tool €>", "<s>", "</s>", "<unk>", *"<| \néx", "<|", "def ", "日本", ""]


class Encoder:
    """A token for each character, and one for each tag; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        if "\ud800" in text:
            raise RequestError("invalid_text", "no Unicode")
        ids = []
        while text:
            tag = max((tag for tag in TAGS if text.startswith(tag)), key=len, default="")
            ids.append(TAGS[tag] if tag else ord(text[0]))
            text = text[len(tag) or 1 :]
        return ids


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "LEAST_LENGTH", 1)


@every_kind
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), min_size=1, max_size=6), shared=st.integers(0, 8)
)
def test_ids_are_those_of_the_library(kind: str, texts: list[str], shared: int) -> None:
    whole = tokenizer_like(kind)
    tokenizer = Tokenizer(library_like(kind).to_str()) if shared == 0 else whole  # with what other examples left, and without
    for text in (*texts, *(texts[0][:shared] + text for text in texts), *texts):
        assert tokenizer.encode_chat(text) == whole.encode(text, add_special_tokens=False)


def test_a_conversation_that_goes_on_has_its_new_turns_encoded() -> None:
    encoder = Encoder()
    kept, text = KeptTexts(encoder, TAGS), "<a>system<b>question<a>>"
    assert kept.encode(text) == Encoder()(text)
    assert kept.encode(text) == Encoder()(text)
    longer = text + "answer<b>next"
    assert kept.encode(longer) == Encoder()(longer)
    assert encoder.asked == [text, "<a>>answer<b>next"]
    other = "<a>system<b>another question<a>>"
    assert kept.encode(other) == Encoder()(other)
    assert kept.encode("before " + other) == Encoder()("before " + other)
    assert encoder.asked[2:] == ["<b>another question<a>>", "before " + other]


def test_other_scopes_do_not_learn_what_was_encoded() -> None:
    encoder = Encoder()
    kept = KeptTexts(encoder, TAGS)
    for scope in ("", "one", "two", "one"):
        kept.encode("<a>secret<b>", scope)
    assert encoder.asked == ["<a>secret<b>"] * 3


def test_what_was_used_last_stays() -> None:
    encoder = Encoder()
    kept = KeptTexts(encoder, TAGS, most_bytes=3 * 950)
    texts = [f"<a>{letter * 60}" for letter in "abcd"]
    for text in (*texts, *texts[::-1]):
        assert kept.encode(text) == Encoder()(text)
        assert kept._num_bytes <= 3 * 950
    assert encoder.asked == [*texts, texts[0]], "there is room for three; the first one had gone"
    kept.encode("<a>" + "e" * 9000)
    assert kept._num_bytes <= 3 * 950, "a piece that is larger than all room is not kept"


def test_unexpected_ids_are_not_kept() -> None:
    calls = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [1000, 5, 1000, 6]

    kept = KeptTexts(encode, TAGS)
    for _ in range(2):
        assert kept.encode("<a>text<b>text") == [1000, 5, 1000, 6]
    assert len(calls) == 2


def test_errors_leave_it_as_it_was() -> None:
    kept = KeptTexts(Encoder(), TAGS)
    kept.encode("<a>x<b>")
    with pytest.raises(RequestError):
        kept.encode("<a>x<b>\ud800")
    assert kept.encode("<a>x<b>y") == Encoder()("<a>x<b>y")


def test_short_texts_and_tokenizers_that_cannot_be_cut_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder()
    for kept in (KeptTexts(encoder, {}), KeptTexts(encoder, TAGS)):
        monkeypatch.setattr(kept_texts, "LEAST_LENGTH", 100)
        kept.encode("<a>x")
        kept.encode("<a>x")
    assert encoder.asked == ["<a>x"] * 4
    library = tokenizers.Tokenizer.from_str(library_like("byte-level").to_str())
    assert Tokenizer(library.to_str())._kept_texts._tag is not None
    library.add_special_tokens([AddedToken("<|mask|>", lstrip=True, normalized=False)])
    assert Tokenizer(library.to_str())._kept_texts._tag is None, "a token that takes the spaces before it"


def test_threads_that_share_it() -> None:
    kept = KeptTexts(Encoder(), TAGS, most_bytes=20000)
    texts = [f"<a>{'s' * 30}<b>{i % 7}<a>>{'t' * (i % 5)}" for i in range(400)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(kept.encode, texts))
    assert found == [Encoder()(text) for text in texts]
    assert kept._num_bytes == sum(kept_texts._num_bytes(piece, ids) for (_, piece), ids in kept._kept.items())
