"""Where a model folder keeps its chat templates, as transformers reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kog_dist.errors import CheckpointError
from kog_dist.model.added_tokens import TOKENIZER_CONFIG_NAME
from kog_dist.model.manifest import Manifest, read_json, read_small_file
from kog_dist.quoting import short
from kog_dist.records import dataclass

TEMPLATE_NAME: Final = "chat_template.jinja"
TEMPLATES_FOLDER: Final = "additional_chat_templates"  # NAME.jinja of templates besides the default one
_MAX_CHARS: Final = 2**20


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """`tool_use`: where a request has tools; None: the default one."""

    default: str
    tool_use: str | None = None


def template_sources(folder: Path) -> TemplateSources | None:
    """The templates of a folder, None if it has none.

    Files count before `chat_template` of tokenizer_config.json, which is a text or a list of named ones. Raises CheckpointError
    naming the file that is wrong.
    """
    manifest = Manifest.from_folder(folder)
    config = folder / TOKENIZER_CONFIG_NAME
    named = _named((read_json(folder, TOKENIZER_CONFIG_NAME, manifest) or {}).get("chat_template"), config)
    default = _read(folder, TEMPLATE_NAME, manifest)
    if default is not None:
        named = {"default": default}
    additional = os.path.join(TEMPLATES_FOLDER, "tool_use.jinja")
    if os.path.lexists(folder / additional) and (tool_use := _read(folder, additional, manifest)) is not None:
        named["tool_use"] = tool_use
    if not named:
        return None
    if "default" not in named:
        raise CheckpointError(f"{config}: chat_template has no entry named 'default', only {short(', '.join(named), 200)}")
    for name, source in named.items():
        if len(source) > _MAX_CHARS:
            raise CheckpointError(f"{folder}: the chat template {short(name)} has {len(source)} characters, at most {_MAX_CHARS}")
    return TemplateSources(named["default"], named.get("tool_use"))


def _read(folder: Path, name: str, manifest: Manifest | None) -> str | None:
    raw = read_small_file(folder, name, manifest)
    try:
        return None if raw is None else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / name} is not UTF-8: {error}") from None


def _named(value: object, path: Path) -> dict[str, str]:
    """The templates in tokenizer_config.json by name: a string, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) and value else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("template"), str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of objects with name and template")
        named[entry["name"]] = entry["template"]
    return named
