"""A chat template: first byte 0: tokenizer_config.json with it, else the template itself, rendered in its process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.chat_template import TEMPLATE_NAME, ChatTemplate, RenderLimits
from kog_dist.model.tokenizer import TOKENIZER_CONFIG_NAME
from tests.fuzz.refusals import refused

FOLDER = Path(tempfile.mkdtemp())
LIMITS = RenderLimits(seconds=0.5, max_characters=10_000)
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ 7 * 7 }}"}]


def one_input(data: bytes) -> None:
    """A text of bounded length, or the refusal of the template or of this conversation."""
    is_config, body = data[:1] == b"\0", data[1:]
    (FOLDER / (TOKENIZER_CONFIG_NAME if is_config else TEMPLATE_NAME)).write_bytes(body)
    (FOLDER / (TEMPLATE_NAME if is_config else TOKENIZER_CONFIG_NAME)).unlink(missing_ok=True)
    with refused(CheckpointError, RequestError):
        template = ChatTemplate.from_folder(FOLDER, {"bos_token": "<s>"})
        if template is not None:
            with ChatTemplate(template.source, {"bos_token": "<s>"}, LIMITS) as limited:
                assert len(limited.render(MESSAGES)) <= LIMITS.max_characters
