"""A chat template rendered in its process: after a first byte of 0 a tokenizer_config.json with it, else the template."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model import chat_template, template_sandbox
from kog_dist.model.added_tokens import TOKENIZER_CONFIG_NAME
from kog_dist.model.chat_template import ChatTemplate, RenderLimits
from kog_dist.model.template_files import TEMPLATE_NAME
from tests.fuzz.refusals import refused

FOLDER = Path(tempfile.mkdtemp())
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ 7 * 7 }}"}]


class ForkedChild:
    """The process that renders, as ChatTemplate holds it, forked from this one: starting Python would take most of the time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        into, stdin = os.pipe()
        stdout, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(into, 0)
            os.dup2(out, 1)
            os.closerange(3, 64)
            sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
            try:
                template_sandbox._serve()
            finally:
                os._exit(0)
        os.close(into)
        os.close(out)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The status of a child that has ended."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, 9)

    def wait(self, _timeout: float = 0.0) -> int:
        """Its status."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


chat_template.subprocess.Popen = ForkedChild  # type: ignore[attr-defined]
USED_BYTES = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
LIMITS = RenderLimits(seconds=0.5, max_characters=10_000, memory_bytes=USED_BYTES + (256 << 20))


def one_input(data: bytes) -> None:
    """A text of bounded length, or the refusal of the template or of this conversation."""
    is_config, body = data[:1] == b"\0", data[1:]
    (FOLDER / (TOKENIZER_CONFIG_NAME if is_config else TEMPLATE_NAME)).write_bytes(body)
    (FOLDER / (TEMPLATE_NAME if is_config else TOKENIZER_CONFIG_NAME)).unlink(missing_ok=True)
    with refused(CheckpointError, RequestError):
        template = ChatTemplate.from_folder(FOLDER)
        if template is not None:
            with ChatTemplate(template.source, {"bos_token": "<s>"}, LIMITS) as limited:
                assert len(limited.render(MESSAGES)) <= LIMITS.max_characters
