"""Calls of the CUDA driver: how a graph is captured, and what an event that has not come is told from. The driver is played."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kog_dist.cuda import driver
from kog_dist.cuda.driver import DriverError, Graph, has_ended

STREAM, CAPTURED, MADE = 7, 70, 700


class Driver:
    """Notes calls with their numbers; `codes`: what functions answer."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.calls = codes, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_PLAYED"
                return 0
            made = {"cuStreamEndCapture": CAPTURED, "cuGraphInstantiateWithFlags": MADE}.get(name)
            if made is not None and not self.codes.get(name):
                next(argument for argument in arguments if hasattr(argument, "_obj"))._obj.value = made
            self.calls.append((name, *(getattr(one, "value", one) for one in arguments if not hasattr(one, "_obj"))))
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: found)
    return found


def test_a_graph_is_captured_launched_and_destroyed(played: Driver) -> None:
    graph = Graph()
    with graph.captured_from(STREAM):
        assert played.calls == [("cuStreamBeginCapture_v2", STREAM, 1)], "other threads may do what they like"
    assert played.calls[1:] == [
        ("cuStreamEndCapture", STREAM), ("cuGraphInstantiateWithFlags", CAPTURED, 8), ("cuGraphDestroy", CAPTURED),
    ]  # fmt: skip
    graph.launch(STREAM)
    assert played.calls[-1:] == [("cuGraphLaunch", MADE, STREAM)]
    del graph
    gc.collect()
    assert played.calls[-1:] == [("cuGraphExecDestroy", MADE)]


def test_an_error_within_a_capture_ends_it(played: Driver) -> None:
    with pytest.raises(ValueError, match="ours"), Graph().captured_from(STREAM):
        raise ValueError("ours")
    assert [call[0] for call in played.calls] == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]


@pytest.mark.parametrize("function", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_what_the_driver_refuses_is_named(played: Driver, function: str) -> None:
    played.codes[function] = 900
    with pytest.raises(DriverError, match=r"a graph failed: CUDA_ERROR_PLAYED \(900\)"), Graph().captured_from(STREAM):
        pass


@pytest.mark.parametrize(("code", "wanted"), [(0, True), (600, False)])
def test_an_event_has_come_or_not(played: Driver, code: int, wanted: bool) -> None:
    played.codes["cuEventQuery"] = code
    assert has_ended(5) is wanted
    assert played.calls == [("cuEventQuery", 5)]


def test_a_launch_that_has_failed_is_no_event_that_never_comes(played: Driver) -> None:
    played.codes["cuEventQuery"] = 700
    with pytest.raises(DriverError, match="waiting for the GPU failed"):
        has_ended(5)


def test_copies_go_both_ways(played: Driver) -> None:
    driver.copy_to_device(1, 2, 30, STREAM)
    driver.copy_to_host(2, 1, 30, STREAM)
    assert played.calls == [("cuMemcpyHtoDAsync_v2", 1, 2, 30, STREAM), ("cuMemcpyDtoHAsync_v2", 2, 1, 30, STREAM)]
