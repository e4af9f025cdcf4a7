"""`kog-bench quality --kv`: what a model loses when its KV cache is rounded: perplexity of a text; logits and KL to 16 bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.bench.files import read_text_of
from kog_dist.bench.report import finish, machine
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.decode.plan.plan import make_plan
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams

CHUNK_TOKENS: Final = 512  # of the text, each with an empty KV cache
_WITH: Final = "float16"  # what others are compared with
_TYPES: Final = (_WITH, "bfloat16", *KV_FORMATS)


def run(model: Path, text: Path, *, num_tokens: int) -> None:
    """Measure all types on the same tokens; prints a line for each, then the JSON object."""
    before, checkpoint, tokenizer = machine(), open_checkpoint(model), Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, and quality is measured on texts; give a folder with one")
    ids = list(tokenizer.encode(read_text_of(text)))[:num_tokens]
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), keeps_halves=host_library.library() is not None)
    plan = make_plan(checkpoint.spec, 1)
    engines = {name: Interpreter(plan, 0, weights, None, kv_dtype=name) for name in _TYPES}
    scores: dict[str, list[tuple[float, float, float, bool]]] = {name: [] for name in _TYPES}
    for first in range(0, len(ids), CHUNK_TOKENS):
        for position, (token, following) in enumerate(itertools.pairwise(ids[first : first + CHUNK_TOKENS])):
            found = {name: _logits(engine, token, position) for name, engine in engines.items()}
            for name, scored in scores.items():
                scored.append(_compared(found[name], found[_WITH], following))
    figures = [_figure(name, scored, checkpoint.spec.head_dim) for name, scored in scores.items()]
    for figure in figures:
        print(
            f"{figure['kv_dtype']:<9} {figure['bits_per_value']:5.2f} bits, perplexity {figure['perplexity']:.3f}, logits off by "
            f"{figure['logit_error']:.1e}, KL {figure['kl']:.4f}, {figure['same_tokens_percent']:.1f} % of the tokens"
        )
    finish("kv-quality", {"model": model.name, "text": text.name, "text_tokens": len(ids)}, before, figures)


def bits_per_value(name: str, head_dim: int) -> float:
    """What a cache of this type takes, scales included, keys and values together."""
    of_row = 16 / head_dim
    return {"fp8": 8 + of_row, "int4": (6 + 4) / 2 + of_row}.get(name, 16.0)


def _logits(engine: Interpreter, token: int, position: int) -> NDArray[np.float64]:
    logits = engine.step(token, position, SamplingParams(), gather_logits=True).logits
    assert logits is not None
    return logits.astype(np.float64)


def _log_probabilities(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _compared(ours: NDArray[np.float64], theirs: NDArray[np.float64], following: int) -> tuple[float, float, float, bool]:
    """Of logits: minus the logarithm of the next token's probability; the relative error |ours - theirs| / |theirs|;
    KL(theirs || ours); whether the most likely token is the same.
    """
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    found, wanted = _log_probabilities(ours), _log_probabilities(theirs)
    kl = float((np.exp(wanted) * (wanted - found)).sum())
    return -float(found[following]), error, kl, bool(ours.argmax() == theirs.argmax())


def _figure(name: str, scored: Sequence[tuple[float, float, float, bool]], head_dim: int) -> dict[str, Any]:
    losses, errors, kls, same = zip(*scored, strict=True)
    return {
        "kv_dtype": name,
        "bits_per_value": bits_per_value(name, head_dim),
        "perplexity": math.exp(sum(losses) / len(losses)),
        "logit_error": sum(errors) / len(errors),
        "most_logit_error": max(errors),
        "kl": sum(kls) / len(kls),
        "most_kl": max(kls),
        "same_tokens_percent": 100 * sum(same) / len(same),
    }
