"""Options that several benchmarks have, and how lists in them are read."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from kog_dist.errors import ConfigError
from kog_dist.speculation import Speculation

SAMPLING_HELP = (
    "Compare kinds of sampling, the first with the others: greedy,temperature,top-p-logprobs,mask; a wrong one lists all."
)

Output = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the figures, too: .md, .csv, .json, or as a picture .png, .svg. May be given several times.",
    ),
]
# Of requests to any server.
Url = Annotated[str, typer.Option(help="The server: http://HOST:PORT, with or without /v1.")]
ServedModel = Annotated[str | None, typer.Option(help="Name to send. Default: the first that the server lists.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length (kog_dist, vLLM, SGLang).")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; below 0: the server's default.")]
AnswerTimeout = Annotated[float, typer.Option(metavar="SECONDS", help="For one answer.")]
ExtraBody = Annotated[str, typer.Option(metavar="JSON", help="Object with more fields of each request.")]
ApiKey = Annotated[
    str, typer.Option(envvar=["KOG_API_KEY", "OPENAI_API_KEY"], show_envvar=False, help="Or KOG_API_KEY, OPENAI_API_KEY.")
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: the bundled demo model.")]


def speculation_of(text: str) -> Speculation:
    """off, lookup or auto. Raises ConfigError."""
    if text not in tuple(Speculation):
        raise ConfigError(f"--speculate must be one of {', '.join(Speculation)}, got {text[:40]!r}")
    return Speculation(text)


def counts_of(text: str, option: str = "--ranks") -> tuple[int, ...]:
    """Numbers of at least 1: 1,2,4. Raises ConfigError that names `option`."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be numbers separated by commas, got {text!r}") from None
    if min(counts) < 1:
        raise ConfigError(f"{option} must be at least 1, got {text!r}")
    return counts


def times_of(text: str, option: str) -> dict[int, float]:
    """Microseconds by count: 8:1122,4:584."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        times = {int(count): float(us) for count, us in pairs}
    except ValueError:
        raise ConfigError(f"{option} must be like 8:1122,4:584, got {text!r}") from None
    if any(count not in (1, 2, 4, 8) or not us > 0 for count, us in times.items()):
        raise ConfigError(f"{option} takes counts of 1, 2, 4 and 8 with times above 0, got {text!r}")
    return times


def samplings_of(text: str) -> tuple[str, ...]:
    """Names of samplings: greedy,mask. Raises ConfigError."""
    from kog_dist.bench.kernel.sampling import SAMPLINGS

    names = tuple(part for part in text.split(",") if part)
    if not set(names) <= set(SAMPLINGS):
        raise ConfigError(f"--sampling must be one or more of {', '.join(SAMPLINGS)}, got {text!r}")
    return names


def builds_of(text: str) -> tuple[dict[str, int], ...]:
    """Options of builds: max_slots=8;pieces=1,pieces_in_flight=3. Raises ConfigError."""
    from kog_dist.bench.kernel.trial_shape import TrialShape

    known = {field.name for field in fields(TrialShape) if field.type == "int"}
    builds: list[dict[str, int]] = []
    for part in filter(None, text.split(";")):
        try:
            builds.append({name: int(value) for name, value in (option.split("=") for option in part.split(","))})
        except ValueError:
            raise ConfigError(f"--builds must be like max_slots=8;pieces=1,pieces_in_flight=3, got {text!r}") from None
        if not builds[-1].keys() <= known:
            raise ConfigError(f"--builds takes {', '.join(sorted(known))}, got {text!r}")
    return tuple(builds)
