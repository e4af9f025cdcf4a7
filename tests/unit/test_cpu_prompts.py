"""How the engine of a CPU rank reads a prompt: in passes, between which it says how far it is and looks for a cancel."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.decode.cpu.interpreter import StepOutput
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.errors import AbortedError
from kog_dist.runtime.control import EpochWaits
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.engines.cpu import CpuEngine

PROMPT = tuple(range(100, 250))


class StubControl:
    """A control page on which a cancel, or an abort, comes while a pass runs."""

    def __init__(self, cancel_after: int = 99, abort_after: int = 99) -> None:
        self.progress: list[int] = []
        self.cancel_after, self.abort_after = cancel_after, abort_after
        self.entries: list[tuple[int, Finish]] = []
        self.rings = [SimpleNamespace(put=lambda seq, index, token_id, ns, digest, finish, *_: self.put(token_id, finish))]

    def put(self, token_id: int, finish: Finish) -> None:
        self.entries.append((token_id, finish))

    def aborted(self) -> bool:
        return len(self.progress) > self.abort_after

    def cancelled(self, seq: int, slot: int) -> bool:
        return len(self.progress) > self.cancel_after

    def set_progress(self, rank: int, seq: int, num_positions: int, slot: int) -> None:
        self.progress.append(num_positions)

    def set_epoch_waits(self, rank: int, waits: EpochWaits) -> None:
        pass

    def stamp(self, rank: int, stage: RankStage, slot: int) -> None:
        pass


class StubInterpreter:
    """Stops all ranks when rank 0 says so; chooses token 7."""

    plan = SimpleNamespace(spec=SimpleNamespace(is_recurrent=False, max_context=1000), num_tokens=1, world_size=1)

    def __init__(self, rank: int) -> None:
        self.rank, self.heard = rank, 0
        self.read_ids: list[list[int]] = []

    def use_cache(self, cache: int, source: int, num_positions: int, load: None) -> None:
        assert (cache, source, num_positions) == (0, 0, 2)

    def settle(self, num_positions: int, cache: int) -> None:
        pass

    go_back = settle

    def run(self, parts: Any, gather_logits: bool = False, *, word: int) -> list[list[StepOutput]]:
        (part,), self.heard = parts, word
        assert part.position == 2 + sum(map(len, self.read_ids))
        if part.sampling is None:
            self.read_ids.append(list(part.token_ids))
        return [[StepOutput(-1 if part.sampling is None else 7, None, True, part.stop)]]


def engine_of(control: StubControl, rank: int = 0) -> tuple[CpuEngine, StubInterpreter]:
    engine, interpreter = CpuEngine.__new__(CpuEngine), StubInterpreter(rank)
    stub = cast(Any, engine)
    stub._control, stub._rank, stub._interpreter, stub._pass_tokens = control, rank, interpreter, 64
    stub._comm = cast(Any, type("Comm", (), {"waits": EpochWaits()}))
    stub._heartbeat = ExitStack()
    stub._heartbeat.progress = lambda: None
    return engine, interpreter


REQUEST = DecodeRequest(PROMPT, 1, kv=KvUse(num_cached=2))


def test_all_but_the_last_token_is_read() -> None:
    control = StubControl()
    engine, interpreter = engine_of(control)
    assert engine.run(1, REQUEST) is Finish.LENGTH
    assert [len(ids) for ids in interpreter.read_ids] == [64, 64, 16, 2, 1]
    assert [token_id for ids in interpreter.read_ids for token_id in ids] == list(PROMPT[2:-1])
    assert control.progress == [2, 66, 130, 146, 148, 149, 150]
    assert control.entries == [(7, Finish.LENGTH)]


def test_a_cancel_ends_it_behind_the_pass_that_hears_of_it() -> None:
    control = StubControl(cancel_after=1)
    engine, interpreter = engine_of(control)
    assert engine.run(1, REQUEST) is Finish.CANCELLED
    assert [len(ids) for ids in interpreter.read_ids] == [64, 64]
    assert control.progress == [2, 66, 130]
    assert control.entries == [(NO_TOKEN, Finish.CANCELLED)]
    other, _ = engine_of(StubControl(cancel_after=1), rank=1)
    assert other.run(1, REQUEST) is Finish.LENGTH, "rank 0 alone decides, and tells the others with the pass"


def test_an_abort_ends_it_before_the_next_pass() -> None:
    engine, interpreter = engine_of(StubControl(abort_after=2))
    with pytest.raises(AbortedError, match="rank 0 left request 1"):
        engine.run(1, REQUEST)
    assert len(interpreter.read_ids) == 2
