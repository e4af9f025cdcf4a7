"""One prompt and how to answer it, as `kog-client generate` and `kog-launch --prompt` take them from a command line.

Without typer: clients start at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.quoting import short
from kog_dist.records import dataclass
from kog_dist.rpc.messages.limits import MAX_SCHEMA_BYTES
from kog_dist.sampling_params import GREEDY, SamplingParams
from kog_dist.speculation import Speculation

_MAX_ID_DIGITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """What to generate; exactly one of `prompt` and `prompt_ids` is set. `as_json`: one JSON object instead of text."""

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_digests: bool = False
    stamps: bool = False
    deadline_s: float | None = None
    reuse_kv: bool = True
    conversation: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    cache_salt: str | None = None
    speculate: str | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_ids is not None:
            raise ConfigError("--prompt and --prompt-ids exclude each other")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if self.speculate is not None and self.speculate not in tuple(Speculation):
            raise ConfigError(f"--speculate must be one of {', '.join(Speculation)}, got {short(self.speculate)}")
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("--json-schema and --regex exclude each other")

    def keywords(self) -> dict[str, Any]:
        """As `Client.generate` takes them."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "as_json"}

    def write(self) -> int:
        """The descriptor of a nameless file with the request in it, for `read` in another process; prompts are in no argv."""
        fd = os.memfd_create("kog-prompt", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as stream:
            stream.write(json.dumps(asdict(self)).encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    @classmethod
    def read(cls, fd: int) -> PromptRequest:
        """What `write` wrote. Closes the descriptor."""
        with os.fdopen(fd, "rb") as stream:
            values = json.loads(stream.read().decode("utf-8", "surrogatepass"))
        sampling = values["sampling"]
        sampling["logit_bias"] = tuple(map(tuple, sampling["logit_bias"]))
        ids = None if values["prompt_ids"] is None else tuple(values["prompt_ids"])
        return cls(**values | {"sampling": SamplingParams(**sampling), "prompt_ids": ids, "stop": tuple(values["stop"])})


def sampling_of(flags: Mapping[str, Any]) -> SamplingParams:
    """The parameters of flags (None: not given). Raises ConfigError naming the flag that is wrong."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = tuple(map(_parse_bias, given["logit_bias"]))
    try:
        return SamplingParams(**given)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from None


def parse_ids(text: str | None) -> tuple[int, ...] | None:
    """Token ids out of "1,2,3". Raises ConfigError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MAX_ID_DIGITS for part in parts):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ConfigError(f"--prompt-ids must be token ids separated by commas, such as 1,2,3; got {shown!r}")
    return tuple(map(int, parts))


def read_schema(given: str | None) -> str | None:
    """The text of a JSON schema, which `@FILE` names. Raises ConfigError."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return read_text(Path(given[1:]), MAX_SCHEMA_BYTES)
    except OSError as error:
        raise ConfigError(f"--json-schema {given} cannot be read: {error.strerror}") from None


def flags_of_one_request(**flags: object) -> Sequence[str]:
    """The flags that were given; for a command that needs none of them."""
    return [f"--{name.replace('_', '-')}" for name, value in flags.items() if value not in (None, (), []) and value is not False]


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID=BIAS, such as 17=-2.5; got {text[:80]!r}") from None
