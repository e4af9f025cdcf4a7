"""The flags of `kog-bench serve`, checked."""

from __future__ import annotations

import json
import math
from pathlib import Path

from kog_dist.bench.options import speculation_of
from kog_dist.bench.service.prompts import Prompt, prompts_from_file, prompts_of_agents, random_prompts
from kog_dist.bench.service.serve import PATHS, ServeSettings
from kog_dist.chat.wire import ServiceUrl
from kog_dist.errors import ConfigError
from kog_dist.runtime.command_line import hide_own


def settings_of(
    *, url: str, backend: str, model: str | None, num_prompts: int, num_warmups: int, max_concurrency: int | None,
    request_rate: float | None, input_len: int, output_len: int, prompts: str | None, ignore_eos: bool, temperature: float,
    seed: int, timeout_s: float, extra_body: str, api_key: str, agents: int = 0, shared_len: int = 0,
    speculate: str | None = None,
) -> tuple[ServeSettings, list[Prompt]]:  # fmt: skip
    """What to ask and how. Raises ConfigError naming the flag that is wrong."""
    hide_own("--api-key", api_key or None)
    if backend not in PATHS:
        raise ConfigError(f"--backend must be {' or '.join(PATHS)}, got {backend!r}")
    counts = {"--num-prompts": num_prompts, "--input-len": input_len, "--output-len": output_len}
    counts |= {} if max_concurrency is None else {"--max-concurrency": max_concurrency}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    if num_warmups < 0:
        raise ConfigError(f"--num-warmups must not be negative, got {num_warmups}")
    if not timeout_s > 0:
        raise ConfigError(f"--timeout must be more than 0 seconds, got {timeout_s:g}")
    if request_rate is not None and not request_rate > 0:
        raise ConfigError(f"--request-rate must be more than 0 requests per second, got {request_rate:g}")
    drafts = {} if speculate is None else {"speculate": speculation_of(speculate)}
    settings = ServeSettings(
        ServiceUrl.parse(url), backend, model, output_len, math.inf if request_rate is None else request_rate,
        1 if max_concurrency is None and request_rate is None else max_concurrency, num_warmups, seed,
        temperature if temperature >= 0 else None, ignore_eos, timeout_s, drafts | _object(extra_body), api_key,
    )  # fmt: skip
    if min(agents, shared_len) < 0 or (shared_len and not agents) or (agents and prompts is not None):
        raise ConfigError("--agents and --shared-len must not be negative; --shared-len needs --agents, which --prompts excludes")
    if prompts is not None:
        asked = prompts_from_file(Path(prompts), num_prompts)
    elif agents:
        asked = prompts_of_agents(num_prompts, agents, shared_len, input_len, seed)
    else:
        asked = random_prompts(num_prompts, input_len, seed)
    if backend == "openai":
        for prompt in asked:
            prompt.as_text()  # raises where it cannot be asked
    return settings, asked


def trace_settings(
    *, url: str, backend: str, model: str | None, output_len: int, ignore_eos: bool, temperature: float, timeout_s: float,
    extra_body: str, api_key: str,
) -> ServeSettings:  # fmt: skip
    """How the turns of a trace are asked: one after the other, and none before. Raises ConfigError naming the wrong flag."""
    return settings_of(
        url=url, backend=backend, model=model, num_prompts=1, num_warmups=0, max_concurrency=1, request_rate=None, input_len=1,
        output_len=output_len, prompts=None, ignore_eos=ignore_eos, temperature=temperature, seed=0, timeout_s=timeout_s,
        extra_body=extra_body, api_key=api_key,
    )[0]  # fmt: skip


def _object(text: str) -> dict[str, object]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text[:60]!r}")
    return parsed
