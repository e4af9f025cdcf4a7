"""The scaling model: its floor is the memory's, every cost makes it slower, and it finds costs that it was made with."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kog_dist.bench.scaling import Costs, fit, predict, run, token_us
from kog_dist.bench.shapes import named_spec

IDEAL = Costs(drain_kb_per_us=1e9, product_us=0, hop_us=0, attention_us=0, finalise_us=0, token_end_us=0, peer_hop_us=0)
SMALL = replace(named_spec("2b"), num_layers=5, vocab_size=4096, window_layers=())


@pytest.mark.parametrize("lanes", [8, 4, 2, 1])
def test_without_costs_only_memory_counts(lanes: int) -> None:
    spec = named_spec("2b")
    assert token_us(spec, lanes, 1, IDEAL) == pytest.approx(972.0 * lanes / 8, rel=0.005)  # 4.4435 GB at 4.57 TB/s


@pytest.mark.parametrize("name", ["product_us", "hop_us", "attention_us", "finalise_us", "token_end_us"])
def test_every_cost_makes_one_lane_slower(name: str) -> None:
    base = Costs()
    slower = replace(base, **{name: getattr(base, name) + 2.0})
    assert token_us(SMALL, 1, 1, slower) > token_us(SMALL, 1, 1, base) + 1


def test_delayed_sums_hide_the_way_to_the_peers() -> None:
    base = Costs()
    for lanes, world_size in ((4, 2), (2, 4)):
        alone, together = token_us(SMALL, lanes, 1, base), token_us(SMALL, lanes, world_size, base)
        assert alone <= together < alone + 8, "blocking layers, streams and candidates pay, delayed layers do not"
    blocking = replace(SMALL, delay=0)
    assert token_us(blocking, 1, 8, base) > token_us(SMALL, 1, 8, base) + 2, "an ordinary model pays in every layer"


def test_prediction_has_every_world_size_and_grows_slower_than_the_work() -> None:
    times = predict(SMALL, Costs())
    assert list(times) == [1, 2, 4, 8]
    for count in (2, 4, 8):
        assert times[count // 2] / 2 <= times[count] * 1.001 <= times[count // 2]


def test_fit_explains_figures_that_the_model_made() -> None:
    true = Costs(hop_us=1.6, finalise_us=0.5, token_end_us=6.0)
    measured = {lanes: token_us(SMALL, lanes, 1, true) for lanes in (4, 2, 1)}
    found = fit(SMALL, measured, Costs())
    for lanes, us in measured.items():
        assert token_us(SMALL, lanes, 1, found) == pytest.approx(us, rel=0.02)


def test_report_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(SMALL, "small", {}, {1: 400.0}, Costs())
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["gpus"] for entry in report["figures"]] == [1, 2, 4, 8]
    assert report["figures"][0]["measured_us"] == 400.0
    assert report["figures"][3]["error"] is None
