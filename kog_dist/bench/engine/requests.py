"""`kog-bench requests`: whole requests through a real engine and a client of its RPC, on GPUs or CPU ranks.

First tokens by length of the prompt, speed of each kind of sampling beside the bare kernel and with JSON schemas, and how soon a
cancel and an abort are obeyed.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kog_dist.bench.engine.request_client import RequestClient
from kog_dist.bench.engine.request_measures import NUM_BARE, Measures, Workload
from kog_dist.bench.engine.request_stages import show_first_tokens
from kog_dist.bench.engine.session import EngineSession, engine_session
from kog_dist.bench.fakes.random_model import random_model
from kog_dist.bench.report import finishing, machine
from kog_dist.launch.gpu_choice import PREFILLED_GPUS
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.transport import Access

# What is wanted of the 2B shape on H200s, milliseconds to the first token by GPUs and prompt; None: behind a kept beginning.
WANTED_MS: dict[int, dict[int | None, float]] = {
    1: {128: 3, 512: 6, 2048: 16, 4000: 32, None: 4},
    4: {128: 2.5, 512: 4, 2048: 8, 4000: 14},
}
WANTED_JSON_PER_S = {4: 2000}  # tokens, by GPUs
OBEYED_MS = 250.0
ABORTS = ("prefill", "decode")
Measure = Callable[[], list[dict[str, Any]]]
Show = Callable[[list[dict[str, Any]]], None]
_READY_S = 120.0


def run(
    model: str | None,
    spec_name: str,
    counts: Sequence[int],
    workload: Workload,
    *,
    on_gpus: bool,
    aborts: Sequence[str] = ABORTS,
    prefill: str = "auto",
) -> bool:
    """Measure an engine on each number of ranks, one for each of `aborts`; prints tables, then the JSON object.

    False: a request went wrong; what is missing stands in `errors` of the figures.
    """
    before = machine()
    configuration: dict[str, object] = {
        "model": model or f"{spec_name}, random weights",
        "device": "cuda" if on_gpus else "cpu",
        "prefill": prefill,
        **asdict(workload),
    }
    if on_gpus:
        from kog_dist.bench.kernel.gpu import require_gpus

        configuration["gpu"] = require_gpus(max(counts))
    begin_s = time.monotonic()
    with _given(model) if model else random_model(spec_name, on_gpus=on_gpus) as (folder, spec):
        workload.check(spec)
        configuration["write_s"] = round(time.monotonic() - begin_s, 2)
        has_bare = on_gpus and model is None and spec_name != "tiny"
        bare = {count: _bare_kernel(spec_name, count, workload) if has_bare else None for count in counts}
        is_2b = has_bare and spec_name == "2b"
        wanted, wanted_json = (WANTED_MS, WANTED_JSON_PER_S) if is_2b else ({}, {})
        figures: list[dict[str, Any]] = []
        with finishing("requests", configuration, before, figures):
            for count in counts:
                # With auto an engine that went on without prefill would be measured as one with it.
                use = "on" if prefill == "auto" and count <= PREFILLED_GPUS else prefill
                flags = [f"--gpus={count}", f"--prefill={use}"] if on_gpus else ["--device=cpu", f"--ranks={count}"]
                figures.append({"gpus" if on_gpus else "ranks": count, "bare": bare[count]})
                _engine(
                    figures[-1],
                    [str(folder), *flags],
                    spec,
                    workload,
                    count,
                    on_gpus=on_gpus,
                    wanted=wanted.get(count, {}),
                    wanted_json=wanted_json.get(count),
                    aborts=aborts,
                    must_abort=model is not None or spec_name != "tiny",
                )
                if has_bare:  # GPUs that have worked for a while are slower: what is beside the first figure is beside this, too
                    with _noting_errors(figures[-1], f"{count} GPUs", "bare_after"):
                        figures[-1]["bare_after"] = _bare_kernel(spec_name, count, workload, "afterwards, ")
    return not any("errors" in figure for figure in figures)


@contextmanager
def _given(model: str) -> Iterator[tuple[Path, ModelSpec]]:
    from kog_dist.model.checkpoint import open_checkpoint

    with nullcontext(Path(model)) as folder:
        yield folder, open_checkpoint(folder, verify=False).spec


def _bare_kernel(spec_name: str, count: int, workload: Workload, when: str = "") -> dict[str, object]:
    """Greedy decoding by the plain kernel and nothing else, from the same position on: microseconds per token of launches."""
    from kog_dist.bench.kernel.scaling_run import decode

    contexts = [workload.context + extra for extra in range(NUM_BARE)]
    arguments = {"spec": spec_name, "contexts": contexts, "tokens": workload.tokens, "repeats": 0}
    means = [statistics.fmean(times) for times in decode(count, arguments)[0]["us"].values()]
    found = {"us": statistics.median(means), "best_us": min(means), "each_us": means}
    print(f"{count} GPUs: {when}{found['us']:.1f} us per token by the bare kernel, at best {found['best_us']:.1f}", flush=True)
    return found


def _engine(
    figures: dict[str, Any], flags: Sequence[str], spec: ModelSpec, workload: Workload, count: int, *, on_gpus: bool,
    wanted: dict[int | None, float], wanted_json: int | None, aborts: Sequence[str], must_abort: bool,
) -> None:  # fmt: skip
    """Add the figures of one number of ranks: an engine that answers and ends with the first abort, others for further aborts.

    `must_abort`: a request that was over before its abort is an error. Those of a tiny model may be.
    """
    bare = figures["bare"]
    name = f"{count} {'GPU' if on_gpus else 'rank'}{'s' if count > 1 else ''}"
    with engine_session() as session:
        launcher, client, figures["ready_s"] = _start(session, flags)
        measures = Measures(client, spec, workload)
        measures.warm_up()
        steps: dict[str, tuple[Measure, Show]] = {
            "first_tokens": (measures.first_tokens, lambda found: show_first_tokens(name, found, wanted)),
            "kinds": (measures.kinds, lambda found: _show_speeds(name, found, bare)),
            "constrained": (measures.constrained, lambda found: _show_speeds(name, found, bare, wanted_json)),
            "cancels": (measures.cancels, lambda found: _show_cancels(name, found)),
            "aborts": (lambda: [_abort(measures, session, launcher, client, aborts[0])], lambda found: _show_aborts(name, found)),
        }
        for step, (measure, show) in steps.items():
            with _noting_errors(figures, name, step):
                figures[step] = measure()
                show(figures[step])
    figures.setdefault("aborts", [])
    for during in aborts[1:]:
        with _noting_errors(figures, name, f"abort during {during}"), engine_session() as session:
            launcher, client, _ = _start(session, flags)
            figure = _abort(Measures(client, spec, workload), session, launcher, client, during)
            figures["aborts"].append(figure)
            _show_aborts(name, [figure])
    for figure in figures["aborts"]:
        if must_abort and not figure["counts"]:
            figures.setdefault("errors", []).append(f"abort during {figure['during']}: the request was over before")


@contextmanager
def _noting_errors(figures: dict[str, Any], name: str, step: str) -> Iterator[None]:
    """Whatever goes wrong in the block is printed and kept: the other figures are worth having."""
    try:
        yield
    except Exception as error:
        figures.setdefault("errors", []).append(f"{step}: {type(error).__name__}: {error}")
        print(f"{name}: {step}: {type(error).__name__}: {error}", flush=True)


def _start(session: EngineSession, flags: Sequence[str]) -> tuple[subprocess.Popen[bytes], RequestClient, float]:
    """An engine that is ready, a client, and the seconds that it took."""
    begin_s = time.monotonic()
    launcher = session.launch(*flags)
    session.connect(_READY_S).close()
    ready_s = time.monotonic() - begin_s
    return launcher, RequestClient(Access.from_folder(session.instance_folder)), ready_s


def _abort(
    measures: Measures, session: EngineSession, launcher: subprocess.Popen[bytes], client: RequestClient, during: str
) -> dict[str, Any]:
    try:
        return measures.abort(session, launcher, in_prefill=during == "prefill")
    finally:
        client.close()


def _show_speeds(name: str, figures: list[dict[str, Any]], bare: dict[str, Any] | None, wanted_per_s: int | None = None) -> None:
    """Also adds how much slower each is than the bare kernel: by medians, and by the best of either."""
    wanted = f" (wanted {wanted_per_s})" if wanted_per_s else ""
    for figure in figures:
        if bare is not None:
            figure |= {"of_bare": figure["us"] / bare["us"], "of_bare_best": figure["best_us"] / bare["best_us"]}
        beside = [f"{figure[key]:.4f} {words}" for key, words in _BESIDE.items() if key in figure]
        first = f", first one after {figure['first_s']:.2f} s, then {figure['ttft_ms']:.1f} ms" if "first_s" in figure else ""
        print(
            f"{name}: {figure['kind']:>20}: {figure['us']:8.1f} us (best {figure['best_us']:.1f}), "
            f"{figure['tokens_per_s']:.1f} tokens/s{wanted}, {figure['client_tokens_per_s']:.1f} in the client, "
            f"{figure['tokens']} tokens"
            f"{first}{': ' if beside else ''}{', '.join(beside)}",
            flush=True,
        )


_BESIDE = {
    "of_greedy": "of greedy",
    "of_greedy_best": "by the best",
    "of_bare": "of the bare kernel",
    "of_bare_best": "by the best",
}


def _show_cancels(name: str, figures: list[dict[str, Any]]) -> None:
    for figure in figures:
        if not figure["count"]:
            print(f"{name}: no cancel came during {figure['during']}", flush=True)
            continue
        print(
            f"{name}: {figure['count']} cancels during {figure['during']}: told after {figure['told_ms']:.2f} ms "
            f"(most {figure['most_told_ms']:.2f}), the next request's first token after {figure['free_ms']:.2f} ms (most "
            f"{figure['most_free_ms']:.2f}; alone {figure['alone_ms']:.2f}), wanted {OBEYED_MS:g}",
            flush=True,
        )


def _show_aborts(name: str, figures: list[dict[str, Any]]) -> None:
    for figure in figures:
        print(
            f"{name}: aborted during {figure['during']}: client has its end ({figure['end']}) after {figure['told_ms']:.1f} ms "
            f"(wanted {OBEYED_MS:g}), nothing left after {figure['clean_ms']:.0f} ms"
            + ("" if figure["counts"] else "; does not count, the request was over before"),
            flush=True,
        )
