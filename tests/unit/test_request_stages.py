"""The table of stages of `kog-bench requests`."""

from __future__ import annotations

import pytest

from kog_dist.bench.engine.request_client import TimedAnswer
from kog_dist.bench.engine.request_stages import STEPS, show_steps, steps_ms
from kog_dist.rpc.messages import Done, FinishReason
from kog_dist.runtime.stages import STAGES


def answer(*, slower_s: float = 0.0, with_prefill: bool = True) -> TimedAnswer:
    """Sent at 10 s, received 1 ms later, a millisecond per stage."""
    stages = [0.001 * (place + 1) + slower_s for place in range(len(STAGES))]
    told = tuple(None if name == "uploaded" and not with_prefill else value for name, value in zip(STAGES, stages, strict=True))
    done = Done("id", FinishReason.LENGTH, 3, 8, 0.0, 0.1, received_s=10.001, stages_s=told)
    return TimedAnswer("id", 10.0, arrivals=[(10.001 + stages[-1] + 0.002, 1)], end=done)


def test_steps_add_up_to_the_time_to_the_first_token() -> None:
    steps = steps_ms([answer()])
    assert tuple(steps) == STEPS
    assert steps == pytest.approx(dict.fromkeys(STEPS, 1.0) | {"in the client": 2.0})
    assert sum(steps.values()) == pytest.approx(answer().ttft_ms)


def test_a_stage_that_was_not_there_counts_for_the_next_one() -> None:
    steps = steps_ms([answer(with_prefill=False)])
    assert "uploaded" not in steps
    assert steps["launched"] == pytest.approx(2.0)


def test_steps_are_medians() -> None:
    steps = steps_ms([answer(), answer(slower_s=0.5), answer(slower_s=0.25)])
    assert [steps["admitted"], steps["started"]] == pytest.approx([251.0, 1.0])


def test_the_table_has_a_column_for_each_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"prompt": 128, "steps_ms": steps_ms([answer()])}
    cached = {"prompt": 3950, "kept": 3900, "new": 50, "steps_ms": steps_ms([answer(with_prefill=False)])}
    show_steps("1 GPU:", [whole, cached, {"prompt": 7, "steps_ms": {}}], "steps_ms")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["128", "3,900+50"]
    assert next(line for line in lines if " uploaded " in line).split()[-2:] == ["1.000", "-"]
    assert len(lines) == 1 + len(STEPS)


def test_an_engine_that_tells_no_stages_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    done = Done("id", FinishReason.LENGTH, 3, 8, 0.0, 0.1)
    show_steps("1 GPU", [{"prompt": 128, "steps_ms": steps_ms([TimedAnswer("id", 0.0, end=done)])}], "steps_ms")
    assert capsys.readouterr().out == ""
