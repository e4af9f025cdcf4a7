"""The byte-level BPE of the demo model, with a pre-tokenizer that knows Python's layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from kog_dist.train.cleaning import END_OF_TEXT

# In this order: blank lines; an indentation or other run of blanks as one piece, apart from the word behind it, so that a
# prompt may end anywhere in the layout; __dunder__; words with the space, dot or underscores in front; short numbers;
# punctuation; anything left.
_PIECES = (r"\n+", r" {2,}|\t+", r"__\p{L}+__", r" ?\.?_{0,2}\p{L}+", r" ?\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r"\s")


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> LibraryTokenizer:
    """A tokenizer of at most `vocab_size` ids, the first of them special tokens. Any bytes can be encoded."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
