"""Named runs: TOML files with the tables [model], [run] and [execution], such as those of configs/train/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass
from kog_dist.train.settings import Execution, RunSettings
from kog_dist.train.specs import named_spec

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class RunConfig:
    """A model and how it is trained."""

    spec: ModelSpec
    settings: RunSettings
    execution: Execution


def read_tables(path: Path, known: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """The tables of a TOML file. Raises ConfigError if it cannot be read or has others than the `known` ones."""
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ConfigError(f"{path} has [{name}]; a training configuration has the tables {', '.join(known)}")
    return tables


def read_run_config(path: Path) -> RunConfig:
    """Read a run. Raises ConfigError naming the file and the key that is unknown or wrong."""
    tables = read_tables(path, ("model", "run", "execution"))
    return RunConfig(
        spec_of(tables.get("model", {}), path),
        settings_of(RunSettings, tables.get("run", {}), path),
        settings_of(Execution, tables.get("execution", {}), path),
    )


def spec_of(table: Mapping[str, Any], path: Path) -> ModelSpec:
    """[model]: `shape` names one of `specs`, otherwise the fields of a ModelSpec."""
    if "shape" in table:
        if len(table) > 1:
            raise ConfigError(f"{path}: [model] has shape and other keys; give the name or the fields")
        return named_spec(table["shape"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    if "head_type" in values:
        try:
            values["head_type"] = HeadType(values["head_type"])
        except ValueError:
            raise ConfigError(f"{path}: there is no head_type {values['head_type']!r}") from None
    return settings_of(ModelSpec, values, path)


def settings_of(kind: type[Settings], table: Mapping[str, object], path: Path) -> Settings:
    """A dataclass from a table. Raises ConfigError naming the key that is unknown, missing or of the wrong type."""
    known = get_type_hints(kind)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{path}: there is no key {key!r}; known are {', '.join(known)}")
        if not _fits(value, known[key]):
            raise ConfigError(f"{path}: {key} = {value!r} is of the wrong type, it must be {_name(known[key])}")
    try:
        return kind(**table)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _fits(value: object, hint: Any) -> bool:
    """Whether a TOML value is of a field's type; every int is a float, and no bool is an int."""
    if get_origin(hint) is UnionType:
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return isinstance(value, get_origin(hint)) and all(_fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
