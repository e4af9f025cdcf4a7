"""`evaluate`: how many completions of held-out functions are valid Python, and how many do what the originals do."""

from __future__ import annotations

import ast
import os
import re
import textwrap
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.published_config import read_config
from kog_dist.records import dataclass
from kog_dist.train.cleaning import margin
from kog_dist.train.generate import Continuation, continue_texts
from kog_dist.train.held_out import HeldOutFunction
from kog_dist.train.state import load_progress, load_tensors

# A line at the function's own margin ends it, unless it closes a bracket or string that was opened inside. Methods are shown
# with the margin that they have in a class: a model that has only seen them there would go on with the next one.
_DEDENT = {
    "": re.compile(r"\n(?=[^\s)\]}\"'#])"),
    "    ": re.compile(r"\n {0,4}(?=[^\s)\]}\"'#])"),
}

_OPEN_END = re.compile(r"(^[^\n]*:[ ]*\n+)*[^\n]*\Z", re.MULTILINE)


@dataclass(frozen=True)
class Completion:
    """A function whose start was given and whose rest was generated.

    ended: by dedent or end of text, not by the limit. passes: whether it passes the function's unit tests; None without any.
    """

    project: str
    prompt: str
    text: str
    ended: bool
    parses: bool
    passes: bool | None


def complete_functions(
    module: Laneformer,
    tokenizer: Any,
    functions: Sequence[HeldOutFunction],
    *,
    temperature: float = 0.2,
    seed: int = 0,
    max_new_tokens: int = 320,
    batch: int = 256,
) -> list[Completion]:
    """Generate the rest of each function, parse it, and run the unit tests of those that have some."""
    margins = [_margin(function) for function in functions]
    continuations = continue_texts(
        module,
        tokenizer,
        [textwrap.indent(function.prompt, margin) for function, margin in zip(functions, margins, strict=True)],
        lambda row, line: _DEDENT[margins[row]].search(line) is not None,
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
        batch=batch,
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the tests run in processes of their own
        return list(pool.map(judge, functions, margins, continuations))


def summary(completions: Sequence[Completion]) -> dict[str, Any]:
    """Counts and shares of those that parse and of those that pass, with every completion, as JSON."""
    tested = [completion for completion in completions if completion.passes is not None]
    return {
        "num_functions": len(completions),
        "num_parsed": sum(c.parses for c in completions),
        "num_ended_parsed": sum(c.parses and c.ended for c in completions),
        "num_cut_at_limit": sum(not c.ended for c in completions),
        "parse_share": round(sum(c.parses for c in completions) / max(1, len(completions)), 4),
        "num_tested": len(tested),
        "num_passed": sum(c.passes is True for c in tested),
        "pass_share": round(sum(c.passes is True for c in tested) / max(1, len(tested)), 4),
        "completions": [asdict(c) for c in completions],
    }


def chosen_functions(functions: Sequence[HeldOutFunction], count: int) -> tuple[list[HeldOutFunction], list[HeldOutFunction]]:
    """The first `count`, a random sample since `prepare` shuffled them, and of the others those with unit tests."""
    return list(functions[:count]), [function for function in functions[count:] if function.tests is not None]


def judge(function: HeldOutFunction, margin: str, continuation: Continuation) -> Completion:
    """Cut the text behind the function, parse and test it; a completion without a single line of its own counts as failed.

    What hit the limit loses its unfinished end: the last line, and before it heads of blocks (lines that end in a colon).
    """
    body = _DEDENT[margin].split("\n" + continuation.text, maxsplit=1)[0][1:]
    if not continuation.ended:
        body = _OPEN_END.sub("", body)
    text = textwrap.indent(function.prompt, margin) + body.rstrip() + "\n"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("class Parent:\n" + text if margin else text)
        parses = bool(body.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parses = False
    passes = None if function.tests is None else parses and function.tests.passes(textwrap.dedent(text), function.name)
    return Completion(function.project, function.prompt, text, continuation.ended, parses, passes)


def _margin(function: HeldOutFunction) -> str:
    node = ast.parse(function.source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return margin(node)


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
    module = Laneformer(read_config(progress["spec"]), seed=None)
    module.load_state_dict(load_tensors(state, "weights"))
    return module
