"""A tokenizer of any size that nobody has trained: every byte, then pieces of words. For models with random weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from kog_dist.errors import ConfigError

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + '\\n' + message.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int, whole: Sequence[str] = (), *, chats: bool = False) -> int:
    """Write tokenizer.json and generation_config.json. Returns the id that ends an answer, the last; 257 ids at least.

    Ids below 256 are the bytes. Then come the texts `whole`, each of which is one token wherever a prompt has it. The others are
    words' pieces with a space before every second one: what a JSON text may hold. `chats`: with a chat template, too, which ends
    every message with that last id, and no newline in front of an answer: models with tied random tables repeat what is last.
    """
    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    for text in whole:
        vocabulary[text] = len(vocabulary)
    num_free = vocab_size - 1 - len(vocabulary)
    if num_free < 0:
        raise ConfigError(f"a vocabulary of {vocab_size} has no room for {len(whole)} tokens besides the bytes")
    for piece in itertools.islice((one for one in _pieces(alphabet[ord(" ")]) if one not in vocabulary), num_free):
        vocabulary[piece] = len(vocabulary)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in whole])
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))
    if chats:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": _CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return vocab_size - 1


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE: the printable character that stands for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _pieces(space: str) -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            yield "".join(letters)
            yield space + "".join(letters)
