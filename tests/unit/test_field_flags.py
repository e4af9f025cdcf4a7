"""A field of the settings is enough: its flag, its help, its default and its limits follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import typer

from kog_dist.config import SETTINGS, LaunchConfig, resolve
from kog_dist.errors import ConfigError
from kog_dist.gateway.cli import SHARED
from kog_dist.gateway.cli import app as gateway
from kog_dist.launch.flags import app as launch
from kog_dist.rpc.field_flags import FlagsOf, with_flags

FIELDS = {item.name: item for item in dataclasses.fields(LaunchConfig)}
LIMITED = [name for name, item in FIELDS.items() if item.metadata["limits"] is not None]
NUMBERS = [name for name, item in FIELDS.items() if item.type in ("int", "float", "int | None", "float | None")]
PAIRED = {"min_replicas", "max_replicas"}  # each is the limit of the other


@dataclass(frozen=True)
class Toy:
    name: str | None = field(default=None, metadata={"help": "A name.", "is_positional": True})
    share: float = field(default=0.5, metadata={"help": "A share."})
    count: int | None = field(default=None, metadata={"help": "A count.", "metavar": "N"})
    is_loud: bool = field(default=True, metadata={"help": "Loud."})
    pairs: tuple[tuple[int, float], ...] = field(default=(), metadata={"help": "Pairs.", "metavar": "A=B"})


def parameters(app: typer.Typer) -> dict[str, Any]:
    return {parameter.name or "": parameter for parameter in typer.main.get_command(app).params}


def toy(flags: FlagsOf, seen: list[dict[str, Any]]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command()
    @with_flags(toy=flags)
    def _command(first: bool = False, toy: Any = None, last: bool = False) -> None:
        seen.append({"first": first, **toy, "last": last})

    return app


def test_flags_stand_where_the_parameter_stood() -> None:
    seen: list[dict[str, Any]] = []
    app = toy(FlagsOf(Toy, shows_defaults=True), seen)
    made = parameters(app)
    assert [name for name in made if name != "help"] == ["first", "name", "share", "count", "is_loud", "pairs", "last"]
    assert (made["share"].help, made["is_loud"].help, made["count"].help) == (
        "A share. Default: 0.5.", "Loud. Default: yes.", "A count.",
    )  # fmt: skip
    assert (made["is_loud"].opts, made["is_loud"].secondary_opts) == (["--is-loud"], ["--no-is-loud"])
    app([], standalone_mode=False)
    app(["x", "--share=2", "--count=3", "--no-is-loud", "--pairs=1=2", "--pairs=3=4", "--last"], standalone_mode=False)
    nothing = dict.fromkeys(("name", "share", "count", "is_loud", "pairs"))
    assert seen == [
        {"first": False, **nothing, "last": False},
        {"first": False, "name": "x", "share": 2.0, "count": 3, "is_loud": False, "pairs": ["1=2", "3=4"], "last": True},
    ]


def test_a_command_can_take_some_of_the_fields() -> None:
    made = parameters(toy(FlagsOf(Toy, only=("count", "share")), []))
    assert [name for name in made if name != "help"] == ["first", "share", "count", "last"]
    assert made["share"].help == "A share."


def test_every_setting_is_a_flag_in_the_order_of_the_fields() -> None:
    made = parameters(launch)
    assert tuple(made)[: len(SETTINGS)] == SETTINGS
    for name, item in FIELDS.items():
        shown = made[name].help
        assert shown.startswith(item.metadata["help"])
        assert item.metadata["help"].endswith(".")
        assert shown.count("Default:") <= 1
        assert all(choice in shown for choice in item.metadata["choices"])
        assert made[name].default is None, "a flag that is not given leaves the setting to environment and file"


def test_the_gateway_shares_the_flags_of_the_same_meaning() -> None:
    own, launcher = parameters(gateway), parameters(launch)
    assert set(SHARED) <= set(SETTINGS)
    assert [(own[name].opts, own[name].help) for name in SHARED] == [
        (launcher[name].opts, launcher[name].help) for name in SHARED
    ]


def test_every_number_has_limits() -> None:
    assert set(NUMBERS) - set(LIMITED) == PAIRED


@pytest.mark.parametrize("name", LIMITED)
def test_limits_are_checked_by_name(name: str) -> None:
    (low, high), zero = FIELDS[name].metadata["limits"], FIELDS[name].metadata["zero"]
    others = {"remote_replicas": "a.json"} if name == "replicas" else {}
    inside = [low or 0.001, high] if isinstance(high, float) else [low, high, *([0] if zero else [])]
    for value in inside:
        assert getattr(resolve({name: value, **others}, {}, None).config, name) == value
    for value in (-1, type(high)(high + 1), *([0.0] if isinstance(high, float) else [])):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: {name} must be "):
            resolve({name: value, **others}, {}, None)


@pytest.mark.parametrize(
    ("low", "high", "is_allowed"), [(0, 1, False), (1, 0, False), (2, 1, False), (1, 257, False), (1, 256, True)]
)
def test_bounds_of_replicas_limit_each_other(low: int, high: int, is_allowed: bool) -> None:
    if is_allowed:
        assert LaunchConfig(min_replicas=low, max_replicas=high).has_router
        return
    with pytest.raises(ConfigError, match=r"^min_replicas must be at least 1 and at most max_replicas"):
        LaunchConfig(min_replicas=low, max_replicas=high)
