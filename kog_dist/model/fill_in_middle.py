"""Fill-in-the-middle: a model that was trained to write what belongs between two texts has three tokens for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass

# What stands before the text before, before the text after, and where the model begins; the order is the same in all families.
_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_NO_SPACE: Final = "\N{WHITE SMILING FACE}"  # a text that begins with this gets no blank in front, which SentencePiece adds


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The three tokens. `is_sentencepiece`: texts would get a blank in front."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    is_sentencepiece: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        """Those of a tokenizer; None if it has none."""
        for marks in _MARKS:
            prefix_id, suffix_id, middle_id = map(tokenizer.id_of, marks)
            if prefix_id is not None and suffix_id is not None and middle_id is not None:
                return cls(prefix_id, suffix_id, middle_id, marks[0].startswith("▁"))
        return None

    def bare(self, text: str, encode: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        """Ids of one of the two texts. `encode`: without special tokens."""
        if not text:
            return ()
        if not self.is_sentencepiece:
            return encode(text)
        return encode(_NO_SPACE + text)[len(encode(_NO_SPACE)) :]

    def around(self, before_ids: Sequence[int], after_ids: Sequence[int]) -> list[int]:
        """The prompt behind which a model writes the middle, but for the beginning of all its texts."""
        return [self.prefix_id, *before_ids, self.suffix_id, *after_ids, self.middle_id]
