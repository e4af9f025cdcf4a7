"""What the time to a first token consists of, stage by stage, for `kog-bench requests`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kog_dist.bench.engine.request_client import TimedAnswer
from kog_dist.runtime.stages import STAGES

STEPS = ("received", *STAGES, "in the client")


def steps_ms(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Medians of the milliseconds that led to each of STEPS, from the stage before; without those that no answer had.

    Needs a client on the engine's machine: both clocks must be one.
    """
    each = [_steps_ms(answer) for answer in answers]
    return {name: statistics.median(found) for name in STEPS if (found := [steps[name] for steps in each if name in steps])}


def _steps_ms(answer: TimedAnswer) -> dict[str, float]:
    done = answer.done
    if done.received_s is None or not done.stages_s:
        return {}
    stages = zip(STAGES, done.stages_s, strict=True)
    moments = {"received": done.received_s} | {name: done.received_s + since_s for name, since_s in stages if since_s is not None}
    before_s, found = answer.sent_s, {}
    for name, moment_s in (moments | {"in the client": answer.arrivals[0][0]}).items():
        found[name] = 1e3 * (moment_s - before_s)
        before_s = moment_s
    return found


def show_steps(name: str, figures: Sequence[dict[str, Any]], key: str) -> None:
    """A table of what `steps_ms` gave, at `key` of figures of first tokens: a line for each stage, a column for each prompt."""
    columns = [figure for figure in figures if figure[key]]
    if not columns:
        return
    heads = [f"{figure['kept']:,}+{figure['new']}" if figure.get("kept") else f"{figure['prompt']:,}" for figure in columns]
    print(f"{name} {'by prompt':>14}" + "".join(f"{head:>10}" for head in heads), flush=True)
    for step in (step for step in STEPS if any(step in figure[key] for figure in columns)):
        values = [figure[key].get(step) for figure in columns]
        print(f"{name} {step:>14}" + "".join(f"{'-':>10}" if ms is None else f"{ms:10.3f}" for ms in values), flush=True)


def show_first_tokens(name: str, figures: Sequence[dict[str, Any]], wanted: Mapping[int | None, float]) -> None:
    """A line for each of `Measures.first_tokens`, then where the time went. `wanted`: ms by prompt; None: behind a kept one."""
    for figure in figures:
        kept = figure.get("kept")
        prompt = f"{kept:,} kept, {figure['new']} new" if kept else f"{figure['prompt']:,}"
        limit = wanted.get(None if kept else figure["prompt"])
        print(
            f"{name}: prompt {prompt:>20}: first token after {figure['ms']:8.2f} ms (most {figure['most_ms']:.2f}, "
            f"by the engine {figure['engine_ms']:.2f}, after a pause {figure['rested_ms']:.2f}, cached {figure['cached_tokens']})"
            + (f", wanted {limit:g}" if limit else ""),
            flush=True,
        )
    show_steps(f"{name}: ms until", figures, "steps_ms")
    show_steps(f"{name}: ms after a pause until", figures, "rested_steps_ms")
