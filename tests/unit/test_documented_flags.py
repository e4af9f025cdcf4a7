"""Every command of ours that README and docs show exists, with all options that it requires and none that it does not know.

Those in ```console blocks also run: tests/e2e/test_documented_commands.py. docs/reproduce.md explains those of docs/results*.md.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from kog_dist.bench.cli import app as bench
from kog_dist.chat.flags import app as chat
from kog_dist.gateway.cli import app as gateway
from kog_dist.launch.flags import app as launch
from kog_dist.rpc.flags import app as client
from kog_dist.rpc.help_examples import EXAMPLES
from kog_dist.train.__main__ import app as train

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
APPS: dict[str, typer.Typer] = {
    "kog-bench": bench, "kog-chat": chat, "kog-client": client, "kog-gateway": gateway, "kog-launch": launch,
    "python -m kog_dist.train": train,
}  # fmt: skip
PROGRAM = r"(kog-[a-z-]+|python -m kog_dist[\w.]*)"
BEHIND = re.compile(r" (?:[|<>&;]|2>).*|;.*| +#.*")  # what a shell does with it, a comment
NUMBER = re.compile(r"\bN\b")  # stands for one


def shown(text: str) -> Iterator[str]:
    """Commands in a page: between single backticks, and the lines of blocks but those of what they print (```text)."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    commands = re.sub(r"^```text\n.*?^```", "", text, flags=re.M | re.S)  # what they print
    yield from (" ".join(found[0].split()) for found in re.finditer(rf"(?<=`){PROGRAM}( [^`]*)?(?=`)", outside))
    for block in re.finditer(r"^```\w*\n(.*?)^```|((?:^    .*\n)+)", commands, re.M | re.S):
        for line in (block[1] or block[2]).replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if re.match(rf"{PROGRAM}( |$)", command) and command.isascii():  # pictures have lines of other characters
                yield " ".join(command.split())


def arguments_of(command: str) -> tuple[str, list[str]]:
    found = re.match(PROGRAM, command)
    assert found is not None, command
    return found[0], shlex.split(NUMBER.sub("1", BEHIND.sub("", command[found.end() :])))


def exists(program: str) -> bool:
    """Whether it is one of our scripts, or a module that can be run."""
    if program.startswith("python"):
        return importlib.util.find_spec(program.removeprefix("python -m ")) is not None
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return program in tomllib.load(stream)["project"]["scripts"]


EXAMPLES_OF_HELP = [(name, command) for name, pairs in EXAMPLES.items() for command, _ in pairs]
COMMANDS = sorted(
    {(str(page.relative_to(ROOT)), command) for page in PAGES for command in shown(page.read_text(encoding="utf-8"))}
)


@functools.cache
def command_of(program: str) -> Any:
    """Its tree of commands, which takes longer to make than to use."""
    return get_command(APPS[program])


def parse(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the command, run nothing. Ends with SystemExit; its code is 0 when all is well."""
    command = command_of(program)
    for one in getattr(command, "commands", {"": command}).values():
        monkeypatch.setattr(one, "callback", lambda **_: None)
    command(arguments, prog_name=program, standalone_mode=True)


@pytest.mark.parametrize(("page", "command"), [*COMMANDS, *EXAMPLES_OF_HELP])
def test_a_documented_command_parses(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, arguments = arguments_of(command)
    assert exists(program), f"{page}: {command}"
    if program not in APPS or not arguments or "COMMAND" in arguments:
        return  # only the name of a program
    with pytest.raises(SystemExit) as ended:
        parse(program, arguments, monkeypatch)
    assert not ended.value.code, f"{page}: {command}\n{capsys.readouterr().err}"


def test_every_help_has_examples_of_its_own_command() -> None:
    for program, app in APPS.items():
        command = command_of(program)
        for name in ("", *getattr(command, "commands", {})):
            if program.startswith("python"):
                continue  # training is described in docs/training.md
            whole = f"{program} {name}".strip()
            assert all(shown.startswith(program) and name in shown for shown, _ in EXAMPLES[whole]), whole
            help_text = CliRunner().invoke(app, [*whole.split()[1:], "--help"]).output
            assert all(shown in help_text for shown, _ in EXAMPLES[whole]), help_text


def test_commands_are_found() -> None:
    text = (
        "Say `kog-bench decode --ranks 1`.\n\n```sh\n$ kog-client generate \\\n    --prompt x  # y\n```\n\n    kog-chat --url x\n"
    )
    assert list(shown(text)) == ["kog-bench decode --ranks 1", "kog-client generate --prompt x # y", "kog-chat --url x"]
    assert arguments_of("kog-launch --rpc-port N > out # comment") == ("kog-launch", ["--rpc-port", "1"])
    assert len(COMMANDS) > 100


def test_every_command_of_the_results_is_explained() -> None:
    def measured(page: str) -> set[tuple[str, ...]]:
        found = [arguments_of(command) for name, command in COMMANDS if name == f"docs/{page}"]
        return {(program, *arguments[:1]) for program, arguments in found if arguments or program.startswith("python")}

    results = measured("results.md") | measured("results-requests.md")
    assert {("kog-bench", "decode"), ("kog-bench", "latency")} <= results
    assert results <= measured("reproduce.md")


@pytest.mark.parametrize(
    "command",
    [
        "python -m kog_dist.train evaluate",
        "kog-client --key-file FILE",
        "kog-launch --frobnicate",
        "kog-bench nonsense",
        "kog-bench decode --nonsense",
    ],
)
def test_what_is_wrong_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments_of(command), monkeypatch)
    assert ended.value.code == 2


def test_what_does_not_exist_is_found() -> None:
    assert [exists(name) for name in ("kog-doctor", "kog-nonsense", "python -m kog_dist.nonsense")] == [True, False, False]
