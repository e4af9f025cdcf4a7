"""`kog-bench quality --needle`: numbers hidden in a long text, asked for at its end, with each format of the KV cache.

The torch oracle reads the text once for each format, in chunks, and is asked for every number behind what it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kog_dist.bench.files import read_text_of
from kog_dist.bench.report import finish, machine
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.errors import ConfigError
from kog_dist.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kog_dist.model.laneformer import Laneformer

NUMBERS: Final = {
    "Lisbon": "48213", "Oslo": "90417", "Cairo": "27586", "Quito": "63049", "Delhi": "15872", "Perth": "74390", "Turin": "36908",
    "Lagos": "81265", "Seoul": "52741", "Boston": "69134",
}  # fmt: skip
_CHUNK_TOKENS: Final = 512
_QUESTION: Final = "\n\nThe secret number of {} is"


def run(model: Path, text: Path, *, num_tokens: int) -> None:
    """Measure 16 bit and each format at 5 %, 15 %, ... of the text; prints a line for each, then the JSON object."""
    import torch

    from kog_dist.model.laneformer import Laneformer

    before, tokenizer = machine(), Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, and numbers are hidden in a text; give a folder with one")
    ids = haystack(tokenizer, read_text_of(text), num_tokens)
    questions = {city: tokenizer.encode(_QUESTION.format(city)) for city in NUMBERS}
    most_tokens = len(tokenizer.encode(" 00000")) + 1
    oracle = Laneformer.from_checkpoint(model)
    context = oracle.spec.max_context
    if len(ids) + max(map(len, questions.values())) + most_tokens > context:
        raise ConfigError(f"a text of {num_tokens} tokens and a question exceed the model's context of {context}; lower --tokens")
    figures = []
    with torch.inference_mode():
        for name in ("float16", *KV_FORMATS):
            oracle.round_keys_and_values(name if name in KV_FORMATS else torch.float16)
            answers = [tokenizer.decode(answer) for answer in _answers(oracle, ids, list(questions.values()), most_tokens)]
            found = [number in answer for number, answer in zip(NUMBERS.values(), answers, strict=True)]
            figures.append({"kv_dtype": name, "found": sum(found), "of": len(found), "at": found, "answers": answers})
            print(
                f"{name:<8} {sum(found)} of {len(found)} numbers, in the order of the text {''.join('.x'[one] for one in found)}"
            )
    finish("needle", {"model": model.name, "text": text.name, "tokens": len(ids)}, before, figures)


def haystack(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[int]:
    """So many tokens of a text, which is repeated if it is shorter, with a sentence for each number in equal distances."""
    filler = list(tokenizer.encode(text))
    needles = [list(tokenizer.encode(f"\nThe secret number of {city} is {number}.\n")) for city, number in NUMBERS.items()]
    room = num_tokens - sum(map(len, needles))
    if room < len(needles) or not filler:
        raise ConfigError(f"{num_tokens} tokens have no room for {len(needles)} numbers and a text; raise --tokens")
    filler = (filler * (room // len(filler) + 1))[:room]
    ids, at = list[int](), 0
    for index, needle in enumerate(needles):
        depth = room * (2 * index + 1) // (2 * len(needles))
        ids += filler[at:depth] + needle
        at = depth
    return ids + filler[at:]


def _answers(oracle: Laneformer, ids: Sequence[int], questions: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The most likely tokens after the text and each question by itself."""
    import torch

    from kog_dist.model.laneformer import KvCache

    cache = KvCache()
    for at in range(0, len(ids), _CHUNK_TOKENS):
        oracle.streams(torch.tensor([ids[at : at + _CHUNK_TOKENS]]), cache)
    answers = []
    for question in questions:
        cache.num_tokens = len(ids)
        answer, newest = list[int](), list(question)
        for _ in range(num_tokens):
            stream = oracle.streams(torch.tensor([newest]), cache)
            newest = [int(oracle.logits(stream[:, :, -1:])[0, -1].argmax())]
            answer += newest
        answers.append(answer)
    return answers
