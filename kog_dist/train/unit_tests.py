"""Small unit tests for held-out functions, made by calling the originals on invented arguments.

A function is testable if it stands at the top of its module and it and what it uses of the module (constants, imports, other
functions) are harmless for `sandbox`. Many argument lists are tried; those on which the original returns plain data, twice the
same in processes with different hash seeds, become tests. A function is kept only if its tests tell it from the idle answers:
results must differ between calls and not be one of the arguments every time.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence

from kog_dist.records import dataclass
from kog_dist.train.cleaning import parsed
from kog_dist.train.invented_calls import invented_call
from kog_dist.train.sandbox import SAFE_BUILTINS, call_function, free_names, hidden_uses

MIN_TESTS, MAX_TESTS = 3, 8
_NUM_TRIES = 80
_MAX_CONTEXT_CHARS = 20_000


@dataclass(frozen=True)
class UnitTests:
    """`outcomes[i]` is what the original gives for `calls[i]` (see `sandbox.call_function`)."""

    context: str
    calls: tuple[str, ...]
    outcomes: tuple[str, ...]

    def passes(self, source: str, name: str) -> bool:
        """Whether other code for the function gives the same outcomes."""
        return tuple(call_function(self.context, source, name, self.calls)) == self.outcomes


def make_unit_tests(text: str, source: str, name: str) -> UnitTests | None:
    """Unit tests for function `name`, `source`, at the top of the module `text`; None if it has no good ones.

    The arguments are drawn by the hash of the source: equal functions have equal tests.
    """
    context = needed_context(text, name)
    if context is None:
        return None
    draw = random.Random(hashlib.sha256(source.encode()).digest())
    function = parsed(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    calls = list(dict.fromkeys(invented_call(function, draw) for _ in range(_NUM_TRIES)))
    outcomes = call_function(context, source, name, calls)
    chosen = _telling_calls(calls, outcomes)
    if not chosen:
        return None
    calls = [calls[call_idx] for call_idx in chosen]
    again = call_function(context, source, name, calls, hash_seed=1)
    first = [outcomes[call_idx] for call_idx in chosen]
    if again != first:
        return None
    return UnitTests(context, tuple(calls), tuple(outcome for outcome in first if outcome is not None))


def needed_context(text: str, name: str) -> str | None:
    """What function `name` uses of the module `text`, as source; None if that is unknown, not harmless, or too much."""
    definitions = {bound: statement for statement in parsed(text).body for bound in _bound_names(statement)}
    own = definitions.get(name)
    if not isinstance(own, ast.FunctionDef) or own.decorator_list:
        return None
    found: list[ast.stmt] = [own]
    for statement in found:  # grows on the way
        if hidden_uses(statement):
            return None
        for free in sorted(free_names(statement) - SAFE_BUILTINS):
            definition = definitions.get(free)
            if definition is None:
                return None
            if definition not in found:
                found.append(definition)
    found.remove(own)
    context = "".join(ast.unparse(statement) + "\n" for statement in sorted(found, key=lambda statement: statement.lineno))
    return context if len(context) <= _MAX_CONTEXT_CHARS else None


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.split(".")[0] for alias in names)
        case ast.Assign(targets=targets):
            for target in targets:
                yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            yield name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name


def _telling_calls(calls: Sequence[str], outcomes: Sequence[str | None]) -> list[int]:
    """Indices of up to MAX_TESTS calls that worked, those with new results first; none if idle answers would pass them."""
    worked = [call_idx for call_idx, outcome in enumerate(outcomes) if outcome is not None]
    results = {call_idx: str(outcomes[call_idx]).split(" | ")[0] for call_idx in worked}
    seen: set[str] = set()
    fresh = []
    for call_idx in worked:
        if results[call_idx] not in seen:
            seen.add(results[call_idx])
            fresh.append(call_idx)
    chosen = (fresh + [call_idx for call_idx in worked if call_idx not in fresh])[:MAX_TESTS]
    echoed = [results[call_idx] in str(outcomes[call_idx]).split(" | ", 1)[1] for call_idx in chosen]
    return chosen if len(chosen) >= MIN_TESTS and len(fresh) >= 2 and not all(echoed) else []
