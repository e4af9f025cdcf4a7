"""The demo model as the OpenAI layer sees it, with and without a chat template."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.tokenizer import CHANNEL_TAGS, Tokenizer
from tests.unit.gateway_openai.engine_script import CHANNELS_TEMPLATE, TAGGED_TEMPLATE, TemplateTwin


@pytest.fixture(scope="session")
def base_model() -> ServedModel:
    """No template: chats become plain text."""
    tokenizer = Tokenizer.from_folder(Path(str(resources.files("kog_dist"))) / "models" / "demo")
    return ServedModel("demo", ("demo-alias",), 2048, 4096, tokenizer, None, 1_700_000_000)


@pytest.fixture(scope="session")
def tagged_model(base_model: ServedModel) -> ServedModel:
    """A template that has models write calls inside <tool_call>."""
    return dataclasses.replace(base_model, chat_template=TemplateTwin(TAGGED_TEMPLATE))


@pytest.fixture(scope="session")
def channels_model(base_model: ServedModel) -> ServedModel:
    """A tokenizer and a template as those of gpt-oss."""
    tokenizer = Tokenizer(json.dumps(with_channels()))
    return dataclasses.replace(base_model, tokenizer=tokenizer, chat_template=TemplateTwin(CHANNELS_TEMPLATE), vocab_size=4200)


def with_channels() -> dict[str, Any]:
    """The demo's tokenizer.json with the tags of channels."""
    raw: dict[str, Any] = json.loads((Path(str(resources.files("kog_dist"))) / "models" / "demo" / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = 1 + max(raw["model"]["vocab"].values())
    raw["added_tokens"] += [
        {"id": first + idx, "content": tag, "special": True, **flags} for idx, tag in enumerate(CHANNEL_TAGS)
    ]  # fmt: skip
    return raw
