"""What is shown while an engine starts: stages that ranks tell, a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kog_dist.cuda import build
from kog_dist.decode.cpu import host_library
from kog_dist.launch.progress import RankStart, StartupProgress, bar, starts_of, waiting_for
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.startup import DOING, StartReport, StartStage, StartTeller, compiling

LOADING, LINKING, READY, RUNNING = RankState.LOADING, RankState.LINKING, RankState.READY, RankState.RUNNING
WEIGHTS, COMPILING, PEERS = StartStage.WEIGHTS, StartStage.COMPILING, StartStage.PEERS


@pytest.fixture
def page() -> Iterator[ControlPage]:
    made = ControlPage.create(2, 64)
    yield made
    made.close()


# ---- what ranks tell ----
@pytest.mark.parametrize("stage", StartStage)
@pytest.mark.parametrize("share", [None, 0.0, 0.001, 0.5, 1.0])
def test_a_report_is_one_word(page: ControlPage, stage: StartStage, share: float | None) -> None:
    report = StartReport(stage, share)
    page.set_startup(1, report)
    assert page.startup(1) == report
    assert page.startup(0) == StartReport(), "who has said nothing starts its interpreter"
    assert DOING[stage]


def test_shares_stay_within_their_bounds() -> None:
    assert [StartReport.unpack(StartReport(WEIGHTS, share).pack()).share for share in (-1.0, 2.0)] == [0.0, 1.0]


def test_a_compiler_is_a_stage_between_others() -> None:
    told: list[StartReport] = []
    teller = StartTeller(told.append)
    with compiling():
        pass  # nobody listens
    teller.begin(WEIGHTS)
    with teller.hearing_compilers():
        teller.share(0.5)
        with pytest.raises(ValueError, match="it failed"), compiling():
            raise ValueError("it failed")
        teller.share(0.6)
    with compiling():
        pass
    assert told == [
        StartReport(WEIGHTS), StartReport(WEIGHTS, 0.5), StartReport(COMPILING), StartReport(WEIGHTS), StartReport(WEIGHTS, 0.6)
    ]  # fmt: skip


def test_only_what_has_to_be_built_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[StartReport] = []
    monkeypatch.setattr(build, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "_version", lambda compiler: "13")
    monkeypatch.setattr(build, "_with_nvcc", lambda *arguments: (b"cubin", ""))
    with StartTeller(told.append).hearing_compilers():
        for _ in range(2):
            build.build({"a.cu": ""}, "a.cu", folder=tmp_path)
    assert told == [StartReport(COMPILING), StartReport()], "the second time it is in the cache"


def test_the_host_compiler_is_heard_at_the_first_start_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if host_library.library() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host_library, "OPTIONS", (*host_library.OPTIONS, "-O0"))  # a third of the compiler's time
    for stages in ([COMPILING, StartStage.INTERPRETER], []):
        told: list[StartReport] = []
        host_library.library.cache_clear()
        with StartTeller(told.append).hearing_compilers():
            built = host_library.library()
        if built is None:
            pytest.skip("others may write to the folder of this test")
        assert [report.stage for report in told] == stages
    host_library.library.cache_clear()


@pytest.mark.parametrize("lanes", [[0, 1, 2, 3], [2]])
def test_loading_tells_its_share(tmp_path: Path, lanes: list[int]) -> None:
    spec = ModelSpec(
        hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=64, vocab_size=320, max_context=64,
        num_lanes=4, delay=1,
    )  # fmt: skip
    write_checkpoint(tmp_path, spec, random_tensors(spec, seed=1))
    shares: list[float] = []
    open_checkpoint(tmp_path).rank_weights(lanes, on_share=shares.append)
    assert len(shares) == 1 + 3 * len(lanes)
    assert shares == sorted(set(shares))
    assert shares[0] > 0
    assert shares[-1] == 1.0


# ---- what the launcher makes of it ----
def start(state: RankState, stage: StartStage = WEIGHTS, share: float | None = None) -> RankStart:
    return RankStart(state, StartReport(stage, share))


@pytest.mark.parametrize(
    ("starts", "text", "share"),
    [
        ([start(RankState.STARTING, StartStage.INTERPRETER)], "waiting for rank 0: starting its interpreter", None),
        ([start(READY), start(READY), start(LOADING), start(LINKING, PEERS)],
         "waiting for rank 2: loading and packing weights", None),
        ([start(LOADING, share=0.5), start(LOADING, share=0.25)],
         "waiting for ranks 0 to 1: loading and packing weights", 0.25),
        ([start(LOADING, share=0.5), start(LOADING)], "waiting for ranks 0 to 1: loading and packing weights", None),
        ([start(LOADING, COMPILING), start(LOADING, PEERS), start(LOADING, PEERS)],
         "waiting for rank 0: compiling, as at the first start on a machine", None),
        ([start(LINKING, PEERS), start(LINKING, PEERS), start(LINKING, PEERS), start(READY)],
         "waiting for ranks 0 to 2: waiting for the other ranks", None),
        ([start(LOADING), start(LINKING), start(LOADING), start(LOADING)],
         "waiting for ranks 0, 2, 3: loading and packing weights", None),
        ([start(READY), start(RUNNING)], "waiting for the coordinator: opening its socket", None),
    ],
)  # fmt: skip
def test_start_up_says_what_it_waits_for(starts: list[RankStart], text: str, share: float | None) -> None:
    found = waiting_for(starts)
    assert (found.text, found.share) == (text, share)


def test_ranks_are_read_from_the_page(page: ControlPage) -> None:
    page.set_state(1, LOADING)
    page.set_startup(1, StartReport(WEIGHTS, 0.5))
    first, second = starts_of(page)
    assert (first.doing, first.is_ready) == ("starting its interpreter", False)
    assert second == start(LOADING, share=0.5)
    page.set_state(1, RankState.FAILED)
    assert starts_of(page)[1].doing == "failed"


def test_bars_fill_or_move() -> None:
    assert bar(0.0, 0) == f"[{'-' * 20}]   0 %"
    assert bar(0.25, 9) == f"[{'#' * 5}{'-' * 15}]  25 %"
    assert bar(1.0, 0) == f"[{'#' * 20}] 100 %"
    moving = [bar(None, quarter / 4) for quarter in range(31)]
    assert {len(shown) for shown in moving} == {len(bar(0.5, 0))}
    assert all(re.fullmatch(r"\[-*#{5}-*\] +", shown) for shown in moving)
    assert [shown.index("#") - 1 for shown in moving] == [*range(16), *range(14, -1, -1)]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_progress_off_a_terminal_is_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = StartupProgress(under_starter=True)
    shown = []
    for clock.now_s, text in ((100.5, "a"), (101.1, "b"), (101.2, "b"), (101.5, "c"), (103.2, "d"), (120.0, "d"), (133.2, "d")):
        progress.show(text, share=0.123)
        shown.append(capsys.readouterr().err)
    progress.clear()
    assert shown == ["", "kog-launch: b (12% done)\n", "", "", "kog-launch: d (12% done)\n", "", "kog-launch: d (12% done)\n"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("variables", "is_live"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)]
)
def test_progress_on_a_terminal_is_a_bar_that_goes_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_live: bool
) -> None:
    stream = io.StringIO()
    is_terminal: Callable[[], bool] = lambda: True  # noqa: E731
    monkeypatch.setattr(stream, "isatty", is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    progress = StartupProgress()
    for clock.now_s, share in ((100.1, 0.1), (100.4, 0.25), (100.45, 0.3), (105.0, 0.5)):
        progress.show("waiting for ranks 0 to 1: loading and packing weights", share=share)
    progress.clear()
    written = stream.getvalue().split("\r\x1b[2K")
    if is_live:
        shown = [f"kog-launch: [{'#' * cells}{'-' * (20 - cells)}]  {5 * cells} % ranks 0 to 1: " for cells in (5, 10)]
        assert [line[: len(shown[0])] for line in written] == ["", *shown, ""]
        assert {len(line) for line in written[1:3]} == {69}, "no line wraps"
    else:
        assert stream.getvalue() == "", "a log wants nothing of an ordinary start"


def test_the_log_knows_what_the_time_went_into(clock: Clock) -> None:
    progress = StartupProgress()
    for clock.now_s, text, doing in ((100.0, "rank 0: b", "b"), (102.0, "rank 1: b", "b"), (103.0, "c", ""), (103.01, "d", "")):
        progress.show(text, doing=doing)
    clock.now_s = 104.0
    progress.clear()
    clock.now_s = 200.0
    progress.clear()
    assert progress.summary() == "b 3.0 s, d 1.0 s"
