"""Modules that note which of their functions are called, for reached.py: each function begins with a look into a set.

Tracing by Python itself makes tests three times as slow. Only compiled files are written, which Python believes without a look at
the source: text and lines stay as they are, and processes that tests start import the same.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import marshal
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

CHILDREN: Final = "TESTS_REACHED_CHILDREN"  # names the file where processes write that are not `OWNER`
CALLED: Final = set[str]()  # `file::qualified name`, since it was cleared last
OWNER = 0  # the process that reads `CALLED`
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_BELIEVED: Final = (1).to_bytes(4, "little") + bytes(8)  # PEP 552: a hash, which is not checked
_WRITTEN: Final = os.open(os.environ[CHILDREN], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC) if CHILDREN in os.environ else None


def note(name: str) -> None:
    """A function is called for the first time since `CALLED` was cleared."""
    CALLED.add(name)
    if _WRITTEN is not None and os.getpid() != OWNER:
        with contextlib.suppress(OSError):  # of a process that has closed it
            os.write(_WRITTEN, f"{name}\n".encode())


def compiled(root: Path, folders: Sequence[str]) -> Mapping[str, bytes]:
    """All modules below some folders of `root`, by path."""
    files = {
        str(path.resolve().relative_to(root.resolve())): path for folder in folders for path in (root / folder).rglob("*.py")
    }
    return {file: importlib.util.MAGIC_NUMBER + _BELIEVED + _compiled(file, path.read_bytes()) for file, path in files.items()}


def write(root: Path, modules: Mapping[str, bytes]) -> None:
    """Put them where Python looks for what it has compiled."""
    for file, code in modules.items():
        path = Path(importlib.util.cache_from_source(str(root / file)))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(code)


def _compiled(file: str, source: bytes) -> bytes:
    tree = ast.parse(source)
    if _add_notes(tree, file, ""):
        begin = ast.parse(f"from {__name__} import CALLED as __called__, note as __note__").body
        is_future = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body]
        _put_first(tree.body, begin, max((place + 1 for place, is_one in enumerate(is_future) if is_one), default=0))
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


def _add_notes(node: ast.AST, file: str, within: str) -> bool:
    """Whether there is a function in it."""
    is_any = False
    for inner in list(ast.iter_child_nodes(node)):
        name = within
        if isinstance(inner, (*FUNCTIONS, ast.ClassDef)):
            name = f"{within}{inner.name}" + ("." if isinstance(inner, ast.ClassDef) else ".<locals>.")
        is_any |= _add_notes(inner, file, name)
        if isinstance(inner, FUNCTIONS):
            called = f"{file}::{within}{inner.name}"
            _put_first(inner.body, ast.parse(f"{called!r} in __called__ or __note__({called!r})").body, 0)
            is_any = True
    return is_any


def _put_first(body: list[ast.stmt], put: list[ast.stmt], place: int) -> None:
    """Behind a text that documents it."""
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *_] if place == 0:
            place = 1
    near = body[min(place, len(body) - 1)]
    for node in put:
        for inner in ast.walk(node):
            ast.copy_location(inner, near)
    body[place:place] = put
