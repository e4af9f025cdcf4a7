"""Added tokens of a model folder: tokenizer.json with what tokenizer_config.json says of them; and which ones end a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from kog_dist.model_limits import FILES
from kog_dist.quoting import short
from kog_dist.strict_json import parse_object

TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN_ID: Final = re.compile(r"[0-9]{1,9}")
# Control tokens that end an answer, whatever the model's files say of its end: files that were converted or fine-tuned often name
# one of them alone. The list is llama.cpp's (src/llama-vocab.cpp), with names of Llama 4, DeepSeek, OpenChat and Command R.
END_NAMES: Final = (
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>", "<|EOT|>", "<EOT>", "[EOT]", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>",
    "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]",  # noqa: RUF001
)  # fmt: skip
_PHI: Final = frozenset({"<|end|>", "<|user|>", "<|assistant|>"})  # with others <|end|> ends a part of an answer


def end_names(specials: Collection[str]) -> tuple[str, ...]:
    """Those of a tokenizer's special tokens that end a turn by their names."""
    return tuple(name for name in (*END_NAMES, *(["<|end|>"] if set(specials) >= _PHI else [])) if name in specials)


def special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... of a tokenizer_config.json; each is a string or an object with the string as `content`."""
    return {name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value)) is not None}


def with_added_tokens(raw: bytes, config: Mapping[str, object]) -> tuple[str, dict[str, int]]:
    """The text of tokenizer.json with what tokenizer_config.json says of added tokens; and the ids of those that it has alone.

    Entries of `added_tokens_decoder` are added, and their flags count before those of tokenizer.json. What the config names as a
    special token is one. Raises ValueError if an entry is no token.
    """
    text, table, named = raw.decode("utf-8"), config.get("added_tokens_decoder"), set(_named(config))
    if not table and not named:
        return text, {}
    if not isinstance(table, dict | None):
        raise ValueError(f"added_tokens_decoder of {TOKENIZER_CONFIG_NAME} must be an object, got {short(table)}")
    parsed = parse_object(raw, FILES[TOKENIZER_NAME].num_items)
    given = parsed.get("added_tokens")
    given = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    tokens = {entry.get("content"): entry for entry in given}
    added: dict[str, int] = {}
    for key, entry in sorted((table or {}).items(), key=lambda item: (len(item[0]), item[0])):  # by number
        content = entry.get("content") if isinstance(entry, dict) else None
        if not _TOKEN_ID.fullmatch(key) or not isinstance(content, str) or not content:
            raise ValueError(f"added_tokens_decoder of {TOKENIZER_CONFIG_NAME} has an entry that is no token: {short(key)}")
        if content not in tokens:
            added[content] = int(key)
            tokens[content] = {"id": int(key), "content": content, **dict.fromkeys(_FLAGS, False)}
        tokens[content] = tokens[content] | {flag: entry[flag] for flag in _FLAGS if type(entry.get(flag)) is bool}
    for content, token_id in _of_the_model(parsed, named - tokens.keys()):
        tokens[content] = {"id": token_id, "content": content, **dict.fromkeys(_FLAGS, False)}
    for content in named & tokens.keys():
        tokens[content] = tokens[content] | {"special": True}
    if list(tokens.values()) == given:
        return text, {}
    return json.dumps(parsed | {"added_tokens": list(tokens.values())}, ensure_ascii=False), added


def _named(config: Mapping[str, object]) -> Iterator[str]:
    """Texts of all tokens that a tokenizer_config.json calls special. A padding token may be any of the vocabulary: it counts for
    no text, since nothing is padded here.
    """
    yield from (text for name, text in special_tokens(config).items() if name != "pad_token")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        for value in listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ():
            if (text := _content(value)) is not None:
                yield text


def _content(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _of_the_model(parsed: Mapping[str, object], contents: Collection[str]) -> Iterator[tuple[str, int]]:
    """Those that are pieces of the model, with their ids."""
    model = parsed.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        vocab = {piece[0]: idx for idx, piece in enumerate(vocab) if isinstance(piece, list) and piece and piece[0] in contents}
    for content in sorted(contents):
        if isinstance(vocab, dict) and type(token_id := vocab.get(content)) is int:
            yield content, token_id
