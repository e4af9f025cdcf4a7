"""`evaluate`: how many completions of held-out functions are valid Python."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.model.spec import ModelSpec
from kog_dist.train.prepare import HeldOutFunction
from kog_dist.train.state import load_progress, load_tensors

# A line at the left margin ends a function, unless it closes a bracket or string that was opened inside.
_DEDENT = re.compile(r"\n(?=[^\s)\]}\"'#])")


@dataclass(frozen=True)
class Completion:
    """A function whose start was given and whose rest was generated. `ended`: by dedent or end of text, not by the limit."""

    project: str
    prompt: str
    text: str
    ended: bool
    parses: bool


def complete_functions(
    module: Laneformer,
    tokenizer: Any,
    functions: Sequence[HeldOutFunction],
    *,
    temperature: float = 0.2,
    seed: int = 0,
    max_new_tokens: int = 320,
) -> list[Completion]:
    """Generate the rest of each function; all rows advance together, so that a shorter prompt just starts to generate earlier."""
    end_id = tokenizer.token_to_id("<|endoftext|>")
    rows = [tokenizer.encode(function.prompt).ids for function in functions]
    prompt_sizes = [len(row) for row in rows]
    device = module.cos.device
    generator = torch.Generator(device=device).manual_seed(seed)
    active = list(range(len(rows)))
    ended = [False] * len(rows)
    cache = KvCache()
    position = min(prompt_sizes)
    pieces = torch.tensor([row[:position] for row in rows], device=device)
    while active:
        with torch.no_grad():
            logits = module(pieces, cache)[:, -1]
        drawn = _draw(logits, temperature, generator)
        for slot, token_id in enumerate(drawn):
            row = active[slot]
            if len(rows[row]) == position:
                rows[row].append(token_id)
                ended[row] = token_id == end_id or _dedented(tokenizer, rows[row], prompt_sizes[row])
        position += 1
        kept = [slot for slot, row in enumerate(active) if not ended[row] and len(rows[row]) < prompt_sizes[row] + max_new_tokens]
        if len(kept) < len(active):
            cache.keep_rows(torch.tensor(kept, device=device, dtype=torch.long))
            active = [active[slot] for slot in kept]
        pieces = torch.tensor([[rows[row][position - 1]] for row in active], device=device)
    return [
        _judge(function, tokenizer.decode(row[size:]), done)
        for function, row, size, done in zip(functions, rows, prompt_sizes, ended, strict=True)
    ]


def summary(completions: Sequence[Completion]) -> dict[str, Any]:
    """Counts and the share that parses, with every completion, as JSON."""
    return {
        "num_functions": len(completions),
        "num_parsed": sum(c.parses for c in completions),
        "num_cut_at_limit": sum(not c.ended for c in completions),
        "parse_share": round(sum(c.parses for c in completions) / max(1, len(completions)), 4),
        "completions": [asdict(c) for c in completions],
    }


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    if temperature == 0:
        drawn = logits.argmax(-1)
    else:
        drawn = torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)[:, 0]
    return [int(token_id) for token_id in drawn]


def _dedented(tokenizer: Any, row: Sequence[int], prompt_size: int) -> bool:
    return _DEDENT.search("\n" + tokenizer.decode(row[prompt_size:])) is not None


def _judge(function: HeldOutFunction, generated: str, ended: bool) -> Completion:
    """Cut the text behind the function and parse it; a completion without a single line of its own counts as failed.

    What hit the limit loses its last, unfinished line.
    """
    body = _DEDENT.split("\n" + generated, maxsplit=1)[0][1:]
    if not ended:
        body = body.rsplit("\n", 1)[0] + "\n" if "\n" in body else ""
    text = function.prompt + body.rstrip() + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.parse(text)
        parses = bool(body.strip()) and len(parsed.body) == 1
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parses = False
    return Completion(function.project, function.prompt, text, ended, parses)


def load_module(model: Path | None, state: Path | None) -> Laneformer:
    """The model of a checkpoint folder or of a training state, float32. Raises ConfigError unless exactly one is given."""
    if (model is None) == (state is None):
        raise ConfigError("give either a model folder or a training state to judge")
    if model is not None:
        return Laneformer.from_checkpoint(model)
    assert state is not None
    progress = load_progress(state)
    if progress is None:
        raise CheckpointError(f"{state} has no progress.json; run `python -m kog_dist.train run` first")
    module = Laneformer(ModelSpec.from_config(progress["spec"]), seed=None)
    module.load_state_dict(load_tensors(state, "weights"))
    return module
