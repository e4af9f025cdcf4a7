"""Runs a function of unknown origin on given arguments in a process of its own that can do little else.

Two fences: a static check refuses programs that name anything but harmless built-ins and modules, and the process has no
environment, no privileges (if it was started by root), an empty folder, and limits on time, memory, files and output.
"""

from __future__ import annotations

import ast
import json
import subprocess
import tempfile
from collections.abc import Sequence

from kog_dist.system import python_child

SAFE_MODULES = frozenset(
    """abc base64 binascii bisect calendar cmath collections collections.abc colorsys copy dataclasses datetime decimal difflib
    enum fnmatch fractions functools hashlib heapq html itertools json keyword math numbers operator re shlex statistics string
    struct textwrap types typing unicodedata urllib.parse zlib __future__ typing_extensions""".split()
)
SAFE_BUILTINS = frozenset(
    """abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format frozenset
    hasattr hash hex int isinstance issubclass iter len list map max min next object oct ord pow print property range repr
    reversed round set slice sorted staticmethod str sum super tuple type zip True False None NotImplemented Ellipsis
    ArithmeticError AssertionError AttributeError BaseException Exception IndexError KeyError LookupError NameError
    NotImplementedError OverflowError RuntimeError StopIteration SyntaxError TypeError UnicodeDecodeError UnicodeEncodeError
    UnicodeError ValueError ZeroDivisionError DeprecationWarning UserWarning""".split()
)
_HIDDEN_ATTRIBUTES = frozenset(
    "attrgetter builtins codecs importlib io methodcaller modules os subprocess sys threading warnings".split()
)
_CPU_S, _WALL_S, _CALL_S = 10, 20, 0.25
_MEMORY_BYTES, _OUTPUT_BYTES, _RESULT_CHARS = 2**30, 2**22, 4000
_MARK = "calls made:"

# What is put around the function. Names end in two underscores so that they meet none of the program's.
_LIMITS = f"""
import json as json__, os as os__, resource as resource__, signal as signal__, sys as sys__
if os__.getuid() == 0:
    os__.setgroups([]), os__.setgid(65534), os__.setuid(65534)
for kind__, size__ in (("CPU", {_CPU_S}), ("AS", {_MEMORY_BYTES}), ("FSIZE", {_OUTPUT_BYTES}), ("NPROC", 0), ("CORE", 0)):
    resource__.setrlimit(getattr(resource__, "RLIMIT_" + kind__), (size__, size__))
"""
_CALLS = f'''
def plain__(value, depth=0):
    """Text that is equal for equal values. Raises TypeError for what is more than plain data."""
    if depth > 8:
        raise TypeError
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, str, bytes)) and kind in ("bool", "int", "str", "bytes"):
        return repr(value)
    if kind in ("float", "complex"):
        return f"{{value:.9g}}"
    if kind in ("list", "tuple", "deque"):
        return kind + "(" + ", ".join(plain__(item, depth + 1) for item in value) + ")"
    if kind in ("set", "frozenset"):
        return kind + "(" + ", ".join(sorted(plain__(item, depth + 1) for item in value)) + ")"
    if kind in ("dict", "defaultdict", "OrderedDict", "Counter"):
        pairs = (plain__(key, depth + 1) + ": " + plain__(item, depth + 1) for key, item in value.items())
        return "dict(" + ", ".join(sorted(pairs)) + ")"
    if kind in ("Fraction", "Decimal", "date", "datetime", "time", "timedelta", "range", "slice"):
        return repr(value)
    if hasattr(value, "__next__"):
        items = []
        for item in value:
            items.append(item)
            if len(items) > 200:
                raise TypeError
        return "iterator(" + ", ".join(plain__(item, depth + 1) for item in items) + ")"
    raise TypeError


def stop__(*_):
    raise TimeoutError


def outcome__(call):
    """What a call gives and what it makes of its arguments, or None if it fails."""
    positional, named = call
    signal__.setitimer(signal__.ITIMER_REAL, {_CALL_S})
    try:
        result = plain__(function__(*positional, **named))
        text = result + " | " + plain__(positional) + " | " + plain__(named)
        return text if len(text) <= {_RESULT_CHARS} else None
    except BaseException:
        return None
    finally:
        signal__.setitimer(signal__.ITIMER_REAL, 0)


signal__.signal(signal__.SIGALRM, stop__)
outcomes__ = [outcome__(call) for call in calls__]
print("\\n{_MARK}" + json__.dumps(outcomes__), flush=True)
'''


def is_harmless(program: str) -> bool:
    """Whether a program parses and names only safe modules and built-ins, its own names, and no hidden attributes."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not hidden_uses(tree) and free_names(tree) <= SAFE_BUILTINS


def hidden_uses(tree: ast.AST) -> bool:
    """Whether it imports a module that is not safe, or touches attributes or names that lead out of the fence."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(alias.name not in SAFE_MODULES for alias in names):
                return True
            case ast.ImportFrom(module=module, level=level, names=names):
                if level or module not in SAFE_MODULES or any(_is_hidden(alias.name) for alias in names):
                    return True
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name) if _is_hidden(name):
                return True
    return False


def _is_hidden(name: str) -> bool:
    return name.startswith("__") or name.endswith("__") or name in _HIDDEN_ATTRIBUTES


def free_names(tree: ast.AST) -> set[str]:
    """Names that are read and bound nowhere in the tree, whatever the scope. Annotations do not count: they are not evaluated."""
    read, bound = set(), set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.split(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                nodes += [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
    return read - bound


def call_function(context: str, source: str, name: str, calls: Sequence[str], *, hash_seed: int = 0) -> list[str | None]:
    """The outcomes of calling function `name` of `source`, which may use what `context` defines; None for calls that fail.

    calls: literals `((positional, ...), {"name": value})`. All None if the program is not harmless, fails, or takes too long.
    """
    nothing: list[str | None] = [None] * len(calls)
    program = context + "\n" + source
    if not is_harmless(program):
        return nothing
    future = "from __future__ import annotations\n"
    program = program.replace(future, "")
    whole = f"{future}{_LIMITS}\n{program}\nfunction__ = {name}\ncalls__ = [{', '.join(calls)}]\n{_CALLS}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        try:
            subprocess.run(
                python_child.interpreter("-S", "-B", "-"),
                input=whole.encode("utf-8", "replace"),
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PYTHONHASHSEED": str(hash_seed)},
                timeout=_WALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return nothing
        output.seek(0)
        printed = output.read().decode("utf-8", "replace")
    _, mark, last = printed.rpartition("\n" + _MARK)
    try:
        outcomes = json.loads(last) if mark else nothing
    except ValueError:
        return nothing
    return outcomes if isinstance(outcomes, list) and len(outcomes) == len(calls) else nothing
