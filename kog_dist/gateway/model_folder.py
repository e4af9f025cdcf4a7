"""What a gateway reads of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError
from kog_dist.gateway.openai.served import OPENAI_DEFAULTS, sampling_defaults
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
MAX_CONFIG_BYTES = 1 << 20


def read_model(folder: str | None) -> tuple[Tokenizer | None, ChatTemplate | None, SamplingParams]:
    """Tokenizer, chat template and sampling of a model folder. Raises CheckpointError."""
    if folder is None:
        return None, None, OPENAI_DEFAULTS
    tokenizer = Tokenizer.from_folder(Path(folder))
    template = None if tokenizer is None else ChatTemplate.from_folder(Path(folder), tokenizer.special_tokens)
    if template is not None:
        template.check()
    return tokenizer, template, _read_defaults(Path(folder) / GENERATION_CONFIG)


def _read_defaults(path: Path) -> SamplingParams:
    """The model's own sampling. Raises CheckpointError for a file that is there and cannot be used."""
    try:
        with path.open("rb") as stream:
            parsed: Any = json.loads(stream.read(MAX_CONFIG_BYTES))
        if not isinstance(parsed, dict):
            raise ValueError("it must be an object")
        return sampling_defaults(parsed)
    except FileNotFoundError:
        return OPENAI_DEFAULTS
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
