"""Texts become chains of tokens, and a prompt that quotes one has its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.made_models.chain import TextChain, mark_of
from kog_dist.errors import ConfigError
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.tokenizer import Tokenizer

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
LINES = "one two one two three\none two\tone two four\n"
END = 999


@given(st.lists(st.sampled_from(["a", "b", "ab", " ", "\n", "  c"]), min_size=1, max_size=30).map("".join).filter(str.strip))
def test_pieces_are_the_text_and_each_stands_in_it_once(text: str) -> None:
    (pieces,) = TextChain.of([text]).texts
    assert "".join(pieces) == text
    assert len(set(pieces)) == len(pieces)
    assert all(text.find(piece) == text.rfind(piece) for piece in pieces)


@pytest.mark.parametrize("texts", [[""], [" \n"], ["caf\xe9"], ["a b", "a b"], ["x a b", "a b"]])
def test_what_is_no_text_of_its_own_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--chain"):
        TextChain.of(texts)


def test_each_token_has_one_that_follows() -> None:
    chain = TextChain.of([CODE, LINES])
    following, names = chain.following(END), [*map(chr, range(256)), *chain.names]
    assert len(following) == len(chain.names), "no piece stands in both"
    for text_idx, text in enumerate((CODE, LINES)):
        token_id, said = names.index(mark_of(text_idx)), ""
        while (token_id := following[token_id]) != END:
            said += names[token_id]
        assert said == text
    assert names[chain.begin_id] == chain.texts[0][0]


def test_a_prompt_that_quotes_a_text_has_its_tokens(tmp_path: Path) -> None:
    chain = TextChain.of([CODE, LINES])
    write_tokenizer(tmp_path, 600, chain.names)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    first = 256 + len(chain.texts)
    ids = {
        CODE: [*range(first, first + len(chain.texts[0]))],
        LINES: [*range(first + len(chain.texts[0]), 256 + len(chain.names))],
    }
    for text, wanted in ids.items():
        assert tokenizer.encode(text) == wanted
        assert tokenizer.decode(wanted) == text
        around = tokenizer.encode(f"Say this:{text}Now.")
        begin = len("Say this:")
        assert around[begin : begin + len(wanted)] == wanted
    changed = tokenizer.encode(CODE.replace("sub", "mul"))
    assert len(set(changed) & set(ids[CODE])) >= len(ids[CODE]) - 2, "what is not changed has the same tokens"
    assert tokenizer.encode("hello\n" + mark_of(1))[-1] == tokenizer.id_of(mark_of(1))


def test_a_vocabulary_without_room_is_refused(tmp_path: Path) -> None:
    chain = TextChain.of([CODE])
    write_tokenizer(tmp_path, 257 + len(chain.names), chain.names)
    with pytest.raises(ConfigError, match=f"no room for {len(chain.names)} tokens"):
        write_tokenizer(tmp_path, 256 + len(chain.names), chain.names)


def test_a_made_tokenizer_with_a_chat_template(tmp_path: Path) -> None:
    """Each message ends with the last id; that text in a message is letters."""
    end = write_tokenizer(tmp_path, 300, chats=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    template = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert template is not None
    try:
        shown = template.render([{"role": "system", "content": "go"}, {"role": "user", "content": "on <eos>"}])
    finally:
        template.close()
    assert shown == "system\ngo<eos>user\non <eos><eos>assistant:"
    ids = tokenizer.encode_chat(shown, "", shown.request_runs)
    assert [place for place, token_id in enumerate(ids) if token_id == end] == [9, 9 + 13 + 1]
