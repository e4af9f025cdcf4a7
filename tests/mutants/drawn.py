"""Mutants that nobody wrote: drawn by a seed from all lines of the product, with the tests that should notice them.

Of Python by its syntax tree: comparisons, operators, constants, conditions, and statements that are left out. Of device headers
that a CPU compiles (twins) by a few tokens between blanks. Each changes one place of one line.
"""

from __future__ import annotations

import ast
import fnmatch
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from tests.mutants.noted import FUNCTIONS
from tests.mutants.reached import Reach, function_at, functions, lines_of

TABLE: Final = Path(__file__).with_name("tests_of.toml")
MOST_TRIES: Final = 4  # for each that is drawn
_COMPARISONS: Final[Mapping[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_OPERATORS: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
_DEVICE: Final = (
    (" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "), (" + ", " - "),
    (" - ", " + "), (" * ", " + "), (" / ", " * "), (" % ", " / "), (" && ", " || "), (" || ", " && "), ("min(", "max("),
    ("max(", "min("), (" += ", " -= "),
)  # fmt: skip
_AT_ONCE: Final = re.compile(r"(^|_)((READ|CHUNK|PIECE|BUFFER|BATCH)_BYTES|AHEAD)$")  # names of how much is read or done at once
_TIMES: Final = ("_s", "_ms", "_us", "_ns", "timeout")
_NO_MATTER: Final = frozenset({"strict", "flush", "repr", "compare", "slots"})  # arguments: invariants, and what is printed when
_NOT_CODE: Final = re.compile(r"^\s*(#|//|template|static_assert|using|constexpr|struct|enum)|asm|printf")


@dataclass(frozen=True)
class Drawn:
    """`old` in the line `number` (from 1) of `file`, from `column` on (bytes), becomes `instead`."""

    file: str
    number: int
    column: int
    old: str
    instead: str
    tests: tuple[str, ...] = ()
    breaks: str = "drawn"

    @property
    def name(self) -> str:
        """One line that says what it is."""
        return f"{self.file}:{self.number}:{self.column}: {self.old}  ->  {self.instead}"

    def applied(self, source: str) -> str:
        """The file's text with the mutant in it. Raises ValueError unless its piece is there."""
        lines = source.encode().split(b"\n")
        line, old = lines[self.number - 1], self.old.encode()
        if not line.startswith(old, self.column):
            raise ValueError(f"{self.file}:{self.number} has no {self.old!r} at {self.column}")
        lines[self.number - 1] = line[: self.column] + self.instead.encode() + line[self.column + len(old) :]
        return b"\n".join(lines).decode()


def of_python(file: str, source: str) -> Iterator[Drawn]:
    """All mutants of a module."""
    lines = source.encode().split(b"\n")
    tree = ast.parse(source)
    left_out = set(_left_out(tree))

    def between(left: ast.expr, right: ast.expr, old: str, instead: str) -> Iterator[Drawn]:
        """An operator between two operands, if all is in one line."""
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
            if gap.strip(" ()") == old:
                column = left.end_col_offset + gap.index(old)
                yield Drawn(file, right.lineno, column, old, instead)

    def whole(node: ast.expr | ast.stmt, instead: str) -> Iterator[Drawn]:
        if node.lineno == node.end_lineno:
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            yield Drawn(file, node.lineno, node.col_offset, old, instead)

    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
                yield from between(left, right, *_COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS and not _is_text(left):
                yield from between(left, right, *_OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, *(("and", "or") if isinstance(operator, ast.And) else ("or", "and")))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from whole(node, f"({ast.unparse(operand)})")
            case ast.Constant(value=bool() as value):
                yield from whole(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield from whole(node, repr(value + 1))
            case ast.IfExp(body=body, orelse=other):
                yield from whole(node, f"({ast.unparse(body)})")
                yield from whole(node, f"({ast.unparse(other)})")
            case ast.Call(func=ast.Name(id="min" | "max" as name) as called):
                yield from whole(called, "max" if name == "min" else "min")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield from whole(node, "pass")
            case ast.If(test=test) | ast.While(test=test):
                yield from whole(test, "False") if isinstance(node, ast.If) else ()
            case _:
                pass


def of_device(file: str, source: str) -> Iterator[Drawn]:
    """All mutants of a header."""
    for number, line in enumerate(source.split("\n"), 1):
        code = line.partition("//")[0]
        if _NOT_CODE.search(code):
            continue
        for old, instead in _DEVICE:
            for found in re.finditer(re.escape(old), code):
                yield Drawn(file, number, len(code[: found.start()].encode()), old, instead)


def _left_out(tree: ast.AST) -> Iterator[int]:
    """Nodes that compute nothing: what a type checker looks after, messages, our own invariants, times, and how much is done at
    once.
    """
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        match node:
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[right]):
                if _is_time(left) and _is_time(right):
                    yield id(node)  # alone: what it compares may be something else
            case ast.arg():
                found.append(node.annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found += [node.returns, *node.decorator_list]  # cached, static: not what is computed
            case ast.ClassDef():
                found += node.decorator_list  # slots, frozen
            case ast.JoinedStr() | ast.Raise() | ast.Assert():
                found.append(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                found.append(node)
            case ast.Call(func=ast.Attribute(attr="sleep" | "sched_yield")):
                found.append(node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="read"), args=[_, size]):
                found.append(size)
            case ast.Call(func=ast.Attribute(attr="recv"), args=[size]):
                found.append(size)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="sleep" | "sched_yield"))):
                found.append(node)
            case ast.keyword(arg=str(name)) if name in _NO_MATTER or name.endswith(_TIMES):
                found.append(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.lower().endswith(_TIMES) or _AT_ONCE.search(name):
                found.append(node)
            case ast.AnnAssign(target=ast.Name(id=name)) if name.lower().endswith(_TIMES) or _AT_ONCE.search(name):
                found.append(node)
            case ast.AnnAssign():
                found.append(node.annotation)
            case _:
                pass
        for one in found:
            yield from (id(inner) for inner in ast.walk(one)) if one is not None else ()


def _is_time(node: ast.expr) -> bool:
    """Of two times it is seldom that they are equal: whether that is before or after nobody can test."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"))):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.endswith(_TIMES)
        case ast.BinOp(left=left, right=right):
            return _is_time(left) or _is_time(right)
        case _:
            return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.keyword) and inner.arg is not None:
            yield inner.arg


@dataclass(frozen=True)
class _Definition:
    """Lines of an assignment outside of functions, the names that it gives a value, and those that it uses."""

    first: int
    last: int
    names: set[str]
    used: set[str]


class Product:
    """The files of a checkout, and which tests each mutant of them has."""

    def __init__(self, root: Path, table: Path = TABLE) -> None:
        self._root, self._found = root, dict[str, list[Drawn]]()
        self._trees, self._used = dict[str, ast.Module](), dict[str, dict[str, set[str]]]()
        parsed = tomllib.loads(table.read_text())
        self._folders, self._without = parsed["folders"], parsed["without"]
        self.table: Mapping[str, Sequence[str]] = parsed["tests"]

    @cached_property
    def files(self) -> list[str]:
        """Every file of which mutants are drawn."""
        paths = [path for folder in self._folders for kind in ("*.py", "*.cuh") for path in (self._root / folder).rglob(kind)]
        names = sorted({str(path.relative_to(self._root)) for path in paths if not _is_linked(path, self._root)})
        return [name for name in names if not any(fnmatch.fnmatch(name, one) for one in self._without)]

    def tests_of(self, mutant: Drawn, reach: Reach) -> tuple[str, ...]:
        """Tests that call the function that it is in, and those that the table has for its file."""
        named = next((tests for pattern, tests in self.table.items() if fnmatch.fnmatch(mutant.file, pattern)), ())
        if not mutant.file.endswith(".py"):
            return tuple(named)
        function = function_at((self._root / mutant.file).read_text(), mutant.number)
        # What only runs while modules are imported is called by no test: those of its users may see it, or a file's own.
        calling = reach.tests_of(mutant.file, function) if function else reach.tests_of_any(self._users(mutant), mutant.file)
        importers = self._importers.get(mutant.file, ())
        calling = calling or reach.tests_of(mutant.file, "") or reach.tests_of_any(importers, mutant.file)
        return tuple(dict.fromkeys((*calling, *named)))

    def _users(self, mutant: Drawn) -> set[str]:
        """Functions that use what is defined in a line outside of all functions, or what is made of that."""
        files = [mutant.file, *self._importers.get(mutant.file, ())]
        defined = [one for file in files for one in self._definitions(file)]
        names = {name for one in self._definitions(mutant.file) if one.first <= mutant.number <= one.last for name in one.names}
        while more := {name for one in defined if names & one.used for name in one.names} - names:
            names |= more
        return {
            f"{file}::{name}"
            for file in files
            for name, used in self._used_by_functions(file).items()
            if not names.isdisjoint(used)
        }

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse((self._root / file).read_text() if file.endswith(".py") else "")
        return self._trees[file]

    def _definitions(self, file: str) -> list[_Definition]:
        """Assignments outside of functions."""
        found, bodies = list[_Definition](), [self._tree(file).body]
        while bodies:
            for node in bodies.pop():
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
                    found.append(_Definition(node.lineno, node.end_lineno or node.lineno, names, set(_names_in(node)) - names))
        return found

    def _used_by_functions(self, file: str) -> dict[str, set[str]]:
        """Names in each function, those of inner ones included."""
        if file not in self._used:
            self._used[file] = used = {}
            nodes = {lines_of(node): node for node in ast.walk(self._tree(file)) if isinstance(node, FUNCTIONS)}
            for first, last, name in functions((self._root / file).read_text()) if nodes else ():
                used[name] = set(_names_in(nodes[first, last]))
        return self._used[file]

    @cached_property
    def _importers(self) -> dict[str, list[str]]:
        """By file of the product: files of it that import from it, or from the package that it is in."""
        found: dict[str, set[str]] = {}
        for file in self.files:
            for node in ast.walk(self._tree(file)):
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    path = self._root / node.module.replace(".", "/")
                    module = path.with_suffix(".py")
                    imported = path.glob("*.py") if path.is_dir() else [module] if module.exists() else []
                    for one in imported:
                        found.setdefault(str(one.resolve().relative_to(self._root.resolve())), set()).add(file)
        return {file: sorted(importers) for file, importers in found.items()}

    def draw(self, seed: int, count: int) -> list[Drawn]:
        """So many mutants, of long files more than of short ones, no two of one line; their tests are `with_tests`."""
        chance, drawn = random.Random(seed), dict[tuple[str, int], Drawn]()
        sizes = {file: (self._root / file).stat().st_size for file in self.files}
        for _ in range(MOST_TRIES * count if sizes else 0):
            if len(drawn) == count:
                break
            (file,) = chance.choices(list(sizes), weights=list(sizes.values()))
            found = self._all_of(file)
            mutant = chance.choice(found) if found else None
            if mutant is not None and (file, mutant.number) not in drawn and self._compiles(mutant):
                drawn[file, mutant.number] = mutant
        return list(drawn.values())

    def with_tests(self, mutants: Sequence[Drawn], reach: Reach) -> list[Drawn]:
        """The same, with the tests that are known to call what they are in."""
        return [replace(mutant, tests=self.tests_of(mutant, reach)) for mutant in mutants]

    def _all_of(self, file: str) -> list[Drawn]:
        if file not in self._found:
            source = (self._root / file).read_text()
            self._found[file] = list((of_python if file.endswith(".py") else of_device)(file, source))
        return self._found[file]

    def _compiles(self, mutant: Drawn) -> bool:
        source = (self._root / mutant.file).read_text()
        if not mutant.file.endswith(".py"):
            return True
        try:
            compile(mutant.applied(source), mutant.file, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))


def _is_linked(path: Path, root: Path) -> bool:
    """Whether it is reached through a link: kog_dist/workers is workers."""
    return path.resolve() != root.resolve() / path.relative_to(root)
