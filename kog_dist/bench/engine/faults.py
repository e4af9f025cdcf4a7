"""`kog-bench faults`: how long a client and the machine notice a killed process, over many kills during streams."""

from __future__ import annotations

import random
import time
from typing import Any

from kog_dist.bench.engine.injection import FaultKind, fault
from kog_dist.bench.engine.session import EngineSession, engine_session, until
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.errors import RequestFailed
from kog_dist.rpc.messages import Tokens

_LONG_ANSWER = 1500
_GONE_S = 20.0


def run(model: str | None, ranks: int, num_kills: int) -> None:
    """Kill a rank, the coordinator and the launcher `num_kills` times each, and stop a rank as often; prints p50 and p99."""
    before = machine()
    chance = random.Random(1)
    figures: dict[str, Any] = {}
    for victim, kind in (
        ("rank", FaultKind.KILL),
        ("coordinator", FaultKind.KILL),
        ("launcher", FaultKind.KILL),
        ("rank", FaultKind.STOP),
    ):
        name = f"{victim} {'killed' if kind is FaultKind.KILL else 'stopped'}"
        samples = []
        for _ in range(num_kills):
            role = f"rank {chance.randrange(ranks)}" if victim == "rank" else victim
            with engine_session() as session:
                samples.append(_one_fault(session, model, ranks, role, kind, chance.randrange(1, 40)))
        figures[name] = {key: _summary([sample[key] for sample in samples]) for key in samples[0]}
        print(
            f"{name}: " + "; ".join(f"{key} p50 {f['p50']:.1f} p99 {f['p99']:.1f}" for key, f in figures[name].items()),
            flush=True,
        )
    finish("faults", {"model": model or "demo", "ranks": ranks, "kills": num_kills}, before, figures)


def _one_fault(
    session: EngineSession, model: str | None, ranks: int, role: str, kind: FaultKind, num_tokens: int
) -> dict[str, float]:
    """Milliseconds from the fault to the client's error, and to nothing being left."""
    session.launch(*([model] if model else []), f"--ranks={ranks}")
    with session.connect() as client:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=_LONG_ANSWER, ignore_eos=True)
        received = 0
        while received < num_tokens:
            event = next(events)
            received += len(event.token_ids) if isinstance(event, Tokens) else 0
        begin_s = fault(session, role, kind).begin_s
        try:
            for _ in events:
                pass
        except RequestFailed:
            error_s = time.monotonic() - begin_s
        else:
            raise AssertionError(f"the stream ended well although there was a {kind} of {role}")
    until(lambda: not session.leftovers(), _GONE_S, lambda: str(session.leftovers()))
    return {"client_error_ms": 1e3 * error_s, "clean_ms": 1e3 * (time.monotonic() - begin_s)}


def _summary(values: list[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
