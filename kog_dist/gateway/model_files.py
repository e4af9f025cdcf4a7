"""What the gateway reads of a model folder."""

from __future__ import annotations

from pathlib import Path

from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.generation_config import OPENAI_DEFAULTS, read_sampling_defaults
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams


def read_model(folder: Path | None) -> tuple[Tokenizer | None, ChatTemplate | None, SamplingParams]:
    """Tokenizer, chat template (its process runs: close it) and the model's own sampling. Raises CheckpointError."""
    if folder is None:
        return None, None, OPENAI_DEFAULTS
    tokenizer = Tokenizer.from_folder(folder)
    defaults = read_sampling_defaults(folder)
    template = None if tokenizer is None else ChatTemplate.from_folder(folder, tokenizer)
    if template is not None:
        _ = template.facts  # now, not while the first request waits
    return tokenizer, template, defaults
