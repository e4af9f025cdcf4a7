"""docs/reproduce.md names commands that exist, with flags that exist, and all that docs/results.md names."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "kog-bench": "kog_dist.bench.cli",
    "kog-launch": "kog_dist.launch.flags",
    "python -m kog_dist.train": "kog_dist.train.__main__",
}
_STARTS = ("kog-", "python -m kog_dist.")


def commands(name: str) -> list[str]:
    """All commands of ours in a document: in backticks, or a line of a block."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [*re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)), *lines]
    found = [re.sub(r"\s*(#.*|&)$", "", command.removeprefix(".venv/bin/")) for command in found]
    return sorted({command for command in found if command.startswith(_STARTS)})


def check(command: str) -> None:
    """Raises what is wrong with it."""
    for program, module in PROGRAMS.items():
        if command.startswith(program + " ") or command == program:
            words = shlex.split(command[len(program) :])
            parser: Any = typer.main.get_command(import_module(module).app)
            if subcommands := getattr(parser, "commands", None):
                assert words, f"`{command}` lacks a command"
                assert words[0] in subcommands, f"`{command}`: {program} has no command {words[0]}"
                parser, words = subcommands[words[0]], words[1:]
            flags = {flag for parameter in parser.params for flag in (*parameter.opts, *parameter.secondary_opts)}
            for word in words:
                assert not word.startswith("--") or word.partition("=")[0] in flags, f"`{command}`: there is no {word}"
            return
    module = shlex.split(command)[2] if command.startswith("python -m") else ""
    scripts = re.findall(r"^(kog-[a-z]+) = ", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert shlex.split(command)[0] in scripts or (module and importlib.util.find_spec(module)), f"`{command}` does not exist"


@pytest.mark.parametrize("document", ["reproduce.md", "results.md", "operations.md"])
def test_commands_and_flags_exist(document: str) -> None:
    found = commands(document)
    assert found
    for command in found:
        check(command)


@pytest.mark.parametrize(
    "command", ["kog-bench decode --nonsense", "kog-bench nonsense", "kog-nonsense", "python -m kog_dist.nonsense"]
)
def test_what_does_not_exist_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


def test_every_command_of_the_results_is_explained() -> None:
    def what(command: str) -> str:
        words = command.split()
        return " ".join(
            words[:4] if words[0] == "python" and "train" in command else words[:3] if words[0] == "python" else words[:2]
        )

    measured = {what(command) for command in commands("results.md")}
    assert {"kog-bench decode", "kog-bench latency", "python -m kog_dist.train evaluate"} <= measured
    assert measured <= {what(command) for command in commands("reproduce.md")}
