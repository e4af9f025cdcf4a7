"""A sample of the table of faults (docs/testing.md); `make chaos` plays all of it for an hour."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.chaos.engine import right_answers, write_model
from kog_dist.bench.chaos.run import Chaos
from kog_dist.bench.chaos.table import KINDS, Cell, Layout, cells
from kog_dist.bench.engine.injection import FaultKind, Point, fault
from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Tokens
from tests.patience import slowness

SLACK_S = 0.75  # for a loaded machine, on top of what is promised
LONGEST_S = 3.25  # of the promises: by so much more as the machine is slower just now
READY_S = 60.0


def sample() -> list[Cell]:
    """One of each layout and kind, always the same; one layout after the other, so that engines can be used again."""
    chance, whole = random.Random(21), list(cells())
    return [
        chance.choice([cell for cell in whole if (cell.layout, cell.kind) == (layout, kind) and cell.point is not Point.LOAD])
        for layout in Layout
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    model = tmp_path_factory.mktemp("chaos") / "model"
    write_model(model)
    made = Chaos(model, 2, right_answers(model), seed=1, parallel=4)
    yield made
    made.retire()
    assert not made.figures()["found"]


@pytest.mark.alone
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_promises_hold(chaos: Chaos, cell: Cell) -> None:
    played = chaos.play(cell, SLACK_S + LONGEST_S * (slowness() - 1))
    assert played.violations == []
    assert played.false_aborts == []


def tokens_of(client: Client, number: int) -> Iterator[int]:
    for event in client.generate(prompt_ids=[1, 2, 3], max_tokens=number, ignore_eos=True):
        if isinstance(event, Tokens):
            yield from event.token_ids


def test_a_straggler_is_no_fault(session: EngineSession, tiny_model: Path) -> None:
    """A rank that gets 8 % of a core makes the others wait, and nothing else."""
    session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        whole = list(tokens_of(client, 200))
        answer = tokens_of(client, 200)
        begun = [next(answer) for _ in range(5)]
        fault(session, "rank 1", FaultKind.DELAY)
        assert begun + list(answer) == whole
        assert client.status().num_failed == 0


def test_a_full_disk_ends_nothing(session: EngineSession, tiny_model: Path) -> None:
    session.launch(str(tiny_model), "--ranks=2", f"--log-dir={session.folder / 'logs'}")
    with session.connect() as client:
        whole = list(tokens_of(client, 50))
        for role in ("launcher", "coordinator", "rank 0", "rank 1"):
            fault(session, role, FaultKind.ENOSPC)
        assert list(tokens_of(client, 50)) == whole


def descriptors(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    return found


def inodes_of_memory(session: EngineSession, role: str) -> set[int]:
    found = set[int]()
    for entry in Path(f"/proc/{session.processes()[role]}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith("/memfd:"):
                found.add(os.stat(entry).st_ino)
    return found


def test_another_generation_shares_no_memory_with_the_one_before(session: EngineSession, tiny_model: Path) -> None:
    """So that what a rank of the old one still writes can reach nobody."""
    session.launch(str(tiny_model), "--ranks=1", "--replicas=2")
    until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
    old, pid = inodes_of_memory(session, "rank 0 of r0"), session.processes()["rank 0 of r0"]
    assert old
    fault(session, "rank 0 of r0", FaultKind.KILL)
    until(lambda: session.processes().get("rank 0 of r0", pid) != pid, READY_S, session.output)
    until(lambda: inodes_of_memory(session, "rank 0 of r0"), READY_S, session.output)
    assert not old & inodes_of_memory(session, "rank 0 of r0")


def test_children_have_only_the_descriptors_that_they_need(session: EngineSession, tiny_model: Path) -> None:
    """The HTTP port belongs to the gateway and to who restarts it; the lease to those who own the name."""
    session.launch(str(tiny_model), "--ranks=2", "--http", "--port=0")
    session.connect().close()
    until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
    serving, found = ("rank 0", "rank 1", "coordinator", "gateway"), session.processes()
    held = {role: descriptors(found[role]) for role in ("launcher", *serving)}  # not of helpers that come and go
    for role in serving:
        shared = {name for name in held[role] & held["launcher"] if name.startswith("socket:")}
        assert len(shared) <= (role == "gateway"), f"{role} holds {shared}"
        has_lease = any(name.endswith("/lease") for name in held[role])
        assert has_lease == (role == "coordinator"), role  # which removes the folder should all others be killed
    ranks = held["rank 0"] & held["rank 1"]
    assert not {name for name in ranks if name.startswith("socket:")}
