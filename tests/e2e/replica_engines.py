"""Engines behind a router, as `kog-launch --replicas` starts them."""

from __future__ import annotations

from pathlib import Path

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.client import Client
from kog_dist.rpc.transport import Access

ENDED_S = 30.0  # these two are no promises
READY_S = 40.0


def launch(session: EngineSession, model: Path, *flags: str) -> Access:
    """Two replicas of one rank that are ready."""
    session.launch(str(model), "--ranks=1", "--stall-timeout=10", *flags)  # nothing here is about stalls, and machines are loaded
    until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
    return Access.from_folder(session.instance_folder)


def states(client: Client) -> dict[str, str]:
    report = client.status()
    return dict(zip(report.replica_names, report.replica_states, strict=True))


def both_ready(session: EngineSession, client: Client) -> None:
    until(lambda: states(client) == {"r0": "ready", "r1": "ready"}, READY_S, lambda: f"{states(client)} {session.output()}")
