"""Vocabularies of GGUF files: what SentencePiece's scores come to, what is added around a text, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from kog_dist.model.gguf.config import NO_TOKEN
from kog_dist.model.gguf.vocabulary import read_tokenizer, read_tokenizer_config, to_json
from tests.unit.gguf_files import vocabulary

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {
    SPACE: -20.0, "a": -21.0, "b": -22.0, "c": -23.0, "d": -24.0, "ab": -1.0, "bc": -2.0, "cd": -2.5, f"{SPACE}a": -3.0,
    "abc": -4.0, f"{SPACE}ab": -5.0, "abcd": -6.0, "aa": -7.0, "aaa": -8.0, "aaaa": -8.0,
}  # fmt: skip
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<tool>", "<|im_end|>"]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4, 4]


def llama(**changes: Any) -> dict[str, Any]:
    """The metadata of a small SentencePiece vocabulary, by names without their beginning."""
    given = {
        "model": "llama", "tokens": TOKENS, "token_type": KINDS, "scores": [0.0] * 259 + [*PIECES.values()] + [0.0] * 2,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in given.items() if value is not None}


def loaded(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(to_json(read_tokenizer(metadata)).decode())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", [f"{SPACE}ab"]),
        ("abcd", [f"{SPACE}ab", "cd"]),
        ("b", [SPACE, "b"]),
        ("bcd", [SPACE, "bc", "d"]),
        ("aab", [f"{SPACE}a", "ab"]),
        ("a  a", [f"{SPACE}a", SPACE, f"{SPACE}a"]),
        ("dab", [SPACE, "d", "ab"]),
        ("aé", [f"{SPACE}a", "<0xC3>", "<0xA9>"]),
        ("\n", [SPACE, "<0x0A>"]),
        ("a<tool>b", [f"{SPACE}a", "<tool>", SPACE, "b"]),
    ],
)
def test_texts_are_cut_as_scores_say(text: str, pieces: list[str]) -> None:
    encoded = loaded(llama()).encode(text)
    assert encoded.tokens == ["<s>", *pieces]


@pytest.mark.parametrize("text", ["ab cd", " a", "  aab  ", "é\n\tabcd", "日本 ab", "aaaaaa"])
@pytest.mark.parametrize("prefix", [True, False])
def test_no_letter_is_lost(text: str, prefix: bool) -> None:
    tokenizer = loaded(llama(add_space_prefix=prefix))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_without_a_prefix_no_blank_is_put_in_front() -> None:
    assert loaded(llama(add_space_prefix=False)).encode("ab").tokens == ["<s>", "ab"]


def test_merges_come_by_score_and_then_by_length() -> None:
    merges = [tuple(pair) for pair in read_tokenizer(llama())["model"]["merges"]]
    assert merges == [
        ("a", "b"), ("b", "c"), ("c", "d"), (SPACE, "a"), ("ab", "c"), ("a", "bc"), (f"{SPACE}a", "b"), (SPACE, "ab"),
        ("abc", "d"), ("ab", "cd"), ("a", "a"), ("aaa", "a"), ("aa", "aa"), ("aa", "a"), ("a", "aaa"), ("a", "aa"),
    ]  # fmt: skip


def test_bytes_and_controls_are_never_merged() -> None:
    kinds = [*KINDS]
    kinds[TOKENS.index("ab")] = 5  # unused
    merges = read_tokenizer(llama(token_type=kinds))["model"]["merges"]
    assert ("a", "b") not in [tuple(pair) for pair in merges]


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, (["<s>"], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, (["<s>"], ["</s>"])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], ["</s>"])),
        ({"bos_token_id": None}, ([], [])),
        ({"bos_token_id": NO_TOKEN}, ([], [])),
    ],
)
def test_what_stands_around_a_text(changes: dict[str, Any], around: tuple[list[str], list[str]]) -> None:
    tokenizer = loaded(llama(**changes))
    assert tokenizer.encode("ab").tokens == [*around[0], f"{SPACE}ab", *around[1]]
    pair = tokenizer.encode("ab", "ab")
    assert pair.tokens == [*around[0], f"{SPACE}ab", *around[1], f"{SPACE}ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == [f"{SPACE}ab"]


def test_which_tokens_are_added_and_special() -> None:
    added = {one["content"]: one for one in read_tokenizer(llama())["added_tokens"]}
    assert {content: one["special"] for content, one in added.items()} == {
        "<unk>": True, "<s>": True, "</s>": True, "<tool>": False, "<|im_end|>": True,
    }  # fmt: skip
    for content, one in added.items():
        assert one["id"] == TOKENS.index(content)
        assert not any(one[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def test_an_unknown_token_may_be_missing() -> None:
    assert read_tokenizer(llama())["model"]["unk_token"] == "<unk>"
    assert read_tokenizer(llama(unknown_token_id=None))["model"]["unk_token"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores, a number for each token"),
        ({"scores": [0.0] * (len(TOKENS) - 1)}, "no tokenizer.ggml.scores"),
        ({"scores": [0] * len(TOKENS)}, "no tokenizer.ggml.scores"),
        ({"scores": [float("nan")] * len(TOKENS)}, "no tokenizer.ggml.scores"),
        ({"scores": [float("inf")] * len(TOKENS)}, "no tokenizer.ggml.scores"),
        ({"token_type": None}, "no tokenizer.ggml.token_type, a list of integers"),
        ({"token_type": [True] * len(TOKENS)}, "no tokenizer.ggml.token_type"),
        ({"token_type": KINDS[:-1]}, f"token_type has {len(TOKENS) - 1} entries for {len(TOKENS)} tokens"),
        ({"tokens": None}, "no tokenizer.ggml.tokens, a list of texts"),
        ({"tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokens": [1] * len(TOKENS)}, "no tokenizer.ggml.tokens"),
        ({"tokens": [*TOKENS[:-1], "ab"]}, "token 'ab' stands twice"),
        ({"model": "bert"}, "model 'bert' is not supported; supported: gpt2, llama"),
        ({"bos_token_id": len(TOKENS)}, f"bos_token_id {len(TOKENS)} is no id of its {len(TOKENS)} tokens"),
        ({"unknown_token_id": -1}, "unknown_token_id -1 is no id"),
        ({"unknown_token_id": True}, "unknown_token_id True is no id"),
        ({"add_space_prefix": 1}, "add_space_prefix must be true or false, got 1"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ],
)
def test_vocabularies_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tokenizer(llama(**changes))


def test_a_vocabulary_of_too_many_letters_is_refused() -> None:
    long = "x" * (8 * 2**20 + 1 - sum(map(len, TOKENS)) + len(TOKENS[-1]))
    with pytest.raises(ValueError, match="more than 8388608 characters together"):
        read_tokenizer(llama(tokens=[*TOKENS[:-1], long]))
    assert read_tokenizer(llama(tokens=[*TOKENS[:-1], long[1:]]))


def test_the_last_id_is_one() -> None:
    last = len(TOKENS) - 1
    assert read_tokenizer_config(llama(eos_token_id=last, bos_token_id=0))["eos_token"] == "<|im_end|>"
    assert read_tokenizer_config(llama(bos_token_id=0))["bos_token"] == "<unk>"


def test_names_of_special_tokens_and_the_template() -> None:
    assert read_tokenizer_config(llama(padding_token_id=2) | {"tokenizer.chat_template": "x"}) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", "chat_template": "x",
    }  # fmt: skip
    with pytest.raises(ValueError, match="chat_template must be a text, got 5"):
        read_tokenizer_config(llama() | {"tokenizer.chat_template": 5})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pre", "unheard-of", "pre 'unheard-of' is not supported; supported: "),
        ("pre", 5, "pre 5 is not supported"),
        ("merges", None, "no tokenizer.ggml.merges, a list of texts"),
        ("merges", [1], "no tokenizer.ggml.merges"),
        ("merges", ["a"], "merge 'a' is no pair of tokens that make a token"),
        ("merges", ["a b c"], "is no pair of tokens"),
        ("merges", ["never seen"], "is no pair of tokens"),
    ],
)
def test_byte_level_vocabularies_that_contradict_themselves(name: str, value: object, message: str) -> None:
    metadata = {**vocabulary(), f"tokenizer.ggml.{name}": value}
    with pytest.raises(ValueError, match=message):
        read_tokenizer({key: one for key, one in metadata.items() if one is not None})
