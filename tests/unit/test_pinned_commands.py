"""Every option of every command with its default and its limits, pinned as text (pinning.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from kog_dist.rpc.help_examples import EXAMPLES, examples
from tests.unit.pinning import compare
from tests.unit.test_documented_flags import APPS


def lines(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    hidden = " (hidden)" * bool(command.hidden)
    yield f"== {' '.join(path) or 'itself'}{hidden}"
    for param in command.params:
        kind, default = param.type, param.default() if callable(param.default) else param.default
        names = "/".join((*param.opts, *param.secondary_opts))
        limits = [
            f"{name} {found}" for name in ("min", "max", "choices", "exists") if (found := getattr(kind, name, None)) is not None
        ]
        flags = [name for name in ("required", "multiple", "is_flag", "is_eager", "hidden") if getattr(param, name, False)]
        yield f"{names}: {kind.name} = {default!r}, {param.nargs} value(s), {' '.join(limits + flags)}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from lines(inner, (*path, name))


def test_examples_read_as_they_did() -> None:
    compare("commands/examples", [line for command in EXAMPLES for line in (f"== {command}", *examples(command).splitlines())])


@pytest.mark.parametrize("program", APPS)
def test_options_are_what_they_were(program: str) -> None:
    compare(f"commands/{program}", list(lines(get_command(APPS[program]))))
