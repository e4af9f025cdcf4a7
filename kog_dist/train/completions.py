"""`evaluate`: how many completions of held-out functions are valid Python."""

from __future__ import annotations

import ast
import re
import textwrap
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
from kog_dist.train.corpus import END_OF_TEXT
from kog_dist.train.prepare import HeldOutFunction
from kog_dist.train.state import load_progress, load_tensors

# A line at the function's own margin ends it, unless it closes a bracket or string that was opened inside. Methods are shown
# with the margin that they have in a class: a model that has only seen them there would go on with the next one.
_DEDENT = {
    "": re.compile(r"\n(?=[^\s)\]}\"'#])"),
    "    ": re.compile(r"\n {0,4}(?=[^\s)\]}\"'#])"),
}


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
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    margins = [_margin(function) for function in functions]
    prompts = [textwrap.indent(function.prompt, margin) for function, margin in zip(functions, margins, strict=True)]
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
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
                generated = "\n" + tokenizer.decode(rows[row][prompt_sizes[row] :])
                ended[row] = token_id == end_id or _DEDENT[margins[row]].search(generated) is not None
        position += 1
        kept = [slot for slot, row in enumerate(active) if not ended[row] and len(rows[row]) < prompt_sizes[row] + max_new_tokens]
        if len(kept) < len(active):
            cache.keep_rows(torch.tensor(kept, device=device, dtype=torch.long))
            active = [active[slot] for slot in kept]
        pieces = torch.tensor([[rows[row][position - 1]] for row in active], device=device)
    return [
        _judge(function, margin, tokenizer.decode(row[size:]), done)
        for function, margin, row, size, done in zip(functions, margins, rows, prompt_sizes, ended, strict=True)
    ]


def summary(completions: Sequence[Completion]) -> dict[str, Any]:
    """Counts and the share that parses, with every completion, as JSON."""
    return {
        "num_functions": len(completions),
        "num_parsed": sum(c.parses for c in completions),
        "num_ended_parsed": sum(c.parses and c.ended for c in completions),
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


def _margin(function: HeldOutFunction) -> str:
    node = ast.parse(function.source).body[0]
    assert isinstance(node, ast.FunctionDef)
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return "    " if names[:1] in (["self"], ["cls"]) else ""


def _judge(function: HeldOutFunction, margin: str, generated: str, ended: bool) -> Completion:
    """Cut the text behind the function and parse it; a completion without a single line of its own counts as failed.

    What hit the limit loses its last, unfinished line.
    """
    body = _DEDENT[margin].split("\n" + generated, maxsplit=1)[0][1:]
    if not ended:
        body = body.rsplit("\n", 1)[0] + "\n" if "\n" in body else ""
    text = textwrap.indent(function.prompt, margin) + body.rstrip() + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("class Parent:\n" + text if margin else text)
        parses = bool(body.strip())
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
