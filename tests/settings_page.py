"""Writes docs/settings.md from the code: `python -m tests.settings_page`. A unit test compares the page with what this gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kog_dist import config, env
from kog_dist.config import LaunchConfig
from kog_dist.manual.programs import Command, Flag, of_typer, programs
from kog_dist.train.__main__ import app as train

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_HEAD = """\
# Settings

Every flag, environment variable and configuration key. This page is generated: `python -m tests.settings_page`.

A setting of `kog-launch` has one name in three places, and the first that gives it wins: the flag
(`--stall-timeout 2`), the environment (`KOG_STALL_TIMEOUT=2`), the TOML file of `--config` (`stall_timeout = 2`). An
unknown key is refused. An unknown variable is left out with one line, but refused if it looks like a misspelt setting.
What Kubernetes sets in pods for a service called `kog` (`KOG_PORT=tcp://...`) is left out, too. `kog-launch
--print-config` shows each value and where it came from. Files for common runs are in `configs/`. `python -m
kog_dist.manual ~/.local/share` writes the same as man pages (`man kog-launch`), and what bash, zsh and fish complete
([how](installing.md#man-pages-and-completion)).
"""
# Read by the code besides KOG_*; `tests/unit/test_documents.py` compares the names with the code.
VARIABLES = {
    "XDG_RUNTIME_DIR": "where folders of running engines are: `$XDG_RUNTIME_DIR/kog`; without it `kog-UID` in `TMPDIR` or `/tmp`",
    "XDG_STATE_HOME": "what outlives an engine: logs without `--log-dir` in `kog/logs/INSTANCE`, lines typed into `kog-chat` in "
    "`kog/chat_history`; default `~/.local/state`",
    "XDG_CACHE_HOME": "where built device programs, chosen algorithms and rounded weights are kept; default `~/.cache`",
    "HF_HUB_CACHE, HF_HOME": "the Hub's own: where downloaded models are ([models.md](models.md#from-the-hub)); "
    "default `~/.cache/huggingface`",
    "CUDA_VISIBLE_DEVICES": "GPUs that may be used, read as CUDA reads it ([machine.md](machine.md#which-gpus))",
    "CUDA_DEVICE_ORDER": "`PCI_BUS_ID` makes numbers in the variable above unambiguous",
    "RAY_ADDRESS": "a Ray cluster; chooses `--launcher ray`",
    "RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH": "Ray's own: the token of a cluster ([launchers.md](launchers.md#ray))",
    "PYTHONPATH": "handed on to the process that renders chat templates",
    "OPENAI_API_KEY": "`kog-chat`: the key, where `KOG_API_KEY` is not set",
    "RAY_TMPDIR, RAY_TEMP_DIR": "Ray's own: where it notes the address of a cluster on this machine",
    "NO_COLOR, TERM": "plain output of `kog-chat` and `kog-launch`: with `NO_COLOR`, or on a `dumb` terminal",
}


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [_row(head), f"|{'---|' * len(head)}", *(_row(row) for row in rows), ""]


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _names(flag: Flag) -> str:
    return ", ".join(map(_code, flag.names))


def _options(flags: Iterable[Flag]) -> list[str]:
    rows = ([_names(flag), _code(flag.default), flag.meaning] for flag in flags)
    return _table(["flag", "default", "meaning"], rows)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return _code(str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value))


def _launch(program: Command) -> Iterator[str]:
    flags = {flag.names[0]: flag for flag in program.flags}
    settings = {config.flag_name(item.name): item for item in dataclasses.fields(LaunchConfig)}
    yield from ["## kog-launch", ""]
    rows = (
        [_names(flags.pop(name)), _code(env.variable(item.name)), _code(item.name), _shown(item.default), item.metadata["help"]]
        for name, item in settings.items()
    )
    yield from _table(["flag", "variable", "TOML key", "default", "meaning"], rows)
    yield from ["These have no variable and no key:", "", *_options(flags.values())]


def _program(program: Command) -> Iterator[str]:
    """Its options, and those of each of its commands."""
    yield from [f"## {program.name}", ""]
    if program.flags:
        yield from _options(program.flags)
    for command in program.commands:
        yield from [f"### {command.name}", "", command.text, "", *(_options(command.flags) if command.flags else ())]


def page() -> str:
    """The whole page."""
    first, *others = programs()
    lines = [_HEAD, *_launch(first), *(line for program in others for line in _program(program))]
    lines += _program(of_typer("python -m kog_dist.train", get_command(train)))
    lines += ["## Other environment variables", ""]
    lines += _table(["variable", "meaning"], ([f"`{name.replace(', ', '`, `')}`", why] for name, why in VARIABLES.items()))
    lines += ["Ranks that mpirun started are known by the variables in `kog_dist/runtime/rank_env.py`."]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
