"""The figures of a request, from moments that the tests choose."""

from __future__ import annotations

import pytest

from kog_dist.workers.timings import RequestTimings, percentile

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
