"""Flags of `kog-bench` that make no sense are refused by name, before anything starts."""

from __future__ import annotations

import runpy

import pytest
from typer.testing import CliRunner

from kog_dist.bench.cli import app
from kog_dist.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("endurance --tokens 10", "--tokens 10: must be from 64"),
        ("endurance --tokens 600000", "--tokens 600000: must be from 64"),
        ("endurance --deadline-s 0", "--deadline-s"),
        ("scaling --builds copies", "--builds must be like"),
        ("scaling --builds threads=1", "--builds takes copies"),
        ("scaling --model --peer-hop-us 0", "--peer-hop-us"),
        ("scaling --kv-dtype fp4", "--kv-dtype must be one of bfloat16, float16, fp8, int4"),
        ("scaling --filled --spec gpt-oss-20b", "--filled is for shapes without windowed layers"),
        ("latency MODEL --router-skew 2", "--router-skew is for random weights"),
        ("latency --random --spec qwen3-4b --router-skew 2", "of a shape with experts"),
        ("soak --gpus 1 --ranks 2", "--ranks and --gpus exclude each other"),
        ("soak --gpus 0", "--gpus at least 1"),
        ("faults --ranks 0", "--ranks must be at least 1"),
        ("soak --ranks 0", "--ranks and --gpus at least 1"),
    ],
)
def test_refused_by_name(command: str, words: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize("steps", ["x", "3"])
def test_steps_of_the_collectives_are_a_number(
    steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", steps])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("kog_dist.bench.collectives.cpu", run_name="__main__")
    assert caught.value.code == 2
    assert "STEPS" in capsys.readouterr().err.splitlines()[-1]
