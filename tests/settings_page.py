"""Writes docs/settings.md from the code: `python -m tests.settings_page`. A unit test compares the page with what this gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from kog_dist import env
from kog_dist.bench.cli import app as bench
from kog_dist.chat.cli import app as chat
from kog_dist.config import LaunchConfig
from kog_dist.gateway.cli import app as gateway
from kog_dist.launch.flags import app as launch
from kog_dist.rpc.flags import app as client

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_COMMON = 3  # kog-bench: options of at least so many commands are shown
_HEAD = """\
# Settings

Every flag, environment variable and configuration key. This page is generated: `python -m tests.settings_page`.

A setting of `kog-launch` has one name in three places, and the first that gives it wins: the flag
(`--stall-timeout 2`), the environment (`KOG_STALL_TIMEOUT=2`), the TOML file of `--config` (`stall_timeout = 2`). An
unknown key or variable is refused. `kog-launch --print-config` shows each value and where it came from. Files for
common runs are in `configs/`.
"""
# Read by the code besides KOG_*; `tests/unit/test_documents.py` compares the names with the code.
VARIABLES = {
    "XDG_RUNTIME_DIR": "where folders of running engines are: `$XDG_RUNTIME_DIR/kog`; without it `kog-UID` in `TMPDIR` or `/tmp`",
    "XDG_STATE_HOME": "what outlives an engine: logs without `--log-dir` in `kog/logs/INSTANCE`, lines typed into `kog-chat` in "
    "`kog/chat_history`; default `~/.local/state`",
    "XDG_CACHE_HOME": "where built device programs and chosen algorithms are kept; default `~/.cache`",
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


def _shown(value: Any) -> str:
    if value is None or value == () or value == []:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def _names(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _options(parameters: Iterable[Any]) -> Iterator[list[str]]:
    for parameter in parameters:
        default = "" if parameter.default is False else _shown(parameter.default)
        yield [_names(parameter), default, _meaning(parameter)]


def _params(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.name != "help" and not getattr(parameter, "hidden", False)]


def _meaning(parameter: Any) -> str:
    return getattr(parameter, "help", None) or ""


_OPTIONS = ["flag", "default", "meaning"]


def _launch() -> Iterator[str]:
    parameters = {parameter.name: parameter for parameter in _params(typer.main.get_command(launch))}
    settings = {item.name: item for item in dataclasses.fields(LaunchConfig)}
    yield from ["## kog-launch", ""]
    rows = (
        [_names(parameters[name]), f"`{env.variable(name)}`", f"`{name}`", _shown(item.default), item.metadata["help"]]
        for name, item in settings.items()
    )
    yield from _table(["flag", "variable", "TOML key", "default", "meaning"], rows)
    yield from ["These have no variable and no key:", ""]
    yield from _table(_OPTIONS, _options(one for name, one in parameters.items() if name not in settings))


def _client() -> Iterator[str]:
    group: Any = typer.main.get_command(client)
    yield from ["## kog-client", ""]
    for name, command in group.commands.items():
        yield from [f"### kog-client {name}", "", command.help or command.short_help or "", ""]
        yield from _table(_OPTIONS, _options(_params(command)))


def _single(name: str, app: typer.Typer) -> Iterator[str]:
    yield from [f"## {name}", ""]
    yield from _table(_OPTIONS, _options(_params(typer.main.get_command(app))))


def _bench() -> Iterator[str]:
    group: Any = typer.main.get_command(bench)
    yield from ["## kog-bench", "", "`kog-bench COMMAND --help` lists all options of a command.", ""]
    yield from ["`kog-bench --dirty COMMAND` may write figures of changes in no commit into `docs/results`.", ""]
    yield from _table(["command", "does"], ([f"`{name}`", _first(one.help)] for name, one in group.commands.items()))
    every = [(name, parameter) for name, one in group.commands.items() for parameter in _params(one)]
    counts = Counter(parameter.name for _, parameter in every)
    yield from ["Options of several commands:", ""]
    seen: dict[str, list[str]] = {}
    for name, parameter in every:
        if counts[parameter.name] >= _COMMON:
            seen.setdefault(parameter.name, [_names(parameter), "", _meaning(parameter)])[1] += f"{name} "
    yield from _table(
        ["flag", "commands", "meaning, of the first"], ([a, b.strip().replace(" ", ", "), c] for a, b, c in seen.values())
    )


def _first(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def page() -> str:
    """The whole page."""
    lines = [_HEAD, *_launch(), *_client(), *_single("kog-chat", chat), *_single("kog-gateway", gateway), *_bench()]
    lines += ["## Other environment variables", ""]
    lines += _table(["variable", "meaning"], ([f"`{name.replace(', ', '`, `')}`", why] for name, why in VARIABLES.items()))
    lines += ["Ranks that mpirun started are known by the variables in [launchers.md](launchers.md)."]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
