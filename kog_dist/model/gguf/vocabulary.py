"""The `tokenizer.json` and `tokenizer_config.json` that a GGUF file's vocabulary stands for.

Byte-level BPE (`gpt2`) splits texts by a rule that the file only names (pre_tokenizers.py). SentencePiece (`llama`) is written as
what Llama 2's converter makes of it: BPE whose merges follow from the scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kog_dist.model.added_tokens import END_NAMES
from kog_dist.model.gguf.config import NO_TOKEN
from kog_dist.model.gguf.pre_tokenizers import CUTS, byte_level
from kog_dist.quoting import short

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # kinds of tokens; 5: unused, 6: a byte
_MAX_PIECES_CHARS = 8 * 2**20  # every place at which a piece can be cut is tried
_SPACE: Final = "\u2581"
_PUT_BESIDE: Final = "put the model's tokenizer.json next to the file and give the folder"


def read_tokenizer(metadata: Mapping[str, object]) -> dict[str, Any]:
    """A tokenizer.json. Raises ValueError if the vocabulary is missing, contradicts itself, or is of an unknown kind."""
    tokens, kinds = _tokens(metadata), _kinds(metadata)
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ValueError(f"token {short(twice)} stands twice in tokenizer.ggml.tokens; {_PUT_BESIDE}")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level_bpe(metadata, vocab)
    elif kind == "llama":
        parts = _sentence_piece(metadata, tokens, kinds, vocab)
    else:
        raise ValueError(f"tokenizer.ggml.model {short(kind)} is not supported; supported: gpt2, llama; {_PUT_BESIDE}")
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[token_id] != _USER_DEFINED or token in END_NAMES,
        }
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def read_tokenizer_config(metadata: Mapping[str, object]) -> dict[str, object]:
    """A tokenizer_config.json: special tokens and the chat template. Raises ValueError."""
    tokens = _tokens(metadata)
    config: dict[str, object] = {}
    for theirs, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = _token_id(metadata, theirs, len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError(f"tokenizer.chat_template must be a text, got {short(template)}")
        config["chat_template"] = template
    return config


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ValueError("it has no tokenizer.ggml.tokens, a list of texts")
    return tokens


def _kinds(metadata: Mapping[str, object]) -> Sequence[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or not all(type(kind) is int for kind in kinds):
        raise ValueError("it has no tokenizer.ggml.token_type, a list of integers")
    return kinds


def _token_id(metadata: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None or token_id == NO_TOKEN:
        return None
    if type(token_id) is not int or not 0 <= token_id < num_tokens:
        raise ValueError(f"{key} {short(token_id)} is no id of its {num_tokens} tokens")
    return token_id


def _adds(metadata: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.add_{name}", default)
    if type(value) is not bool:
        raise ValueError(f"tokenizer.ggml.add_{name} must be true or false, got {short(value)}")
    return value


def _byte_level_bpe(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> dict[str, object]:
    pre, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(pre, str) or pre not in CUTS:
        known = ", ".join(CUTS)
        raise ValueError(f"tokenizer.ggml.pre {short(pre)} is not supported; supported: {known}; {_PUT_BESIDE}")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ValueError("it has no tokenizer.ggml.merges, a list of texts")
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not all(piece in vocab for piece in (*pair, "".join(pair))):
            raise ValueError(f"merge {short(merge)} is no pair of tokens that make a token")
    cut = CUTS[pre]
    return {
        "normalizer": {"type": "NFC"} if cut.is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut.pre_tokenizers},
        "post_processor": _post_processor(metadata, vocab, begins=cut.begins) or byte_level(use_regex=False),
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.ignores_merges,
            "vocab": vocab,
            "merges": pairs,
        },
    }


def _sentence_piece(
    metadata: Mapping[str, object], tokens: Sequence[str], kinds: Sequence[int], vocab: Mapping[str, int]
) -> dict[str, object]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(map(_is_number, scores)):
        raise ValueError("it has no tokenizer.ggml.scores, a number for each token")
    unknown = _token_id(metadata, "unknown", len(tokens))
    has_prefix = _adds(metadata, "space_prefix", default=True)
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, vocab, begins=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges_of_scores(tokens, kinds, vocab, scores),
        },
    }


def _merges_of_scores(
    tokens: Sequence[str], kinds: Sequence[int], vocab: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, in the order of Llama 2's converter: best scores first, then longest pieces."""
    merges: list[tuple[float, int, int, str, str]] = []
    if sum(map(len, tokens)) > _MAX_PIECES_CHARS:
        raise ValueError(f"its tokens have more than {_MAX_PIECES_CHARS} characters together; {_PUT_BESIDE}")
    for token_id, token in enumerate(tokens):
        if kinds[token_id] != _NORMAL:
            continue
        found = []
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((left, right))
        merges += [
            (-scores[token_id], -len(tokens[left]), -len(tokens[right]), tokens[left], tokens[right])
            for left, right in sorted(found)
        ]
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _is_number(score: object) -> bool:
    return type(score) is float and math.isfinite(score)


def _post_processor(metadata: Mapping[str, object], vocab: Mapping[str, int], *, begins: bool) -> dict[str, object] | None:
    """What puts BOS before a text and EOS behind it, where the file wants them."""
    tokens = _tokens(metadata)
    wanted = [("bos", _adds(metadata, "bos_token", default=begins)), ("eos", _adds(metadata, "eos_token", default=False))]
    ids = {name: _token_id(metadata, name, len(tokens)) for name, is_added in wanted if is_added}
    used = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    if not used:
        return None
    pattern: list[dict[str, object]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if "bos" in used:
        pattern.insert(0, {"SpecialToken": {"id": used["bos"], "type_id": 0}})
    if "eos" in used:
        pattern.append({"SpecialToken": {"id": used["eos"], "type_id": 0}})
    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in used.values()}
    pair = [*pattern, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": pattern, "pair": pair, "special_tokens": special}


def to_json(content: Mapping[str, Any]) -> bytes:
    """The bytes of such a file."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8")
