"""What shapes a choice, as command lines give it: checked by name, and passed on. Without typer: clients start at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.rpc.fields import check_shaping


@dataclass(frozen=True, slots=True)
class ShapingOptions:
    """What was given; None and () where nothing was."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[str, ...] = ()
    min_tokens: int | None = None
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    def keywords(self) -> dict[str, Any]:
        """What was given, as keywords of `Client.generate`. Raises ConfigError naming the flag that is wrong."""
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("--json-schema and --regex exclude each other")
        given: dict[str, Any] = dict(self._given())
        if self.logit_bias:
            given["logit_bias"] = dict(map(_parse_bias, self.logit_bias))
            if len(given["logit_bias"]) < len(self.logit_bias):
                raise ConfigError("--logit-bias names a token twice")
        if self.json_schema is not None and self.json_schema.startswith("@"):
            given["json_schema"] = _read_schema(Path(self.json_schema[1:]))
        try:
            check_shaping(given, given.get("logit_bias", {}).items())
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            raise ConfigError(f"--{name.replace('_', '-')} {rest}") from None
        return given

    def arguments(self) -> list[str]:
        """What was given, as arguments of `kog-client generate`."""
        found = []
        for name, value in self._given():
            flag = name.replace("_", "-")
            found += [f"--{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
        return found

    def _given(self) -> list[tuple[str, Any]]:
        values = [(item.name, getattr(self, item.name)) for item in fields(self)]
        return [(name, value) for name, value in values if value is not None and value != ()]


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID=BIAS, such as 17=-2.5; got {text[:80]!r}") from None


def _read_schema(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json-schema @{path} cannot be read: {error}") from None
