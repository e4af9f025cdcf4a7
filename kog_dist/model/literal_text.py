"""Token ids of texts in which the letters of special tokens are letters, but for the places where such a token is meant."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from kog_dist.model.added_tokens import TOKENIZER_NAME
from kog_dist.model.kept_texts import KeptTexts
from kog_dist.model_limits import FILES
from kog_dist.strict_json import parse_object

_NAME = range(0xF0000, 0xFFFFE)  # private use: characters of the names that special tokens have here
_MASK = "\uffff"  # no character


class LiteralTexts:
    """A tokenizer like `library`, but its special tokens have other names, nobody knows which. Texts get them where one is meant.
    Nothing else is different, so what lies between two tokens has the ids that the library gives to any text there.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        added = library.get_added_tokens_decoder()
        self._library, self._model = library, library.model
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._is_normalized = any(token.special and token.normalized for token in added.values())
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)  # as the library chooses
        self._tag = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        unknown = getattr(self._model, "unk_token", None)
        self._leaks = set(self._special.values()) - {self._special.get(unknown) if isinstance(unknown, str) else None}
        self._rename()

    def _rename(self) -> None:
        """Make new names, and the tokenizer that knows them."""
        prefix = "".join(chr(secrets.choice(_NAME)) for _ in range(4))
        self._prefix = prefix
        self._names = {content: prefix + chr(_NAME[place]) for place, content in enumerate(self._special)}
        self._encoder = tokenizers.Tokenizer(self._model)
        for part in ("normalizer", "pre_tokenizer"):
            if (given := getattr(self._library, part)) is not None:
                setattr(self._encoder, part, given)
        self._ids: dict[int, int] = {}  # ids that added tokens have here, and in the library
        for token_id, token in sorted(self._library.get_added_tokens_decoder().items()):
            name = self._names[token.content] if token.special else token.content
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            self._encoder.add_tokens([tokenizers.AddedToken(name, special=False, **flags)])
            here = self._encoder.token_to_id(name)
            assert here is not None, "it was added"
            self._ids[here] = token_id
        tags = {self._names[content]: token_id for content, token_id in self._special.items()}
        self._kept_texts = KeptTexts(self._encode, tags if cuts_everywhere(self._library) else {})

    def meant_tokens(self, text: str, foreign: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """The special tokens that the library would find, were `foreign` runs of characters no letters: begin, end and id."""
        pieces, last = [], 0
        for begin, end in foreign:
            pieces += [text[last:begin], _MASK * (end - begin)]
            last = end
        text = "".join([*pieces, text[last:]])
        if not self._is_normalized:
            found = [(*match.span(), self._special.get(match[0])) for match in self._tag.finditer(text)]
            return [(begin, end, token_id) for begin, end, token_id in found if token_id is not None]
        encoding = self._library.encode(text, add_special_tokens=False)
        known = self._special.values()
        return [(*span, token_id) for token_id, span in zip(encoding.ids, encoding.offsets, strict=True) if token_id in known]

    def encode(self, text: str, meant: Sequence[tuple[int, int, int]], scope: str = "") -> list[int]:
        """Ids of the text with these special tokens and no others."""
        while self._prefix in text:
            self._rename()
        contents = {token_id: content for content, token_id in self._special.items()}
        pieces, last = [], 0
        for begin, end, token_id in meant:
            pieces += [text[last:begin], self._names[contents[token_id]]]
            last = end
        ids = self._kept_texts.encode("".join([*pieces, text[last:]]), scope)
        if sum(token_id in self._leaks for token_id in ids) > sum(token_id in self._leaks for *_, token_id in meant):
            self._forget_specials()
            return self.encode(text, meant, scope)
        return ids

    def _encode(self, text: str) -> list[int]:
        (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]

    def _forget_specials(self) -> None:
        """Go on with a model that makes no special token of any text: some find them as pieces like any others."""
        model = parse_object(self._library.to_str().encode(), FILES[TOKENIZER_NAME].num_items)["model"]
        gone = {content for content, token_id in self._special.items() if token_id in self._leaks}
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {self._prefix + piece if piece in gone else piece: token_id for piece, token_id in vocab.items()}
        else:
            model["vocab"] = [[self._prefix + piece if piece in gone else piece, score] for piece, score in vocab]
        if "merges" in model:
            pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if gone.isdisjoint((*pair, "".join(pair)))]
        bare: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
        bare |= {"pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
        self._model, self._leaks = tokenizers.Tokenizer.from_str(json.dumps(bare)).model, set()
        self._rename()


def cuts_everywhere(library: tokenizers.Tokenizer) -> bool:
    """Whether the library cuts texts at its added tokens whatever stands beside them; not where some take spaces beside them or
    want to stand alone.
    """
    added = [token for token in library.get_added_tokens_decoder().values() if not token.normalized]
    return not any(token.lstrip or token.rstrip or token.single_word for token in added)


def around(library: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """What the library puts before the ids of a text, and behind them. `encode`: ids of a text without them."""
    inner, outer = encode("a"), library.encode("a").ids
    begin = next((place for place in range(len(outer)) if outer[place : place + len(inner)] == inner), 0)
    return outer[:begin], outer[begin + len(inner) :]
