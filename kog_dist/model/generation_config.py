"""`generation_config.json` of a model folder: the ids that end an answer, and the model's own sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import CheckpointError
from kog_dist.model.manifest import Manifest, read_json
from kog_dist.quoting import short
from kog_dist.sampling_params import GREEDY, SamplingParams

GENERATION_CONFIG_NAME: Final = "generation_config.json"
MAX_EOS_IDS: Final = 16  # room for stop ids in a request block
OPENAI_DEFAULTS: Final = SamplingParams(temperature=1.0)
_MODEL_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that the file may set


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a generation: `eos_token_id` of generation_config.json, else of config.json, else none. An int or a list.

    Raises CheckpointError naming the file if the value is something else, or more than 16 ids.
    """
    manifest = Manifest.from_folder(folder)
    for name in (GENERATION_CONFIG_NAME, "config.json"):
        value = (read_json(folder, name, manifest) or {}).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids) or len(ids) > MAX_EOS_IDS:
            raise CheckpointError(
                f"{folder / name}: eos_token_id must be a token id or at most {MAX_EOS_IDS} of them, got {short(value)}"
            )
        return tuple(dict.fromkeys(ids))
    return ()


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """What counts over HTTP where a request says nothing. Raises CheckpointError for a file that cannot be used."""
    config = read_json(folder, GENERATION_CONFIG_NAME, Manifest.from_folder(folder)) or {}
    try:
        return sampling_defaults(config)
    except ValueError as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG_NAME} cannot be used: {error}") from None


def sampling_defaults(config: Mapping[str, object]) -> SamplingParams:
    """The same of a parsed generation_config.json ({} without one): its own values, else OpenAI's defaults.

    Raises ValueError naming a value out of range.
    """
    given: dict[str, Any] = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    if type(given.get("top_k")) is int and given["top_k"] == -1:  # all, as 0 is
        given["top_k"] = 0
    return replace(OPENAI_DEFAULTS, **given)


def shown_sampling(params: SamplingParams) -> str:
    """The same for people: `temperature 0.6, top_p 0.95`, or `greedy`."""
    given = [f"{name} {value:g}" for name in _MODEL_DEFAULTS if (value := getattr(params, name)) != getattr(GREEDY, name)]
    return ", ".join(given) if params.temperature else ", ".join(["greedy", *given])
