"""Finds tags in an answer: by token id where the vocabulary has them, else by their letters.

Of a vocabulary that has a tag, the same letters from other tokens are a quotation, and text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class Tag:
    """`text`: what the answer shows of it, nothing of a special token. `num_before`: tokens of the answer before it, where it is
    one itself.
    """

    name: str
    text: str
    num_before: int | None = None


END = Tag("", "")  # of the answer
Symbol: TypeAlias = str | Tag  # one character, or a tag


class TagFinder:
    """Cuts one answer into text and tags. `push` gets token ids and text, which may lag behind the ids."""

    def __init__(self, names: Sequence[str], tokenizer: Tokenizer | None = None, prompt_ids: Sequence[int] = ()) -> None:
        """`names`: as the model writes them. Without a tokenizer letters are tags."""
        ids = {name: None if tokenizer is None else tokenizer.id_of(name) for name in names}
        self._by_id: Mapping[int, Tag] = {
            token_id: Tag(name, tokenizer.text_bytes(token_id).decode("utf-8", "replace"), num_before=0)
            for name, token_id in ids.items()
            if token_id is not None and tokenizer is not None
        }
        self._letters = sorted((name for name, token_id in ids.items() if token_id is None), key=len, reverse=True)
        self._beginnings = frozenset(name[:length] for name in self._letters for length in range(1, len(name)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self._letters))) if self._letters else None
        self._decoder = tokenizer.stream(after=prompt_ids) if tokenizer is not None and self._by_id else None
        self._num_decoded = self._num_tokens = 0  # characters and tokens so far
        self._places: deque[tuple[int, Tag]] = deque()  # where tags that have been seen as ids begin
        self._text = ""  # not cut yet
        self._begin = 0  # where it begins in the answer

    def push(self, token_ids: Sequence[int], text: str) -> list[str | Tag]:
        """What is certain: texts of any length, and tags."""
        if self._decoder is not None:
            for token_id in token_ids:
                self._num_decoded += len(self._decoder.push(token_id))
                tag = self._by_id.get(token_id)
                if tag is not None:
                    self._places.append((self._num_decoded - len(tag.text), replace(tag, num_before=self._num_tokens)))
                self._num_tokens += 1
        self._text += text
        return self._cut(is_end=False)

    def finish(self) -> list[str | Tag]:
        """What was held back, and the end."""
        return [*self._cut(is_end=True), END]

    def _cut(self, *, is_end: bool) -> list[str | Tag]:
        found: list[str | Tag] = []
        while self._places:
            place, tag = self._places[0]
            num_before = place - self._begin
            if num_before + len(tag.text) > len(self._text):
                break
            self._places.popleft()
            self._by_letters(self._text[:num_before], found, is_end=True)
            self._begin = place + len(tag.text)
            self._text = self._text[num_before + len(tag.text) :]
            found.append(tag)
        num_free = len(self._text)
        if self._places and not is_end:
            num_free = min(num_free, self._places[0][0] - self._begin)
        rest = self._by_letters(self._text[:num_free], found, is_end=is_end or bool(self._places))
        self._text = self._text[num_free - rest :]
        self._begin += num_free - rest
        return found

    def _by_letters(self, text: str, found: list[str | Tag], *, is_end: bool) -> int:
        """Cut a text without tokens that are tags; how many characters at its end may become a tag, and are left out."""
        if self._pattern is None:
            if text:
                found.append(text)
            return 0
        begin = 0
        for match in self._pattern.finditer(text):
            if match.start() > begin:
                found.append(text[begin : match.start()])
            found.append(Tag(match[0], match[0]))
            begin = match.end()
        num_held = 0 if is_end else self._num_held(text[begin:])
        if begin < len(text) - num_held:
            found.append(text[begin : len(text) - num_held])
        return num_held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a tag begins with."""
        tail = text[-self._longest :]
        return next((len(tail) - begin for begin in range(len(tail)) if tail[begin:] in self._beginnings), 0)
