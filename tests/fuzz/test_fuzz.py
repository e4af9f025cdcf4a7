"""Half a minute of fuzzing: every target replays its corpus, then makes inputs for its share of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import runner
from tests.fuzz.bounds import CORPUS
from tests.fuzz.runner import PLANTED, TARGETS, run_target
from tests.patience import slowness

pytest.importorskip("atheris", reason="atheris has no wheel for this Python")
SECONDS = 30 / len(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    outcome = run_target(target, SECONDS, seed=1, folder=tmp_path)
    assert not outcome.findings, "\n".join(outcome.findings)
    assert outcome.cases > len(list((CORPUS / target).iterdir())), "nothing was made beyond the corpus"


def test_an_exception_lost_time_lost_memory_and_a_hang_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_STUCK_S", 3.0 * slowness())
    ballast = b"x" * (512 << 20)  # a test process may be large: what a target takes counts from its own beginning
    outcome = run_target(PLANTED, 0, seed=1, folder=tmp_path)
    del ballast
    inputs = {Path(finding.partition(": ")[0]).read_bytes() for finding in outcome.findings}
    assert inputs == {b"raise", b"slow", b"memory", b"stuck"}
    assert outcome.cases == 4
