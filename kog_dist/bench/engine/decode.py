"""`kog-bench decode`: speed of one request, time to be ready and cost of idle ranks, measured from outside."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from kog_dist.bench.engine.session import EngineSession, engine_session
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.speculation import Speculation

PROMPT_IDS = tuple(range(16, 32))


def run(
    model: str | None,
    rank_counts: Sequence[int],
    *,
    num_tokens: int,
    repeats: int,
    idle_s: float,
    speculate: Speculation = Speculation.OFF,
) -> None:
    """Measure each rank count on a fresh engine; prints a line for each, then the JSON object."""
    before = machine()
    figures = []
    for ranks in rank_counts:
        with engine_session() as session:
            figures.append(_measure(session, model, ranks, num_tokens, repeats, idle_s, speculate))
        shown = figures[-1]
        drafts = "{accepted_tokens} of {drafted_tokens} drafts right, ".format(**shown) if shown["drafted_tokens"] else ""
        print(
            f"ranks {ranks}: {shown['tokens_per_s']:.1f} tokens/s (gaps p50 {shown['itl_p50_ms']:.2f} ms, "
            f"p99 {shown['itl_p99_ms']:.2f} ms), {drafts}ready after {shown['ready_s']:.2f} s, "
            f"idle CPU {shown['idle_cpu_percent_max']:.2f} % of a core per rank",
            flush=True,
        )
    configuration = {
        "model": model or "demo",
        "prompt_tokens": len(PROMPT_IDS),
        "tokens": num_tokens,
        "repeats": repeats,
        "speculate": speculate,
    }
    finish("decode", configuration, before, figures)


def _measure(
    session: EngineSession, model: str | None, ranks: int, num_tokens: int, repeats: int, idle_s: float, speculate: Speculation
) -> dict[str, object]:
    begin_s = time.monotonic()
    session.launch(*([model] if model else []), f"--ranks={ranks}")
    with session.connect(60.0) as client:
        ready_s = time.monotonic() - begin_s
        answers = [_answer(client, num_tokens, speculate) for _ in range(repeats)]
        idle = _idle_percent(session, idle_s)
    runs, dones = [stamps for stamps, _ in answers], [done for _, done in answers]
    gaps_ms = [1e3 * (late - early) for stamps in runs for early, late in itertools.pairwise(stamps)]
    speeds = [(len(stamps) - 1) / (stamps[-1] - stamps[0]) for stamps in runs]
    return {
        "ranks": ranks,
        "ready_s": ready_s,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_runs": speeds,
        "ttft_ms": 1e3 * statistics.median(stamps[0] for stamps in runs),
        "itl_p50_ms": percentile(gaps_ms, 0.50),
        "itl_p99_ms": percentile(gaps_ms, 0.99),
        "drafted_tokens": sum(done.num_drafted_tokens for done in dones),
        "accepted_tokens": sum(done.num_accepted_tokens for done in dones),
        "idle_cpu_percent_max": max(share for role, share in idle.items() if role.startswith("rank ")),
        "idle_cpu_percent": idle,
    }


def _answer(client: Client, num_tokens: int, speculate: Speculation) -> tuple[list[float], Done]:
    """When each token of one request was produced, in seconds after the request arrived; and how it ended."""
    *events, done = client.generate(
        prompt_ids=PROMPT_IDS, max_tokens=num_tokens, ignore_eos=True, stamps=True, reuse_kv=False, speculate=speculate
    )
    assert isinstance(done, Done), "it is the last event"
    return [stamp for event in events if isinstance(event, Tokens) for stamp in event.stamps_s], done


def _idle_percent(session: EngineSession, idle_s: float) -> dict[str, float]:
    """CPU time of each process over an idle stretch, in percent of one core."""
    processes = session.processes()
    begin_s, before = time.monotonic(), {role: cpu_s(pid) for role, pid in processes.items()}
    time.sleep(idle_s)
    span_s = time.monotonic() - begin_s
    return {role: 100 * (cpu_s(pid) - before[role]) / span_s for role, pid in processes.items()}


def cpu_s(pid: int) -> float:
    """User and system time of a process, from the scheduler's nanosecond account where there is one."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 + _other_threads_s(pid)
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _other_threads_s(pid: int) -> float:
    threads = [task for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid]
    return sum(int((task / "schedstat").read_text().split()[0]) / 1e9 for task in threads)
