"""The scaling model: its floor is the memory's, every cost makes it slower, and it finds costs that it was made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.bench.kernel.scaling import Costs, fit, fit_below, predict, run, token_us
from kog_dist.bench.kernel.scaling_files import measured_in
from kog_dist.bench.shapes import named_spec
from kog_dist.errors import ConfigError

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


def test_memory_may_give_a_little_less_than_its_ceiling() -> None:
    true = Costs(stream_kb_per_us=0.96 * 36.0)
    found = fit_below(SMALL, {4: token_us(SMALL, 4, 1, true)}, replace(true, stream_kb_per_us=36.0))
    assert found.stream_kb_per_us <= 36.0
    assert token_us(SMALL, 4, 1, found) == pytest.approx(token_us(SMALL, 4, 1, true), rel=0.002)


def test_report_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(SMALL, "small", {}, {1: 400.0}, Costs())
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["gpus"] for entry in report["figures"]] == [1, 2, 4, 8]
    assert report["figures"][0]["measured_us"] == 400.0
    assert report["figures"][3]["error"] is None


def test_two_gpus_say_what_a_token_costs_once_among_several(capsys: pytest.CaptureFixture[str]) -> None:
    true = Costs(peers_us=9.0)
    gpus = {n: token_us(SMALL, 8 // n, n, true) for n in (1, 2, 4)}
    assert run(SMALL, "small", {}, gpus, Costs())
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])["figures"]
    assert figures[2]["error"] < -0.05, "one GPU alone does not tell it"
    assert [figure["error_from_two"] for figure in figures[:3]] == pytest.approx([0, 0, 0], abs=1e-6)
    assert "  what was measured is met within 5 %: yes" in lines
    assert not run(SMALL, "small", {}, {**gpus, 4: 1.2 * gpus[4]}, Costs())


def test_figures_are_taken_from_what_benchmarks_printed(tmp_path: Path) -> None:
    lane = {"lanes": 2, "context": 64, "us_per_token": 275.2, "ceiling_us": 235.3, "tape_bytes": 1_111_425_024}
    reports = {
        "latency": [lane, {**lane, "context": 512, "us_per_token": 277.5}, {"lanes": 2, "context": 64, "sampling": "greedy"}],
        "scaling": [{"gpus": 4, "context": 64, "us_per_token": 290.0, "p99_us": 292.0}, {"gpus": 4, "long_run": 9}],
        "collectives": {"kccl": [{"length": 1536, "median_us": 2.0}, {"length": 2, "median_us": 1.13}]},
    }
    for name, figures in reports.items():
        (tmp_path / name).write_text(f"a table\n{json.dumps({'benchmark': name, 'figures': figures})}\n")
    found = measured_in([tmp_path / name for name in reports], 64)
    assert (found.lanes_us, found.gpus_us, found.peer_hop_us) == ({2: 275.2}, {4: 290.0}, 1.13)
    assert found.stream_kb_per_us == pytest.approx(36.9, abs=0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no figures", "has no line with"),
        ('{"benchmark": "load", "figures": []}', "is of kog-bench load"),
        (None, "No such file"),
    ],
)
def test_files_of_no_use_are_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "report"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        measured_in([path], 64)
