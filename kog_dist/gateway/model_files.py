"""What the gateway reads of a model folder."""

from __future__ import annotations

from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.gateway.openai.served import OPENAI_DEFAULTS, sampling_defaults
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.manifest import Manifest, read_json
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"


def read_model(folder: Path | None) -> tuple[Tokenizer | None, ChatTemplate | None, SamplingParams]:
    """Tokenizer, chat template (its process runs: close it) and the model's own sampling. Raises CheckpointError."""
    if folder is None:
        return None, None, OPENAI_DEFAULTS
    tokenizer = Tokenizer.from_folder(folder)
    defaults = read_sampling_defaults(folder)
    template = None if tokenizer is None else ChatTemplate.from_folder(folder, tokenizer.special_tokens)
    if template is not None:
        template.check()
    return tokenizer, template, defaults


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """The model's own sampling. Raises CheckpointError for a file that is there and cannot be used."""
    config = read_json(folder, GENERATION_CONFIG, Manifest.from_folder(folder)) or {}
    try:
        return sampling_defaults(config)
    except ValueError as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG} cannot be used: {error}") from None
