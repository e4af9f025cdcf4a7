"""Which files are source that people wrote, and what is cut off them."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from kog_dist.foreign_file import read_text
from kog_dist.records import dataclass

SPECIAL_TOKENS = (END_OF_TEXT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE) = (
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
)
_MIN_CHARS, _MAX_CHARS = 200, 300_000
_MAX_LINE_CHARS, _MAX_MEAN_LINE_CHARS = 400, 100
_MAX_DIGIT_SHARE, _MAX_FOREIGN_SHARE = 0.12, 0.02
_MIN_DISTINCT_LINE_SHARE = 0.4
_MAX_TABLE_SHARE = 0.5  # of the lines; tables are literals of at least as many lines as the next constant says
_TABLE_LINES = 30
_TEST_FOLDERS = frozenset("test tests testing test_data test_suite testdata fixtures conformance".split())
_FOREIGN_FOLDERS = frozenset(
    """_vendor vendor vendored _vendored extern externals third_party site-packages dist-packages __pycache__ migrations
    node_modules pydoc_data encodings""".split()
)
_DIGIT, _FOREIGN = re.compile(r"[0-9]"), re.compile(r"[^\x00-\x7e]")
_TEST_NAMES = re.compile(r"^(test_|conftest)|_tests?\.py$")
_GENERATED_NAMES = re.compile(r"(_pb2|_pb2_grpc|_generated|_lextab|_parsetab|\.min)\.py$|^(_version|version\.py)")
_GENERATED = re.compile(
    r"do not (edit|modify)|@generated|auto-?generated|(automatically|was|file) generated|generated (by|from|with)", re.IGNORECASE
)


class Unfit(Exception):
    """A file that is not trained on; the message is the reason, one of a few words."""


@dataclass(frozen=True)
class Source:
    """A cleaned file and its syntax tree."""

    text: str
    tree: ast.Module


def read_source(path: Path, root: Path) -> Source:
    """A file below `root`, cleaned. Raises Unfit."""
    folders = set(path.relative_to(root).parts[:-1] if path.is_relative_to(root) else path.parts[:-1])
    if folders & _TEST_FOLDERS or _TEST_NAMES.search(path.name):
        raise Unfit("test")
    if folders & _FOREIGN_FOLDERS:
        raise Unfit("vendored")
    if _GENERATED_NAMES.search(path.name):
        raise Unfit("generated")
    try:
        return clean(read_text(path))
    except OSError:
        raise Unfit("unreadable") from None


def clean(text: str) -> Source:
    """The source without licence header and trailing blanks. Raises Unfit for what is generated, tabular, foreign or invalid."""
    text = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    text = _without_header(text).strip("\n") + "\n"
    if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
        raise Unfit("size")
    if _GENERATED.search(text[:1000]):
        raise Unfit("generated")
    if "\t" in text or any(token in text for token in SPECIAL_TOKENS):
        raise Unfit("control characters")
    lines = [line for line in text.split("\n") if line]
    if max(map(len, lines)) > _MAX_LINE_CHARS or len(text) > _MAX_MEAN_LINE_CHARS * len(lines):
        raise Unfit("minified")
    if len(_DIGIT.findall(text)) > _MAX_DIGIT_SHARE * len(text):
        raise Unfit("table")
    if len(_FOREIGN.findall(text)) > _MAX_FOREIGN_SHARE * len(text):
        raise Unfit("foreign")
    if len(lines) > _TABLE_LINES and len({line.strip() for line in lines}) < _MIN_DISTINCT_LINE_SHARE * len(lines):
        raise Unfit("repetitive")
    tree = parsed(text)
    if _table_lines(tree) > _MAX_TABLE_SHARE * len(lines):
        raise Unfit("table")
    return Source(text, tree)


def parsed(text: str) -> ast.Module:
    """The syntax tree of Python source. Raises Unfit if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unfit("invalid") from None


def short_functions(
    tree: ast.Module, lines: list[str], num_lines: tuple[int, int]
) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Functions and methods whose length is in the range, both ends included, each with its lines as they stand in the file."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # grows on the way
        nodes += [
            child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            own = lines[node.lineno - 1 : node.end_lineno]
            if num_lines[0] <= len(own) <= num_lines[1]:
                yield node, own


def margin(function: ast.FunctionDef) -> str:
    """What a function that stands alone is indented by: methods keep the margin that they have in a class."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return "    " if names[:1] in (["self"], ["cls"]) else ""


def standalone(function: ast.FunctionDef, lines: list[str]) -> str | None:
    """The text of a function without what surrounds it, at its `margin`; None if it does not begin with `def`."""
    source = textwrap.dedent("\n".join(lines)) + "\n"
    return textwrap.indent(source, margin(function)) if source.startswith("def ") else None


def _table_lines(tree: ast.Module) -> int:
    """Lines inside large literals; a docstring is none."""
    count = 0
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # grows on the way
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.List | ast.Dict | ast.Tuple | ast.Set | ast.Constant):
            count += _num_lines(node)
        else:
            nodes += [child for child in ast.iter_child_nodes(node) if _num_lines(child) >= _TABLE_LINES]
    return count


def _num_lines(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", None) or 0) - getattr(node, "lineno", 1) + 1


def _without_header(text: str) -> str:
    """Drop the comment block at the top if it is about copyright; every project repeats its own in each file."""
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "licen" in header or "coding" in header or header.startswith("#!"):
        return "\n".join(lines[end:])
    return text
