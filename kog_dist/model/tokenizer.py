"""Text to token ids and back. Decoding is defined on bytes: a stream of pieces is exactly the text decoded all at once.

Every token stands for bytes; text is their concatenation read as UTF-8, where each maximal invalid part becomes one U+FFFD. For
valid text this is what the `tokenizers` library gives; unlike there, the promise holds for ids that are no valid UTF-8, too.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.added_tokens import (
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    end_names,
    special_tokens,
    with_added_tokens,
)
from kog_dist.model.generation_config import MAX_EOS_IDS, read_eos_ids
from kog_dist.model.kept_texts import KeptTexts
from kog_dist.model.literal_text import LiteralTexts, around, cuts_everywhere
from kog_dist.model.manifest import Manifest, read_json, read_small_file
from kog_dist.model_limits import FILES
from kog_dist.quoting import short
from kog_dist.records import dataclass
from kog_dist.strict_json import parse_object

SPECIAL_TOKENS_NAME = "special_tokens_map.json"
CHANNEL_ENDS = ("<|return|>", "<|call|>")  # of answers of gpt-oss
CHANNEL_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", *CHANNEL_ENDS)
_READ_BY_LIBRARY = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model".split()
)
_MOST_PENDING_BYTES = 3  # of a character that is not finished; its first byte begins a character whatever stands before it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a model folder.

    eos_ids: ids that end a generation. special_tokens: texts of bos_token, eos_token, ... as a chat template wants them.
    num_ids: one more than the largest id. has_channels: answers are messages in channels, whose tags have text (docs/openai.md).
    left_out: names in tokenizer.json that the library does not know. special_texts: all special tokens.
    normalizes_specials: some are looked for in what a normalizer makes of a text.
    """

    def __init__(self, raw: str, eos_ids: Sequence[int] = (), special_tokens: Mapping[str, str] | None = None) -> None:
        """Build it from the text of a tokenizer.json. Raises ValueError if it is none that we can decode, or one with dropout."""
        parsed = parse_object(raw.encode("utf-8"), FILES[TOKENIZER_NAME].num_items)
        _refuse_dropout(parsed)
        self.left_out = tuple(sorted(set(parsed) - _READ_BY_LIBRARY))
        if self.left_out:
            raw = json.dumps({key: value for key, value in parsed.items() if key in _READ_BY_LIBRARY}, ensure_ascii=False)
        self._library = _load_library(raw)
        self._bytes_of = _ByteDecoder.from_json(parsed)
        self._token_bytes: dict[int, bytes] = {}
        added = self._library.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        channels = {token: self.id_of(token) for token in CHANNEL_TAGS}
        self.has_channels = None not in channels.values()
        self._tags = {i: token.encode() for token, i in channels.items() if i is not None} if self.has_channels else {}
        self.eos_ids = tuple(eos_ids)
        self.special_tokens = dict(special_tokens or {})
        self.num_ids = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        self._kept_texts = KeptTexts(partial(self.encode, add_special_tokens=False), _cutting_tokens(self._library))
        self.special_texts = tuple(token.content for token in added.values() if token.special)
        self.normalizes_specials = any(token.special and token.normalized for token in added.values())

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Read a folder's tokenizer; None if it has no tokenizer.json. Raises CheckpointError naming the file that is wrong."""
        manifest = Manifest.from_folder(folder)
        raw = read_small_file(folder, TOKENIZER_NAME, manifest)
        if raw is None:
            return None
        config = read_json(folder, TOKENIZER_CONFIG_NAME, manifest) or {}
        try:
            older = read_json(folder, SPECIAL_TOKENS_NAME, manifest) or {}
            text, added = with_added_tokens(raw, older | config)
            tokenizer = cls(text)
            for token, token_id in added.items():
                if tokenizer.id_of(token) != token_id:
                    raise ValueError(
                        f"{TOKENIZER_CONFIG_NAME} says that {short(token)} is id {token_id}, here it is {tokenizer.id_of(token)}"
                    )
        except ValueError as error:
            raise CheckpointError(f"{folder / TOKENIZER_NAME} cannot be used: {error}") from None
        except MemoryError:
            raise CheckpointError(f"{folder / TOKENIZER_NAME} cannot be used: there is not enough memory") from None
        tokenizer.special_tokens = special_tokens(older) | special_tokens(config)
        tokenizer.eos_ids = read_eos_ids(folder)
        # Fine-tuned models often end with a token that their config.json does not know; eot_token, of CodeLlama, ends what fills
        # the middle.
        ends = [tokenizer.special_tokens.get(name, "") for name in ("eos_token", "eot_token")]
        for token in (*ends, *(CHANNEL_ENDS if tokenizer.has_channels else end_names(tokenizer.special_texts))):
            end = tokenizer.id_of(token)
            if end is not None and end not in tokenizer.eos_ids and len(tokenizer.eos_ids) < MAX_EOS_IDS:
                tokenizer.eos_ids += (end,)
        return tokenizer

    def check_fits(self, vocab_size: int) -> None:
        """Raise CheckpointError unless every id of the tokenizer is a row of a vocabulary of `vocab_size`."""
        if self.num_ids > vocab_size:
            raise CheckpointError(
                f"{TOKENIZER_NAME} has ids up to {self.num_ids - 1}, but the model's vocabulary ends at {vocab_size - 1}; "
                "the tokenizer belongs to another model"
            )

    def id_of(self, token: str) -> int | None:
        """Id of a token given by its exact text in the vocabulary, or None."""
        found: int | None = self._library.token_to_id(token)
        return found

    def is_added(self, token_id: int) -> bool:
        """Whether a token was added to those of the model's text: marks of roles, tags, ends."""
        return token_id in self._added_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens such as BOS are added as tokenizer.json says; a rendered chat has them already.

        Other threads go on meanwhile. Raises RequestError if `text` holds lone surrogates, which no encoding of text can express.
        """
        _check_unicode(text)
        # A batch of one: `encode` keeps the interpreter lock and takes almost twice as long, for offsets that nobody wants.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _literal_texts(self) -> LiteralTexts:
        return LiteralTexts(self._library)

    def encode_chat(self, text: str, scope: str = "", foreign: Sequence[tuple[int, int]] = ()) -> list[int]:
        """`encode` of a rendered chat, in less time if it begins like one of the same `scope` before (kept_texts.py).

        `foreign`: runs of characters which, as letters of a special token, are letters only.
        """
        if not foreign:
            return self._kept_texts.encode(text, scope)
        _check_unicode(text)
        meant = self._literal_texts.meant_tokens(text, foreign)
        if meant == self._literal_texts.meant_tokens(text, ()):
            return self._kept_texts.encode(text, scope)
        return self._literal_texts.encode(text, meant, scope)

    def encode_literally(self, text: str) -> list[int]:
        """Ids of a text without any special token but those that are added to all texts: what `encode` gives if it has none."""
        _check_unicode(text)
        if not self._literal_texts.meant_tokens(text, ()):
            return self.encode(text)
        before, behind = around(self._library, partial(self.encode, add_special_tokens=False))
        return [*before, *self._literal_texts.encode(text, ()), *behind]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and ids that the tokenizer does not have."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = (
                None if token_id in self._special_ids or not 0 <= token_id < self.num_ids else self._library.id_to_token(token_id)
            )
            known = self._token_bytes[token_id] = b"" if token is None else self._bytes_of(token)
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """The same for texts of answers, in which the tags of channels have bytes, too."""
        return self._tags.get(token_id) or self.token_bytes(token_id)

    def first_bytes(self, token_id: int) -> bytes:
        """The same for the first token of a text, which with some decoders has no spaces."""
        if not self._bytes_of.dropped_first or self._tags.get(token_id) or not self.is_shown(token_id):
            return self.text_bytes(token_id)
        return self._bytes_of((self._library.id_to_token(token_id) or "").replace(self._bytes_of.dropped_first, ""))

    def is_shown(self, token_id: int) -> bool:
        """Whether a token counts as one of the text: special ones and those that the tokenizer does not have are left out."""
        return token_id not in self._special_ids and self._library.id_to_token(max(token_id, 0)) is not None

    def special_name(self, token_id: int) -> str:
        """What a special token is called, if answers show no text of it; else empty."""
        is_hidden = token_id in self._special_ids and not self.text_bytes(token_id)
        return self._library.id_to_token(token_id) or "" if is_hidden else ""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of a whole sequence."""
        ids = list(token_ids)
        pieces = list(map(self.text_bytes, ids))
        if (
            self._bytes_of.dropped_first
            and (first := next((i for i, one in enumerate(ids) if self.is_shown(one)), None)) is not None
        ):
            pieces[first] = self.first_bytes(ids[first])
        return self._bytes_of.strip_start(b"".join(pieces)).decode("utf-8", "replace")

    def stream(self, after: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder for ids that arrive one by one and continue the ids `after` (the prompt), whose text it does not repeat.

        Of a long prompt it looks at the first ids, where leading spaces end, and at the last, which may be part of a character.
        """
        decoder = IncrementalDecoder(self, self._bytes_of.num_stripped, awaits_first=bool(self._bytes_of.dropped_first))
        head, tail, num_bytes = 0, len(after), 0
        while head < len(after) and decoder.strips:
            decoder.push(after[head])
            head += 1
        while tail > head and num_bytes < _MOST_PENDING_BYTES:
            tail -= 1
            num_bytes += len(self.token_bytes(after[tail]))
        for token_id in after[tail:]:
            decoder.push(token_id)
        return decoder


class IncrementalDecoder:
    """Turns ids into text piece by piece: all pieces and the flush together are `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, num_stripped: int, *, awaits_first: bool) -> None:
        self._tokenizer, self._awaits_first = tokenizer, awaits_first
        self._to_strip = num_stripped  # leading spaces that may still have to go
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def strips(self) -> bool:
        """Whether spaces that come next would be leading ones, which go."""
        return self._to_strip > 0 or self._awaits_first

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty inside a character."""
        piece = self._tokenizer.first_bytes(token_id) if self._awaits_first else self._tokenizer.text_bytes(token_id)
        self._awaits_first = self._awaits_first and not self._tokenizer.is_shown(token_id)
        if self._to_strip and piece:
            kept = piece[: self._to_strip].lstrip(b" ") + piece[self._to_strip :]
            # Only an unbroken run of leading spaces counts: whatever else comes ends it.
            self._to_strip = 0 if kept else self._to_strip - len(piece)
            piece = kept
        return self._utf8.decode(piece)

    def special_name(self, token_id: int) -> str:
        """The name of a special token, which `push` gives no text; empty for others."""
        return self._tokenizer.special_name(token_id)

    def flush(self) -> str:
        """What an unfinished character at the end becomes. The decoder is then as new, but strips no leading space."""
        return self._utf8.decode(b"", final=True)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("invalid_text", f"the text is not valid Unicode: lone surrogate at character {error.start}") from None


def text_unavailable(folder: Path) -> RequestError:
    """The error for a request with text when the folder has no tokenizer."""
    other = " (its tokenizer.model must be converted to tokenizer.json)" if os.path.exists(folder / "tokenizer.model") else ""
    return RequestError("no_tokenizer", f"{folder} has no {TOKENIZER_NAME}{other}; give token ids instead of text")


def _refuse_dropout(parsed: Mapping[str, Any]) -> None:
    """A model with dropout gives another encoding of the same text each time."""
    model = parsed.get("model")
    dropout = model.get("dropout") if isinstance(model, dict) else None
    if dropout not in (None, 0):
        raise ValueError(f"its model has dropout {short(dropout)}, which is for training; set it to null")


def _cutting_tokens(library: tokenizers.Tokenizer) -> dict[str, int]:
    """Tokens at which the library cuts a text whatever stands beside them, before it normalizes it."""
    found = {token.content: i for i, token in library.get_added_tokens_decoder().items() if not token.normalized}
    return found if cuts_everywhere(library) else {}


def _load_library(raw: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(raw)
    except BaseException as error:  # the library raises bare Exception, and its panics derive from BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ValueError(f"the tokenizers library refuses it: {short(str(error), 200)}") from None
    library.no_truncation()  # a tokenizer.json saved during training may cut or pad every text
    library.no_padding()
    return library


# ---- tokens to bytes ----
def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True)
class _ByteDecoder:
    """What the `decoder` of a tokenizer.json does to one token, on bytes. Byte-level BPE, or replacements and byte fallback."""

    alphabet: Mapping[str, int] | None  # byte-level BPE; None: the other kind
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    num_stripped: int = 0  # leading spaces taken off the whole text
    dropped_first: str = ""  # what stands for a space, and is left out of the first token

    def __call__(self, token: str) -> bytes:
        if self.alphabet is not None:
            values = [self.alphabet.get(character, -1) for character in token]
            return token.encode("utf-8") if -1 in values else bytes(values)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    def strip_start(self, whole: bytes) -> bytes:
        return whole[: self.num_stripped].lstrip(b" ") + whole[self.num_stripped :]

    @classmethod
    def from_json(cls, parsed: Mapping[str, Any]) -> _ByteDecoder:
        """Read the `decoder` of a tokenizer.json. Raises ValueError if its output is not simply made of tokens' bytes."""
        decoder = parsed.get("decoder") or {}
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(_byte_level_alphabet())
        replacements, fused, num_stripped, dropped_first = [], False, 0, ""
        for step in steps:
            kind = step.get("type")
            if kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
                replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Strip" and fused and step.get("content") == " " and step.get("stop") == 0:
                num_stripped = int(step["start"])
            elif kind == "Fuse":
                fused = True
            elif kind == "Metaspace" and not fused and isinstance(step.get("replacement"), str):
                replacements.append((step["replacement"], " "))
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                dropped_first = "" if scheme == "never" else step["replacement"]
            elif kind != "ByteFallback":
                supported = "ByteLevel, or Metaspace, Replace, ByteFallback, Fuse, Strip"
                raise ValueError(f"its decoder {kinds} is not supported; supported: {supported}")
        return cls(None, tuple(replacements), "ByteFallback" in kinds, num_stripped, dropped_first)
