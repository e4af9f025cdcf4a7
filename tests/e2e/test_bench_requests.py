"""`kog-bench requests` on one CPU rank: all figures are there, and the engines that it starts end."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kog_dist.bench.cli import app
from kog_dist.bench.engine.request_measures import KINDS, SCHEMAS, Measures, Workload
from kog_dist.bench.engine.request_stages import STEPS
from kog_dist.bench.engine.requests import run
from kog_dist.errors import ConfigError

SMALL = Workload(prompts=(8, 200), kept=40, new=6, context=16, tokens=24, repeats=2)


@pytest.mark.timeout(120)
def test_whole_requests_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None, "tiny", (1,), SMALL, on_gpus=False)
    *told, last = capsys.readouterr().out.splitlines()
    lines = [line for line in told if line.startswith("1 rank: ")]  # of a tree with changes another says so
    (figures,) = json.loads(last)["figures"]
    first_tokens = figures["first_tokens"]
    assert [figure["prompt"] for figure in first_tokens] == [8, 200, 46]
    assert [figure["cached_tokens"] for figure in first_tokens] == [[0], [0], [40]]
    assert all(0 < figure["engine_ms"] <= figure["ms"] <= figure["most_ms"] for figure in first_tokens)
    assert [figure["kind"] for figure in figures["kinds"]] == list(KINDS)
    assert all(figure["tokens"] == SMALL.tokens and figure["us"] >= figure["best_us"] > 0 for figure in figures["kinds"])
    assert [figure["kind"] for figure in figures["constrained"]] == [f"JSON: {name}" for name in SCHEMAS]
    assert all(figure["tokens_per_s"] > 0 for figure in figures["constrained"])
    cancels = {figure["during"]: figure for figure in figures["cancels"]}
    assert cancels["decode"]["count"] >= 1  # an answer may be complete before its cancel comes
    assert 0 < cancels["decode"]["told_ms"] <= cancels["decode"]["free_ms"]
    assert {abort["end"] for abort in figures["aborts"]} <= {"shutdown", "done"}  # the model is small: it may be done before
    assert all(abort["clean_ms"] > 0 for abort in figures["aborts"])
    stages = [step for step in STEPS if step not in ("uploaded", "launched")]  # which CPU ranks do not have
    assert [list(figure[key]) for figure in first_tokens for key in ("steps_ms", "rested_steps_ms")] == [stages] * 6
    assert len(lines) == 3 + 2 * (1 + len(stages)) + len(KINDS) + len(SCHEMAS) + 2 + 2


@pytest.mark.parametrize("wrong", [{"prompts": (249,)}, {"kept": 243}, {"tokens": 241}])
def test_what_does_not_fit_is_named(wrong: dict[str, object]) -> None:
    workload = Workload(**{"prompts": (8,), "kept": 40, "new": 6, "context": 16, "tokens": 24, "repeats": 2, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--" + next(iter(wrong))):
        run(None, "tiny", (1,), workload, on_gpus=False)


def test_a_step_that_fails_leaves_the_other_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_self: Measures) -> list[dict[str, object]]:
        raise IndexError("no answer has a rate")

    for step in ("first_tokens", "constrained", "cancels"):
        monkeypatch.setattr(Measures, step, fails)
    assert not run(None, "tiny", (1,), SMALL, on_gpus=False, aborts=("decode",))
    (figures,) = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["errors"] == [
        f"{step}: IndexError: no answer has a rate" for step in ("first_tokens", "constrained", "cancels")
    ]
    assert [figure["kind"] for figure in figures["kinds"]] == list(KINDS)
    assert len(figures["aborts"]) == 1


def test_a_request_that_went_wrong_gives_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_arguments: object, **options: object) -> bool:
        return options["aborts"] == ("decode",)

    monkeypatch.setattr("kog_dist.bench.engine.requests.run", answer)
    for during, code in (("decode", 0), ("prefill", 1)):
        assert CliRunner().invoke(app, ["requests", "--ranks=1", f"--aborts={during}"]).exit_code == code
