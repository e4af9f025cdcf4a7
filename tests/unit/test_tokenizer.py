"""Tokenizers: streamed text is the text decoded at once, for every sequence of ids; what a folder says about special tokens."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.generation_config import MAX_EOS_IDS, read_eos_ids
from kog_dist.model.tokenizer import CHANNEL_TAGS, Tokenizer, text_unavailable

TEXT = "def naïve(x):\n    return x + 1  # größer €uro 日本語 🎉👩‍👩‍👧\n" * 3
SPECIAL = ["<|begin|>", "<|end|>", "<|größer|>"]


@cache
def byte_level_library() -> tokenizers.Tokenizer:
    """A byte-level BPE as GPT-2 and our demo model have; the last added token is no special one."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    library.add_tokens([AddedToken("<tool €>", special=False)])
    library.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return library


@cache
def byte_fallback_library() -> tokenizers.Tokenizer:
    """A tokenizer with the parts of Llama 2's: spaces as U+2581, a space put before the text, bytes for unknown characters."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["▁def", "▁x", "de", "ef", "def", "▁de"]
    pieces = ["<unk>", "<s>", "</s>", *byte_pieces, "▁", *"abcdefxyz(){}:+1=\n#é", *merged]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("d", "e"), ("▁", "x"), ("de", "f"), ("▁", "def"), ("e", "f"), ("▁", "de")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


@cache
def metaspace_library() -> tokenizers.Tokenizer:
    """The same pieces with SentencePiece's spaces as the library writes them: one for pre-tokenizer and decoder."""
    described = json.loads(byte_fallback_library().to_str())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    described |= {"normalizer": None, "pre_tokenizer": metaspace}
    described["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
    return tokenizers.Tokenizer.from_str(json.dumps(described))


@cache
def tokenizer_like(kind: str) -> Tokenizer:
    return Tokenizer(library_like(kind).to_str())


def library_like(kind: str) -> tokenizers.Tokenizer:
    return {"byte-level": byte_level_library, "byte-fallback": byte_fallback_library, "metaspace": metaspace_library}[kind]()


every_kind = pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace"])
# Longer than either vocabulary: ids that the tokenizer does not have must do no harm.
any_ids = st.lists(st.integers(0, 400), max_size=24)


@every_kind
@settings(max_examples=400, deadline=None, derandomize=True)
@given(ids=any_ids, after=any_ids)
def test_the_stream_is_the_whole_text_for_every_sequence_of_ids(kind: str, ids: list[int], after: list[int]) -> None:
    tokenizer = tokenizer_like(kind)
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids)
    continued = tokenizer.stream(after=after)
    tail = "".join([*map(continued.push, ids), continued.flush()])
    whole = tokenizer.decode(after + ids)
    assert whole.endswith(tail)
    head = tokenizer.stream()
    assert "".join(map(head.push, after)) + tail == whole


@every_kind
@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=st.text(max_size=40) | st.text("def x({é\n🎉€\ufffd ", max_size=40))
def test_text_comes_back_and_as_the_library_decodes_it(kind: str, text: str) -> None:
    tokenizer, library = tokenizer_like(kind), library_like(kind)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    loses_spaces = kind == "metaspace" and text.startswith(" ")  # as the library does
    if "▁" not in text and not loses_spaces and not any(special in text for special in [*SPECIAL, "<unk>", "<s>", "</s>", "<0x"]):
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids) == library.decode(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=any_ids)
def test_byte_level_decoding_is_the_library_s_for_every_sequence(ids: list[int]) -> None:
    known = [i for i in ids if byte_level_library().id_to_token(i) is not None]
    assert tokenizer_like("byte-level").decode(known) == byte_level_library().decode(known)


PIECES = ["<s>", "▁", "▁a", "a", "b▁c", "▁▁", "é"]


@pytest.mark.parametrize(
    "decoder",
    [
        {"replacement": "▁", "prepend_scheme": "always", "split": True},
        {"replacement": "▁", "prepend_scheme": "first", "split": True},
        {"replacement": "▁", "prepend_scheme": "never", "split": True},
        {"replacement": "▁", "add_prefix_space": True},
        {"replacement": "a", "prepend_scheme": "always", "split": True},
    ],
)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=6), after=st.integers(0, 6))
def test_a_metaspace_decoder_is_the_library_s(decoder: dict[str, Any], ids: list[int], after: int) -> None:
    """Also where the first pieces are special, or spaces, or both."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw = json.dumps(
        {
            "version": "1.0", "added_tokens": [{"id": 0, "content": "<s>", "special": True, **flags}], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Metaspace", **decoder},
            "model": {"type": "BPE", "vocab": {piece: number for number, piece in enumerate(PIECES)}, "merges": []},
        }
    )  # fmt: skip
    tokenizer, library = Tokenizer(raw), tokenizers.Tokenizer.from_str(raw)
    assert tokenizer.decode(ids) == library.decode(ids)
    head, tail = ids[:after], ids[after:]
    stream = tokenizer.stream(after=head)
    assert tokenizer.decode(head) + "".join([*map(stream.push, tail), stream.flush()]) == library.decode(ids)


def test_names_that_the_library_does_not_know_are_left_out() -> None:
    described = json.loads(byte_level_library().to_str())
    tokenizer = Tokenizer(json.dumps(described | {"x-next-year": {"a": [1]}, "about": None}))
    assert tokenizer.left_out == ("about", "x-next-year")
    assert tokenizer.encode(TEXT) == tokenizer_like("byte-level").encode(TEXT)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(raw=st.binary(max_size=24))
def test_byte_tokens_are_bytes(raw: bytes) -> None:
    tokenizer = tokenizer_like("byte-fallback")
    ids = [3 + byte for byte in raw]
    decoded = tokenizer.decode(ids)
    text = raw.decode("utf-8", "replace")
    assert decoded == (text[1:] if text.startswith(" ") else text)


def test_a_character_appears_when_its_last_byte_does() -> None:
    decoder = tokenizer_like("byte-fallback").stream()
    party = [3 + byte for byte in "🎉".encode()]
    assert [decoder.push(i) for i in party] == ["", "", "", "🎉"]
    assert [decoder.push(i) for i in party[:2]] == ["", ""]
    assert decoder.push(3 + ord("a")) == "\ufffda"
    assert decoder.push(party[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_character_that_begins_in_the_prompt_is_finished(num_before: int) -> None:
    """Four bytes in four tokens, of which so many are the prompt's last: a stream has to look at all of them."""
    tokenizer, raw = tokenizer_like("byte-fallback"), "🎉".encode()
    ids = [3 + byte for byte in b"long before" + raw]
    stream = tokenizer.stream(after=ids[: num_before - 4])
    assert [stream.push(token_id) for token_id in ids[num_before - 4 :]] == [""] * (3 - num_before) + ["🎉"]
    assert stream.flush() == ""


def test_only_the_space_that_the_tokenizer_put_there_is_taken_off() -> None:
    tokenizer = tokenizer_like("byte-fallback")
    for text in ("x", " x", "  x", "def x", "", " ", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt, more = tokenizer.encode("def"), [tokenizer.id_of("▁x")]
    assert None not in more
    decoder = tokenizer.stream(after=prompt)
    assert decoder.push(int(more[0] or 0)) == " x"


@pytest.mark.parametrize("num_spaces", [3, 4, 5, 9])
def test_leading_spaces_end_with_the_prompt_s_first_text(num_spaces: int) -> None:
    """Where more spaces are taken off than the last tokens of a prompt show: those of an answer stay."""
    library = tokenizers.Tokenizer.from_str(byte_fallback_library().to_str())
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 4, 0)])
    tokenizer = Tokenizer(library.to_str())
    x, space = tokenizer.id_of("x"), tokenizer.id_of("▁")
    assert x is not None
    assert space is not None
    for after in ([x] + [space] * num_spaces, [space] * num_spaces):
        stream = tokenizer.stream(after=after)
        tail = "".join(map(stream.push, [space, space, x])) + stream.flush()
        assert tokenizer.decode([*after, space, space, x]) == tokenizer.decode([*after]) + tail


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    tokenizer = tokenizer_like("byte-level")
    assert tokenizer.id_of("<|end|>") == 1
    assert tokenizer.decode([0, 1, 2]) == ""
    added = tokenizer.id_of("<tool €>")
    assert added is not None
    assert tokenizer.decode([added]) == "<tool €>"
    assert tokenizer.num_ids == added + 1
    assert tokenizer.id_of("no such token") is None


def test_truncation_and_padding_of_a_tokenizer_file_are_not_obeyed() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_library().to_str())
    library.enable_truncation(4)
    library.enable_padding(length=16)
    tokenizer = Tokenizer(library.to_str())
    assert len(tokenizer.encode(TEXT)) > 16
    assert len(tokenizer.encode("a")) == 2


def test_text_that_is_no_unicode_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2") as caught:
        tokenizer_like("byte-level").encode("ab\ud800")
    assert caught.value.code == "invalid_text"


# ---- folders ----
def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """Where the interpreter is locked meanwhile, they pause for all of it; of ten tries a busy machine may spoil some."""
    tokenizer, text = tokenizer_like("byte-level"), TEXT * 1000
    shares = []
    for _ in range(10):
        thread = Thread(target=tokenizer.encode, args=(text,))
        begin_s = last_s = time.perf_counter()
        pause_s = 0.0
        thread.start()
        while thread.is_alive():
            now_s = time.perf_counter()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
        shares.append(max(pause_s, time.perf_counter() - last_s) / (last_s - begin_s))
        if shares[-1] < 0.5:
            return
    pytest.fail(f"others paused for these shares of the time: {shares}")


def folder_with(folder: Path, **files: Any) -> Path:
    """A model folder with a byte-level tokenizer; keyword `generation_config={...}` writes generation_config.json."""
    (folder / "tokenizer.json").write_text(byte_level_library().to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": 2}}, (1,)),
        ({"generation_config": {"eos_token_id": [2, 1, 2]}}, (2, 1)),
        ({"generation_config": {}, "config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": [0, 2]}}, (0, 2)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>", "lstrip": False}}}, (1,)),
        ({"tokenizer_config": {"eos_token": "<nowhere>"}}, ()),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 0}}, (0,)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}, "config": {"eos_token_id": 2}}, (2, 1)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}, "generation_config": {"eos_token_id": [1, 0]}}, (1, 0)),
        ({"special_tokens_map": {"eos_token": {"content": "<|end|>"}}}, (1,)),
        ({"tokenizer_config": {"eos_token": "<|end|>", "eot_token": "<|größer|>"}}, (1, 2)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}, "special_tokens_map": {"eos_token": "<|begin|>"}}, (1,)),
    ],
)
def test_where_eos_ids_come_from(tmp_path: Path, files: dict[str, Any], eos_ids: tuple[int, ...]) -> None:
    assert load(folder_with(tmp_path, **files)).eos_ids == eos_ids


@pytest.mark.parametrize(("num_ids", "is_added"), [(MAX_EOS_IDS - 1, True), (MAX_EOS_IDS, False)])
def test_a_fine_tunes_own_end_is_added_while_there_is_room(tmp_path: Path, num_ids: int, is_added: bool) -> None:
    ids = list(range(100, 100 + num_ids))
    folder = folder_with(tmp_path, tokenizer_config={"eos_token": "<|end|>"}, config={"eos_token_id": ids})
    assert load(folder).eos_ids == (*ids, *([1] if is_added else []))


def test_eos_ids_need_no_tokenizer(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_eos_ids(tmp_path) == (7,)
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {list(range(MAX_EOS_IDS))}}}')
    assert len(read_eos_ids(tmp_path)) == MAX_EOS_IDS, "as many as a request block has room for"
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("value", ["2", -1, 2.0, True, [1, None], {"id": 1}, list(range(17)), 2**31])
def test_eos_ids_that_are_none_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be"):
        load(folder_with(tmp_path, generation_config={"eos_token_id": value}))


def test_special_tokens_for_the_chat_template(tmp_path: Path) -> None:
    special = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    tokenizer = load(folder_with(tmp_path, tokenizer_config=special | {"add_bos_token": True, "model_max_length": 5}))
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_tokens_that_only_tokenizer_config_has_are_added(tmp_path: Path) -> None:
    num_ids = load(folder_with(tmp_path)).num_ids
    entries = {"1": {"content": "<|end|>", "special": True}, str(num_ids): {"content": "<|im_end|>", "special": True}}
    entries[str(num_ids + 1)] = {"content": "<think>", "special": False}
    tokenizer = load(folder_with(tmp_path, tokenizer_config={"added_tokens_decoder": entries, "eos_token": "<|im_end|>"}))
    assert tokenizer.eos_ids == (num_ids,)
    ids = tokenizer.encode("x<think><|im_end|>", add_special_tokens=False)
    assert ids[1:] == [num_ids + 1, num_ids]
    assert tokenizer.decode(ids) == "x<think>"


FLAGS = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"added_tokens_decoder": {"258": {"content": "<plain>", **FLAGS, "special": True}}},
        {"added_tokens_decoder": {"258": {"content": "<plain>", **FLAGS, "lstrip": True}}},
        {"added_tokens_decoder": {"259": {"content": "<special>", **FLAGS, "rstrip": True, "special": True}}},
        {"added_tokens_decoder": {"259": {"content": "<special>", **FLAGS}}},
        {"added_tokens_decoder": {"256": {"content": "<piece>", **FLAGS, "special": True}}},
        {"added_tokens_decoder": {"260": {"content": "<new>", **FLAGS, "special": True}}},
        {"extra_special_tokens": {"image_token": "<plain>"}},
        {"extra_special_tokens": ["<piece>"]},
        {"additional_special_tokens": ["<piece>"]},
        {"eos_token": "<plain>"},
        {"eos_token": "<piece>"},
        {"bos_token": {"content": "<plain>", **FLAGS, "__type": "AddedToken"}},
        {"image_token": "<piece>"},
    ],
)
def test_what_tokenizer_config_says_of_added_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    """Flags of all added tokens, and ids of a text with them, are those of transformers."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<piece>", "abc"]
    library = tokenizers.Tokenizer(models.BPE({piece: idx for idx, piece in enumerate(pieces)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_tokens([AddedToken("<plain>", special=False, normalized=False)])
    library.add_special_tokens(["<special>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    tokenizer, text = load(tmp_path), "a <plain> <special> <piece> <new> abc"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    specials = {token.content for token in theirs._tokenizer.get_added_tokens_decoder().values() if token.special}
    assert set(tokenizer.special_texts) == specials
    shown = [token for token in ("<plain>", "<special>", "<piece>", "<new>") if token not in specials]
    assert [token for token in ("<plain>", "<special>", "<piece>", "<new>") if token in tokenizer.decode(ids)] == shown


def test_lists_of_special_tokens_make_added_ones_special(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": [{"content": "<tool €>"}]}')
    tokenizer = load(folder_with(tmp_path, tokenizer_config={"extra_special_tokens": ["<nowhere>"], "pad_token": "a"}))
    assert "<tool €>" in tokenizer.special_texts
    assert tokenizer.decode(tokenizer.encode("a<tool €>a")) == "aa", "a padding token may be a word"


@pytest.mark.parametrize(
    ("specials", "eos", "ends"),
    [
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], "<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
        (["<eos>", "<start_of_turn>", "<end_of_turn>"], None, ["<end_of_turn>", "<eos>"]),
        (["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"], "<|endoftext|>", ["<|endoftext|>", "<|end|>"]),
        (["<|endoftext|>", *CHANNEL_TAGS], "<|endoftext|>", ["<|endoftext|>", "<|return|>", "<|call|>"]),
        (["<|end|>"], None, []),
    ],
)
def test_control_tokens_end_a_turn_by_their_names(
    tmp_path: Path, specials: list[str], eos: str | None, ends: list[str]
) -> None:  # fmt: skip
    library = tokenizers.Tokenizer.from_str(byte_level_library().to_str())
    library.add_special_tokens(specials)
    library.add_tokens([AddedToken("<|eot|>", special=False)])
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    if eos is not None:
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": library.token_to_id(eos)}))
    assert list(load(tmp_path).eos_ids) == [library.token_to_id(end) for end in ends]


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ([], ""),
        ([1], "must be an object"),
        ({"x": {"content": "a"}}, "is no token: 'x'"),
        ({"-1": {"content": "a"}}, "is no token"),
        ({"7": {"content": ""}}, "is no token"),
        ({"7": "a"}, "is no token"),
        ({"7": {"content": "<new>"}}, "says that '<new>' is id 7"),
        ({"99999": {"content": "<new>"}}, "says that '<new>' is id 99999"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(tmp_path: Path, entries: object, cause: str) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"added_tokens_decoder": entries})
    if not cause:
        load(folder)
        return
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used: ") as caught:
        load(folder)
    assert cause in str(caught.value)


def test_every_id_must_be_a_row_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load(folder_with(tmp_path))
    tokenizer.check_fits(tokenizer.num_ids)
    last = tokenizer.num_ids - 1
    with pytest.raises(CheckpointError, match=f"ids up to {last}, but the model's vocabulary ends at {last - 1}"):
        tokenizer.check_fits(last)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    error = text_unavailable(tmp_path)
    assert error.code == "no_tokenizer"
    assert "has no tokenizer.json; give token ids instead of text" in str(error)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert "tokenizer.model must be converted" in str(text_unavailable(tmp_path))


def broken_tokenizers() -> dict[str, str]:
    def with_decoder(decoder: object) -> str:
        return json.dumps(json.loads(byte_level_library().to_str()) | {"decoder": decoder})

    return {
        "empty": "",
        "no object": "[]",
        "not JSON": "{",
        "deep": "[" * 100_000,
        "no model": "{}",
        "unknown model": '{"version": "1.0", "model": {"type": "Oracle"}}',
        "another decoder": with_decoder({"type": "WordPiece", "prefix": "##", "cleanup": True}),
        "regex decoder": with_decoder({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}),
        "strip at the end": with_decoder(
            {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]}
        ),
        "strip of tokens": with_decoder({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
    }


@pytest.mark.parametrize("case", broken_tokenizers())
def test_tokenizer_files_that_cannot_be_used_are_named(tmp_path: Path, case: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken_tokenizers()[case])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config"])
@pytest.mark.parametrize("text", ["{", "[1]", "\xff", "[" * 100_000])
def test_bad_json_beside_it_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder_with(tmp_path)
    (tmp_path / f"{name}.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=rf"/{name}\.json"):
        load(tmp_path)


def test_files_are_held_against_the_manifest(tmp_path: Path) -> None:
    folder_with(tmp_path)
    manifest = {"format": "kog_dist manifest 1", "files": {"tokenizer.json": "0" * 64}, "headers": {}, "tensors": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json differs from its SHA-256"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
