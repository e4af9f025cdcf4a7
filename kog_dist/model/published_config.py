"""Which model a folder has: `config.json`, read by the family that its `model_type` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.families import FAMILIES
from kog_dist.model.families.computation import check_computation, left_out
from kog_dist.model.families.fields import Config, unread_of_rope
from kog_dist.model.families.stored import Family
from kog_dist.model.formats.quantisation import (
    KEY,
    MODELOPT_NAME,
    Quantisation,
    from_modelopt_file,
    read_quantisation,
    unread_of_quantisation,
)
from kog_dist.model.formats.rounding import ROUNDED_COLUMNS
from kog_dist.model.manifest import read_json
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short

_MOST_NAMED = 12
_DTYPES = ("bfloat16", "float16", "float32")


class PublishedConfig(NamedTuple):
    """What a `config.json` says. `dtype`: of the tensors that are not quantised; None if it does not say. `note`: what it has
    besides, and what is left out; empty if nothing is.
    """

    spec: ModelSpec
    family: Family
    dtype: str | None
    quantisation: Quantisation | None
    note: str = ""

    def spec_to_run(self, context: int, quantize: str) -> ModelSpec:
        """The spec for `open_checkpoint`'s arguments: with that context, and with the lanes of the weights as they are read.

        Raises ConfigError for the context.
        """
        spec = self.spec.with_context(context)
        if quantize == "none" or self.quantisation is not None or self.family.rounded_lanes is None:
            return spec
        return replace(spec, num_lanes=self.family.rounded_lanes(spec, ROUNDED_COLUMNS))


def spec_of_folder(folder: Path) -> ModelSpec:
    """The spec of a model folder. Raises CheckpointError if `config.json` is missing, no JSON, or not a model we run."""
    return read_config_file(folder).spec


def read_config_file(folder: Path) -> PublishedConfig:
    """All that `config.json` says. Raises CheckpointError as `spec_of_folder` does."""
    path = folder / "config.json"
    parsed = read_json(folder, path.name, None)
    if parsed is None:
        raise CheckpointError(f"{folder} has no config.json; MODEL must be a folder with a published checkpoint")
    beside = folder / MODELOPT_NAME
    try:
        if parsed.get(KEY) is None and (said := read_json(folder, beside.name, None)) is not None:
            path, parsed = beside, parsed | {KEY: from_modelopt_file(said)}
        family = family_of(parsed)
        parsed = dict(_prepared(family, parsed))
        quantisation = read_quantisation(parsed)
        name = path.name if os.path.lexists(path) else folder.name  # a GGUF file says the same
        return PublishedConfig(read_config(parsed), family, _dtype(parsed), quantisation, _note(parsed, family, name))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_config(config: Config) -> ModelSpec:
    """The spec in a parsed `config.json`. Raises ConfigError naming the key that is missing or contradictory, or that changes
    what is computed in a way that is not supported.
    """
    family = family_of(config)
    config = _prepared(family, config)
    check_computation(config, family.keys, family.own, has_experts=family.has_experts)
    left_out(config, family.keys | set(family.own))
    return family.read_config(config)


def _prepared(family: Family, config: Config) -> Mapping[str, object]:
    return config if family.prepared is None else family.prepared(config)


def _note(config: Config, family: Family, name: str) -> str:
    """What is left out of a config that was read."""
    unread = left_out(config, family.keys | set(family.own)) + unread_of_rope(config) + unread_of_quantisation(config)
    return f"{name}: {', '.join(map(short, unread[:_MOST_NAMED]))} left out{_more(unread)}" if unread else ""


def _more(names: list[str]) -> str:
    return f", and {len(names) - _MOST_NAMED} more names" if len(names) > _MOST_NAMED else ""


def family_of(config: Config) -> Family:
    """The family that a parsed `config.json` belongs to. Raises ConfigError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type {short(model_type)} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _dtype(config: Config) -> str | None:
    """Told only where there are no files to tell."""
    given = (config.get(key) for key in ("dtype", "torch_dtype"))
    return next((value for value in given if isinstance(value, str) and value in _DTYPES), None)
