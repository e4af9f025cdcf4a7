"""Named runs: TOML files with the tables [model], [run] and [execution], such as those of configs/train/."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from kog_dist.errors import ConfigError
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.train.settings import Execution, RunSettings
from kog_dist.train.specs import named_spec

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class RunConfig:
    """A model and how it is trained."""

    spec: ModelSpec
    settings: RunSettings
    execution: Execution


def read_tables(path: Path, known: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file. Raises ConfigError if it cannot be read or has others than the `known` ones."""
    try:
        with path.open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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


def settings_of(kind: type[Settings], table: Mapping[str, Any], path: Path) -> Settings:
    """A dataclass from a table. Raises ConfigError naming the key that is unknown, missing or of the wrong type."""
    known = get_type_hints(kind)
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{path}: there is no key {key!r}; known are {', '.join(known)}")
        try:
            TypeAdapter(known[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{path}: {key} = {value!r}: {error.errors()[0]['msg']}") from None
    try:
        return kind(**table)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
