"""`kog-bench quality`: what a model loses when its weights are quantised: perplexity of a text, and greedy choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.bench.files import read_text_of
from kog_dist.bench.report import finish, machine
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import Array
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.head import head_format
from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.model.weight_bytes import bytes_per_token
from kog_dist.sampling_params import SamplingParams

Scores = NDArray[np.float32]  # (positions, vocabulary)
CHUNK_TOKENS: Final = 512  # of the text, each with an empty KV cache
# As people download them; a matrix is rounded to nearest, without calibration.
FORMS: Final[Mapping[str, WeightFormat | None]] = {
    "none": None,
    "fp8-block": WeightFormat("E4M3", 128, 128, "F32"),
    "fp8-row": WeightFormat("E4M3", 1, 0, "F32"),
    "fp8-tensor": WeightFormat("E4M3", 0, 0, "F32"),
    "int4-128": WeightFormat("INT4", 1, 128, "F16"),
    "int4-128-zeros": WeightFormat("INT4", 1, 128, "F16", has_zeros=True),
    "int4-32": WeightFormat("INT4", 1, 32, "F16"),
    "mxfp4": MXFP4,
}
_HEAD: Final = "+head8"  # behind a form's name, or alone: the LM head in INT8, too
_WITH_HEAD: Final = ("none", "fp8-block", "int4-128")
CHOICES: Final = (*FORMS, *(f"{name}{_HEAD}" for name in _WITH_HEAD))
PROMPTS: Final = (
    "The capital of France is", "Photosynthesis is the process by which", "def fibonacci(n):", "Copper is used for",
    "Hamlet was written by", "The sky is blue because", "Once upon a time", "To boil an egg, first", "Water freezes at",
    "The quick brown fox", "HTTP stands for", "A binary search works by", "The largest planet is", "In 1969, humans first",
    "The heart pumps blood", "SELECT name FROM", "The opposite of hot is", "import numpy as np\n", "Dear Sir or Madam,",
    "The recipe calls for two cups of",
)  # fmt: skip


class _Texts(NamedTuple):
    chunks: list[list[int]]  # of the text
    prompts: list[list[int]]


class _Outputs(NamedTuple):
    scores: list[Scores]  # of each chunk
    answers: list[list[int]]


def run(model: Path, text: Path, *, num_tokens: int, answer_tokens: int, forms: Sequence[str]) -> None:
    """Measure each form, the unquantised weights first; prints a line for each, then the JSON object."""
    before = machine()
    checkpoint, tokenizer = open_checkpoint(model), Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, and quality is measured on texts")
    if checkpoint.quantisation is not None:
        raise ConfigError(
            f"the weights of {model} are quantised already ({checkpoint.quantisation}); give the unquantised folder"
        )
    ids = list(tokenizer.encode(read_text_of(text)))[:num_tokens]
    chunks = [ids[at : at + CHUNK_TOKENS] for at in range(0, len(ids), CHUNK_TOKENS)]
    texts = _Texts(chunks, [list(tokenizer.encode(prompt)) for prompt in PROMPTS])
    plain: _Outputs | None = None
    figures = []
    for name in ("none", *(form for form in forms if form != "none")):
        of_layers = name.removesuffix(_HEAD)
        head = head_format("none" if of_layers == name else "int8", checkpoint.spec)
        rounded = replace(checkpoint, rounding=FORMS[of_layers], head_rounding=head)
        figure, found = _measure(rounded, name, texts, plain, answer_tokens)
        plain = found if plain is None else plain
        figures.append(figure)
        print(
            f"{name:<15} {figure['bits_per_weight']:5.2f} bits, {figure['mb_per_token']:7.1f} MB per token, perplexity "
            f"{figure['perplexity']:.3f}, KL {figure['kl']:.4f}, {figure['same_tokens_percent']:.1f} % of the tokens, "
            f"{figure['same_answers']} of {len(PROMPTS)} answers",
            flush=True,
        )
    configuration = {"model": model.name, "text": text.name, "text_tokens": len(ids), "answer_tokens": answer_tokens}
    finish("quality", configuration, before, figures)


def _measure(
    checkpoint: Checkpoint, name: str, texts: _Texts, plain: _Outputs | None, answer_tokens: int
) -> tuple[dict[str, object], _Outputs]:
    """The figures of one form, and its outputs: greedy choices of its own answers, or after each token of `plain`'s."""
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), keeps_halves=host_library.library() is not None)
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None)
    scores = [_scores(engine, chunk) for chunk in texts.chunks]
    losses = [loss for chunk, of_chunk in zip(texts.chunks, scores, strict=True) for loss in _losses(of_chunk, chunk)]
    found = [
        _choices(engine, prompt, answer_tokens, None if plain is None else plain.answers[index])
        for index, prompt in enumerate(texts.prompts)
    ]
    others, theirs_of = (found, scores) if plain is None else (plain.answers, plain.scores)
    divergences = [kl for ours, theirs in zip(scores, theirs_of, strict=True) for kl in _divergences(theirs, ours)]
    same = [ours == theirs for mine, yours in zip(found, others, strict=True) for ours, theirs in zip(mine, yours, strict=True)]
    form = checkpoint.rounding
    lane = checkpoint.layouts["model.layers.0.feed_forward.w2.weight"].shape[1:]
    figure = {
        "form": name,
        "weights": str(form or checkpoint.dtype),
        "head": str(checkpoint.head_rounding or checkpoint.dtype),
        "bits_per_weight": 16.0 if form is None else 8 * form.num_bytes(*lane) / math.prod(lane),
        "mb_per_token": bytes_per_token(checkpoint) / 1e6,
        "perplexity": math.exp(sum(losses) / len(losses)),
        "kl": sum(divergences) / len(divergences),
        "same_tokens_percent": 100 * sum(same) / len(same),
        "same_answers": sum(ours == theirs for ours, theirs in zip(found, others, strict=True)),
    }
    return figure, _Outputs(scores, found)


def _scores(engine: Interpreter, ids: list[int]) -> Scores:
    """Logarithms of all tokens' probabilities after each of `ids` but the last."""
    found = np.empty((len(ids) - 1, engine.plan.spec.vocab_size), np.float32)
    for position, (token, row) in enumerate(zip(ids, found, strict=False)):
        logits = _logits(engine, token, position).astype(np.float64)
        logits -= logits.max()
        row[:] = logits - np.log(np.exp(logits).sum())
    return found


def _losses(scores: Scores, ids: list[int]) -> list[float]:
    """Of every token but the first: minus the logarithm of its probability after those before it."""
    return [-float(row[following]) for row, following in zip(scores, ids[1:], strict=True)]


def _divergences(theirs: Scores, ours: Scores) -> list[float]:
    """KL(theirs || ours) of every position."""
    return [float((np.exp(mine.astype(np.float64)) * (mine - other)).sum()) for mine, other in zip(theirs, ours, strict=True)]


def _choices(engine: Interpreter, prompt: list[int], num_tokens: int, answer: list[int] | None) -> list[int]:
    """What is most likely after the prompt and after every token of `answer`; None: after those that were chosen."""
    for position, token in enumerate(prompt[:-1]):
        engine.step(token, position, None)
    token, chosen = prompt[-1], list[int]()
    for index in range(num_tokens):
        chosen.append(int(_logits(engine, token, len(prompt) - 1 + index).argmax()))
        token = chosen[-1] if answer is None else answer[index]
    return chosen


def _logits(engine: Interpreter, token: int, position: int) -> Array:
    output = engine.step(token, position, SamplingParams(), gather_logits=True)
    assert output.logits is not None
    return output.logits
