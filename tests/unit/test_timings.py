"""The figures of a request, from moments that the tests choose."""

from __future__ import annotations

import pytest

from kog_dist.runtime.stages import STAGES, RankStage
from kog_dist.workers.coordinator.timings import RequestTimings, percentile

S = 1_000_000_000
MS = 1_000_000
RECEIVED = 5000 * S


def test_each_figure_is_the_time_between_its_moments() -> None:
    timings = RequestTimings(RECEIVED)
    timings.submitted(RECEIVED + 2 * S)
    moments = [RECEIVED + 3 * S + gap * MS for gap in (0, 10, 20, 30, 70)]
    assert [timings.add_token(moment) for moment in moments] == [3.0, 3.01, 3.02, 3.03, 3.07]
    figures = timings.figures(RECEIVED + 4 * S)
    assert (figures.queue_s, figures.prefill_s, figures.ttft_s, figures.total_s) == (2.0, 1.0, 3.0, 4.0)
    assert (figures.itl_p50_s, figures.itl_p99_s) == (0.01, 0.04)
    assert figures.tokens_per_s == pytest.approx(4 / 0.07)


def test_stages_are_told_from_the_reception_on_and_those_of_another_request_are_not() -> None:
    timings = RequestTimings(RECEIVED)
    timings.stage("admitted", RECEIVED + MS)
    timings.submitted(RECEIVED + 2 * MS)
    timings.stage("submitted", RECEIVED + 3 * MS)
    stamped = {RankStage.SEEN: 4, RankStage.READ: 5, RankStage.UPLOADED: -1, RankStage.PREFILLED: -5, RankStage.CHOSEN: 6}
    timings.add_token(RECEIVED + 7 * MS)
    stamps_ns = [RECEIVED + stamped[stage] * MS if stage in stamped else 0 for stage in RankStage]
    timings.first_token(RECEIVED + 8 * MS, RECEIVED + 9 * MS, stamps_ns)
    figures = timings.figures(RECEIVED + 10 * MS)
    found = dict(zip(STAGES, figures.stages_s, strict=True))
    assert figures.received_s == RECEIVED / S
    assert {name: moment_s for name, moment_s in found.items() if moment_s is not None} == {
        "admitted": 0.001, "started": 0.002, "submitted": 0.003, "seen": 0.004, "read": 0.005, "chosen": 0.006, "put": 0.007,
        "taken": 0.008, "sent": 0.009,
    }  # fmt: skip


def test_without_a_token_there_are_no_stages() -> None:
    timings = RequestTimings(RECEIVED)
    timings.stage("admitted", RECEIVED + MS)
    assert timings.figures(RECEIVED + S).stages_s == ()


def test_a_request_that_never_ran_only_waited() -> None:
    figures = RequestTimings(RECEIVED).figures(RECEIVED + 7 * S)
    assert (figures.queue_s, figures.total_s) == (7.0, 7.0)
    assert {figures.prefill_s, figures.ttft_s, figures.itl_p50_s, figures.itl_p99_s, figures.tokens_per_s} == {None}


def test_one_token_has_no_gaps_and_no_speed() -> None:
    timings = RequestTimings(RECEIVED)
    timings.submitted(RECEIVED + S)
    timings.add_token(RECEIVED + 3 * S)
    figures = timings.figures(RECEIVED + 4 * S)
    assert (figures.ttft_s, figures.prefill_s) == (3.0, 2.0)
    assert {figures.itl_p50_s, figures.itl_p99_s, figures.tokens_per_s} == {None}


def test_tokens_of_one_moment_have_gaps_but_no_speed() -> None:
    timings = RequestTimings(RECEIVED)
    for _ in range(3):
        timings.add_token(RECEIVED + S)
    figures = timings.figures(RECEIVED + S)
    assert (figures.itl_p50_s, figures.itl_p99_s, figures.tokens_per_s) == (0.0, 0.0, None)


@pytest.mark.parametrize(("fraction", "wanted"), [(0.0, 1.0), (0.5, 5.0), (0.51, 6.0), (0.99, 10.0), (1.0, 10.0)])
def test_percentiles_are_values_that_occurred(fraction: float, wanted: float) -> None:
    assert percentile([float(value) for value in range(1, 11)], fraction) == wanted
    assert percentile([], fraction) is None
