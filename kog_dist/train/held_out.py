"""Functions of held-out projects: what a model is asked to complete, with unit tests where they can be made."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Container, Iterator
from dataclasses import asdict
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.records import dataclass
from kog_dist.train.cleaning import parsed, short_functions
from kog_dist.train.corpus import Document, function_digest
from kog_dist.train.unit_tests import UnitTests, make_unit_tests

_NUM_LINES = (4, 40)
_MAX_PROMPT_CHARS = 800


@dataclass(frozen=True)
class HeldOutFunction:
    """A function that no training file contains. `prompt` is its start: signature and docstring, or else the first line."""

    project: str
    prompt: str
    source: str
    tests: UnitTests | None = None

    @property
    def name(self) -> str:
        """What follows `def`."""
        return self.source[4:].split("(", 1)[0].strip()


def held_out_functions(
    document: Document, trained: Container[bytes] = (), *, with_tests: bool = False
) -> Iterator[HeldOutFunction]:
    """Functions and methods of 4 to 40 lines, moved to the left margin, with a body behind the prompt.

    trained: `function_digest` of functions that training files contain; they are left out.
    """
    tree = parsed(document.text)
    lines = document.text.split("\n")
    for node, own in short_functions(tree, lines, _NUM_LINES):
        if function_digest(own) in trained:
            continue
        source = textwrap.dedent("\n".join(own)) + "\n"
        prompt = _prompt(node, source)
        if prompt is None:
            continue
        tests = make_unit_tests(document.text, source, node.name) if with_tests and node in tree.body else None
        yield HeldOutFunction(document.project, prompt, source, tests)


def _prompt(node: ast.FunctionDef, source: str) -> str | None:
    """The start that is given; None if the rest would be shorter than two lines, or the function does not stand for itself."""
    first = node.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    last_line = first.end_lineno if has_docstring and first.end_lineno else first.lineno
    lines = source.split("\n")[:-1]
    num_given = last_line - node.lineno + 1
    prompt = "\n".join(lines[:num_given]) + "\n"
    if len(lines) - num_given < 2 or not source.startswith("def ") or len(prompt) > _MAX_PROMPT_CHARS:
        return None
    try:
        ast.parse(source)
    except SyntaxError:  # a string that is not indented lost its place
        return None
    return prompt


def save_functions(path: Path, functions: list[HeldOutFunction]) -> None:
    """Write them as JSON."""
    path.write_text(json.dumps([asdict(function) for function in functions], indent=1) + "\n", encoding="utf-8")


def load_functions(path: Path) -> list[HeldOutFunction]:
    """Read what `save_functions` wrote. Raises ConfigError if it is something else."""
    try:
        entries = json.loads(read_text(path))
        return [HeldOutFunction(**{**entry, "tests": _tests(entry.get("tests"))}) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} does not hold functions as `prepare` writes them: {error}") from None


def _tests(entry: dict[str, object] | None) -> UnitTests | None:
    if entry is None:
        return None
    context, calls, outcomes = entry["context"], entry["calls"], entry["outcomes"]
    if not isinstance(context, str) or not isinstance(calls, list) or not isinstance(outcomes, list):
        raise TypeError("tests are context, calls and outcomes")
    return UnitTests(context, tuple(map(str, calls)), tuple(map(str, outcomes)))
