"""The one request of `kog-launch --prompt`: checked here, carried out by a `kog-client generate` child."""

from __future__ import annotations

from dataclasses import dataclass

from kog_dist.errors import ConfigError
from kog_dist.rpc.fields import check_temperature
from kog_dist.rpc.shaping_options import ShapingOptions

_MAX_ID_DIGITS = 20


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What to generate; exactly one of `prompt` and `prompt_ids` is set. None means the client's default."""

    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    json: bool
    logit_digests: bool
    shaping: ShapingOptions

    @classmethod
    def from_flags(
        cls, *, prompt: str | None, prompt_ids: str | None, max_tokens: int | None, temperature: float | None, seed: int | None,
        stop: tuple[str, ...], ignore_eos: bool, json: bool, logit_digests: bool, shaping: ShapingOptions,
    ) -> PromptRequest | None:  # fmt: skip
        """The request, or None when no prompt is given: then the engine serves. Raises ConfigError."""
        if prompt is not None and prompt_ids is not None:
            raise ConfigError("--prompt and --prompt-ids exclude each other")
        if prompt is None and prompt_ids is None:
            given = {
                "--max-tokens": max_tokens is not None, "--temperature": temperature is not None, "--seed": seed is not None,
                "--stop": bool(stop), "--ignore-eos": ignore_eos, "--json": json, "--logit-digests": logit_digests,
            }  # fmt: skip
            flags = [flag for flag, is_given in given.items() if is_given]
            flags += [argument.partition("=")[0] for argument in shaping.arguments()]
            if flags:
                flag = flags[0]
                raise ConfigError(f"{flag} describes one request and goes only with --prompt or --prompt-ids")
            return None
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"--max-tokens must be at least 1, got {max_tokens}")
        if temperature is not None:
            try:
                check_temperature(temperature)
            except ValueError as error:
                raise ConfigError(f"--{error}") from None
        if seed is not None and not 0 <= seed < 2**63:
            raise ConfigError(f"--seed must be between 0 and 2**63 - 1, got {seed}")
        shaping.keywords()  # raises what the client would
        ids = None if prompt_ids is None else _parse_ids(prompt_ids)
        return cls(prompt, ids, max_tokens, temperature, seed, stop, ignore_eos, json, logit_digests, shaping)

    def client_arguments(self) -> list[str]:
        """The flags of `kog-client generate` for this request."""
        arguments = [f"--prompt={self.prompt}"] if self.prompt is not None else []
        if self.prompt_ids is not None:
            arguments.append("--prompt-ids=" + ",".join(map(str, self.prompt_ids)))
        for flag, value in (("max-tokens", self.max_tokens), ("temperature", self.temperature), ("seed", self.seed)):
            if value is not None:
                arguments.append(f"--{flag}={value}")
        arguments += [f"--stop={text}" for text in self.stop] + self.shaping.arguments()
        switches = (("ignore-eos", self.ignore_eos), ("json", self.json), ("logit-digests", self.logit_digests))
        return arguments + [f"--{flag}" for flag, is_on in switches if is_on]


def _parse_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MAX_ID_DIGITS for part in parts):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ConfigError(f"--prompt-ids must be token ids separated by commas, such as 1,2,3; got {shown!r}")
    return tuple(map(int, parts))
