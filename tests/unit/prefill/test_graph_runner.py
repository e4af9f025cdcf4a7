"""Chunks captured once and replayed: the runner's order of things, with CUDA graphs played by Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.startup import StartReport, StartStage, StartTeller
from kog_dist.workers.prefill import gpu
from kog_dist.workers.prefill.base.chunks import MOST_FLOP, Work
from kog_dist.workers.prefill.dense.layers import DenseLayers
from kog_dist.workers.prefill.exchange.lane_sums import OneRank
from kog_dist.workers.prefill.gpu import GraphRunner, Tuning
from kog_dist.workers.prefill.lanes.layers import Layers
from kog_dist.workers.prefill.lanes.operations import Operations
from kog_dist.workers.prefill.prefill import Prefill
from tests.unit.fake_cupy import PlayedDevice
from tests.unit.prefill.models import SMALL, Rank, token_ids

SIZES, EXACT_SIZE = (8, 16), 12


class Graph:
    """What was called while it was captured, to be called again."""

    capturing: Graph | None = None
    by_ptr: ClassVar[dict[int, Graph]] = {}

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.num_replays = 0
        self.by_ptr[id(self)] = self

    @property
    def exec_ptr(self) -> int:
        assert Graph.capturing is None
        return id(self)

    @contextmanager
    def captured_from(self, stream_ptr: int) -> Iterator[None]:
        assert stream_ptr == Stream.ptr
        Graph.capturing = self
        yield
        Graph.capturing = None

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()


class Event:
    recorded: ClassVar[set[int]] = set()

    def __init__(self, *, disable_timing: bool) -> None:
        self.ptr = id(self)

    def record(self, stream: Any) -> None:
        self.recorded.add(self.ptr)


class Stream:
    ptr = 7

    def __init__(self, entered: Callable[[], None] = lambda: None) -> None:
        self._entered = entered

    def __enter__(self) -> None:
        self._entered()

    def __exit__(self, *_: object) -> None:
        pass

    def record(self) -> Any:
        raise AssertionError("events are made without times")

    def synchronize(self) -> None:
        pass


class Captured:
    """`Operations` that a graph being captured remembers."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self._operations, name)

        def run(*arguments: Any, **named: Any) -> object:
            result = call(*arguments, **named)
            if Graph.capturing is not None:
                again = (lambda: np.copyto(result, call(*arguments))) if name == "attend" else (lambda: call(*arguments, **named))
                Graph.capturing.calls.append(again)
            return result

        return run


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank, GraphRunner]:
    """A rank for the expected cache, one that `runner` fills, and the runner."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Event=Event, Device=PlayedDevice)))
    monkeypatch.setattr(gpu, "Graph", Graph)
    monkeypatch.setattr(gpu, "has_ended", Event.recorded.__contains__)

    def launch(graph_ptr: int, stream_ptr: int) -> None:
        assert stream_ptr == Stream.ptr
        Graph.by_ptr[graph_ptr].replay()

    monkeypatch.setattr(gpu, "launch_graph", launch)
    spec = ModelSpec(**SMALL)
    write_checkpoint(tmp_path, spec, random_tensors(spec, 7), manifest=False)
    checkpoint = open_checkpoint(tmp_path)
    expected, rank = (Rank(checkpoint, dtype=np.float16, sizes=SIZES, exact_size=EXACT_SIZE) for _ in range(2))
    operations: Any = Captured(rank.layers.operations)
    layers = Layers(spec, rank.matrices, operations, OneRank())
    stream: Any = Stream()
    return expected, rank, GraphRunner(layers, rank.buffers, stream, Tuning(SIZES, exact_size=EXACT_SIZE))


def test_graphs_fill_the_same_cache(made: tuple[Rank, Rank, GraphRunner]) -> None:
    expected, rank, runner = made
    prefill = Prefill(runner, max_context=rank.spec.max_context, sizes=SIZES, exact_size=EXACT_SIZE)
    ids = token_ids(rank.spec, 87)
    for start, end in ((0, 20), (20, 87), (0, 87), (0, 11)):  # 16 + 4; 4 * 16 + 3; 5 * 16 + 7; an exact one
        assert prefill.run(ids[:end], start, should_stop=lambda: False) == end
        assert expected.run(ids[:end], start) == end
        assert np.array_equal(rank.cache, expected.cache)
        assert np.array_equal(rank.buffers.last_streams, expected.buffers.last_streams)
    graphs: Any = runner.graphs
    assert {size: graph.num_replays for size, graph in graphs.items()} == {16: 10, 8: 3, 12: 1}


def test_parts_of_chunks_are_graphs_of_their_own(made: object, tmp_path: Path) -> None:
    spec = ModelSpec(**{**SMALL, "delay": 0, "sliding_window": None, "window_layers": ()})
    write_checkpoint(tmp_path / "dense", spec, random_tensors(spec, 7), manifest=False)
    checkpoint = open_checkpoint(tmp_path / "dense")
    work = Work(row_flop=MOST_FLOP / 20, key_flop=MOST_FLOP / 4000, most_parts=5, max_context=spec.max_context)
    expected, rank = (Rank(checkpoint, dtype=np.float16, sizes=SIZES) for _ in range(2))
    operations: Any = Captured(rank.layers.operations)
    stream: Any = Stream()
    layers = DenseLayers(spec, rank.matrices, operations, OneRank())
    runner = GraphRunner(layers, rank.buffers, stream, Tuning(SIZES, exact_size=0), work=work)
    prefill = Prefill(runner, max_context=spec.max_context, sizes=SIZES, work=work)
    ids = token_ids(spec, 87)
    assert prefill.run(ids, 0, should_stop=lambda: False) == expected.run(ids) == 87
    assert np.array_equal(rank.cache, expected.cache)
    assert np.array_equal(rank.buffers.last_streams, expected.buffers.last_streams)
    graphs: Any = runner.graphs
    parts: Any = runner.parts
    assert {size: graph.num_replays for size, graph in graphs.items()} == {16: 3, 8: 1}
    assert {size: [graph.num_replays for graph in some] for size, some in parts.items()} == {16: [2] * 4}


def test_all_chunks_have_run_before_the_first_is_captured(made: tuple[Rank, Rank, GraphRunner]) -> None:
    _, rank, _ = made
    happened = list[str]()
    operations: Any = rank.layers.operations

    class Noting:
        def __getattr__(self, name: str) -> Callable[..., object]:
            def run(*arguments: Any, **named: Any) -> object:
                if name == "begin":
                    happened.append(f"{'captured' if Graph.capturing else 'run'} {arguments[0].size}")
                return getattr(operations, name)(*arguments, **named)

            return run

    noting: Any = Noting()
    stream: Any = Stream()
    layers = Layers(rank.spec, rank.matrices, noting, OneRank())
    told: list[StartReport] = []
    tuning, tell = Tuning(SIZES, exact_size=EXACT_SIZE), StartTeller(told.append)
    GraphRunner(layers, rank.buffers, stream, tuning, lambda: happened.append("prepared"), tell)
    assert happened == ["run 16", "run 12", "run 8", "prepared", "captured 16", "captured 12", "captured 8"]
    stages = (StartStage.PRODUCTS, StartStage.GRAPHS)
    assert told == [StartReport(stage, share) for stage in stages for share in (None, 0 / 3, 1 / 3, 2 / 3)]


def test_the_first_graph_waits_for_one_copy_and_nothing_else(
    made: tuple[Rank, Rank, GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    _, rank, runner = made
    order: list[str] = []
    load, launch = rank.buffers.staging.load, vars(gpu)["launch_graph"]

    def loading(*arguments: Any) -> None:
        order.append("load")
        load(*arguments)

    def launching(graph_ptr: int, stream_ptr: int) -> None:
        order.append("launch")
        launch(graph_ptr, stream_ptr)

    def event() -> Event:
        order.append("event")
        return Event(disable_timing=True)

    monkeypatch.setattr(rank.buffers.staging, "load", loading)
    monkeypatch.setattr(gpu, "launch_graph", launching)
    monkeypatch.setattr(runner, "_make_event", event)
    runner.stream = Stream(lambda: order.append("context"))
    prefill = Prefill(runner, max_context=rank.spec.max_context, sizes=SIZES, exact_size=EXACT_SIZE)
    assert prefill.run(token_ids(rank.spec, 16), 0, should_stop=lambda: False) == 16
    assert order == ["load", "launch", "event", "launch", "context"], "a chunk, the last token, and then the rest"
    prefill.forget(14)  # the kernel has decoded
    order.clear()
    assert prefill.run(token_ids(rank.spec, 20), 16, should_stop=lambda: False) == 20
    assert order[:4] == ["load", "context", "launch", "event"], "decoded keys and values are loaded in the stream's order"
