"""A small ablation on the CPU: pieces equal the whole, forms are compared seed by seed, and the shipped grids are fair."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kog_dist.errors import ConfigError, KogError
from kog_dist.train.__main__ import app
from kog_dist.train.ablation import Ablation
from kog_dist.train.ablation_grid import AblationConfig, Form, read_ablation_config
from kog_dist.train.ablation_report import over_lanes, rows_of, table, table_over_lanes
from kog_dist.train.distributed import Ranks
from kog_dist.train.intervals import mean_of, paired
from kog_dist.train.model import Residual
from kog_dist.train.processes import companions
from kog_dist.train.specs import ablation_spec
from tests.unit.train.tokens import write_tokens

ROOT = Path(__file__).parents[3]
CONFIGS = Path(__file__).parents[3] / "configs" / "train"
CPU = Ranks(0, 1, torch.device("cpu"))
SMALL = """
[model]
shape = "nano"
[run]
num_steps = 12
batch = 2
time = 32
learning_rate = 1e-2
adam_learning_rate = 1e-2
warmup_steps = 2
[grid]
lanes = [4, 2]
forms = ["delay 0", "delay 1", "ladder"]
seeds = [0, 1]
final_batches = 2
"""


def silent(line: str) -> None:
    assert line


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> AblationConfig:
    file = tmp_path_factory.mktemp("config") / "small.toml"
    file.write_text(SMALL, encoding="utf-8")
    return read_ablation_config(file)


def after(calls: int) -> Callable[[], bool]:
    """A stop request that comes with that call."""
    left = [calls]

    def asked() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return asked


def without_seconds(results: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in result.items() if key != "seconds"} for result in results]


def test_pieces_give_what_one_go_gives(tokens: Path, small: AblationConfig, tmp_path: Path) -> None:
    jobs = small.grid.jobs(lanes=[2], seeds=[1])
    whole = Ablation(small, tokens, tmp_path / "whole", CPU)
    assert whole.train(jobs, report=silent)
    pieces = Ablation(small, tokens, tmp_path / "pieces", CPU)
    assert not pieces.train(jobs, report=silent, stop=after(4))  # within the second run
    assert [path.name for path in (tmp_path / "pieces" / "unfinished").iterdir()] == [jobs[1].key]
    assert len(pieces.results()) == 1
    assert not pieces.train(jobs, report=silent, call_seconds=0)
    assert pieces.train(jobs, report=silent)
    assert not list((tmp_path / "pieces" / "unfinished").iterdir())
    assert without_seconds(whole.results()) == without_seconds(pieces.results())
    results = whole.results()
    assert [result["key"] for result in results] == [f"lanes2-{form}-lr1-seed1" for form in ("delay-0", "delay-1", "ladder")]
    assert len({result["loss"] for result in results}) == 3
    assert {result["tokens"] for result in results} == {12 * 2 * 32}
    assert {result["parameters"] for result in results} == {small.base.num_parameters}


def test_a_run_in_other_hands_is_left_to_them(tokens: Path, small: AblationConfig, tmp_path: Path) -> None:
    jobs = small.grid.jobs(lanes=[2], seeds=[0])
    (tmp_path / "claims").mkdir()
    with (tmp_path / "claims" / jobs[1].key).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not Ablation(small, tokens, tmp_path, CPU).train(jobs, report=silent)
    assert [result["form"] for result in Ablation(small, tokens, tmp_path, CPU).results()] == ["delay 0", "ladder"]
    assert Ablation(small, tokens, tmp_path, CPU).train(jobs, report=silent)


def test_processes_begin_with_other_lanes(small: AblationConfig) -> None:
    first, second = (small.grid.jobs(first=number) for number in (0, 1))
    assert sorted(first, key=str) == sorted(second, key=str)
    assert [job.num_lanes for job in first[:6]] == [4, 4, 4, 2, 2, 2]
    assert [job.num_lanes for job in second[:6]] == [2, 2, 2, 4, 4, 4]
    assert small.grid.jobs(first=2) == first


def test_another_configuration_is_refused(tokens: Path, small: AblationConfig, tmp_path: Path) -> None:
    Ablation(small, tokens, tmp_path / "out", CPU)
    other = write_tokens(tmp_path / "other")
    (other / "sources.json").write_text('{"digest": "11"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="holds an ablation with data_digest 00ff, now 11"):
        Ablation(small, other, tmp_path / "out", CPU)


def test_command_writes_table_pictures_and_json(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("num_steps = 12", "num_steps = 2"), encoding="utf-8")
    out = tmp_path / "out"
    command = ["ablation", "--config", str(tmp_path / "small.toml"), "--data", str(tokens), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, "--lanes", "4"], catch_exceptions=False)
    outcome = json.loads(result.stdout.strip().split("\n")[-1])
    assert (outcome["finished"], outcome["num_done"], outcome["num_runs"]) == (True, 6, 12)
    assert set(outcome["differences"]) == {"4 lanes, delay 1", "4 lanes, ladder"}
    assert "\n| 4 | delay 1 | 2 | " in (out / "table.md").read_text(encoding="utf-8")
    for picture in ("loss.svg", "difference.svg"):
        assert "4 lanes, ladder: " in (out / picture).read_text(encoding="utf-8")
    written = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert written["held_out_bytes_per_token"] == 3
    assert len(written["runs"]) == 6
    again = CliRunner().invoke(app, [*command, "--lanes", "4"], catch_exceptions=False)
    assert "6 of 6 runs are done" in again.stdout
    assert json.loads(again.stdout.strip().split("\n")[-1])["finished"]
    moved = tmp_path / "moved"
    moved.mkdir()
    (out / "results.json").rename(moved / "results.json")
    command[command.index(str(out))] = str(moved)
    there = CliRunner().invoke(app, [*command, "--lanes", "4"], catch_exceptions=False)
    assert "6 of 6 runs are done" in there.stdout
    refused = CliRunner().invoke(app, [*command, "--lanes", "3"])
    assert "there is no lanes 3 in the grid" in str(refused.exception)


def result_of(form: str, seed: int, loss: float) -> dict[str, object]:
    return {"lanes": 8, "form": form, "learning_rate_factor": 1.0, "seed": seed, "loss": loss, "tokens": 3e6, "seconds": 2.0}


def interrupted(command: list[str], out: Path, number_of: int) -> tuple[int, str]:
    """Start an ablation of several processes, interrupt it when all of them train; its code and what it said on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kog_dist.train", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while len(list((out / "claims").glob("*"))) < number_of:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


@pytest.mark.timeout(240)
def test_an_interrupt_saves_the_runs_of_all_processes(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(SMALL.replace("num_steps = 12", "num_steps = 1000000"), encoding="utf-8")
    out = tmp_path / "out"
    command = ["ablation", "--config", str(tmp_path / "long.toml"), "--data", str(tokens), "--out", str(out), "--device", "cpu"]
    assert interrupted([*command, "--processes", "2"], out, 2)[0] == 0
    unfinished = sorted(path.name for path in (out / "unfinished").iterdir())
    assert unfinished == ["lanes2-delay-0-lr1-seed0", "lanes4-delay-0-lr1-seed0"]  # each began with other lanes


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(KogError, match="1 of 1 further processes failed"), companions(["nonsense"], 1, "cpu", lambda: False):
        pass
    with pytest.raises(ZeroDivisionError), companions(["ablation", "--help"], 1, "cpu", lambda: False):
        1 / 0  # noqa: B018


def test_differences_are_taken_seed_by_seed() -> None:
    references = {0: 2.0, 1: 2.5, 2: 3.0}  # seeds differ far more than forms do
    results = [result_of("delay 0", seed, loss) for seed, loss in references.items()]
    results += [result_of("delay 2", seed, references[seed] + extra) for seed, extra in ((0, 0.1), (1, 0.12), (2, 0.11))]
    rows = rows_of(results, bytes_per_token=3.0)
    assert rows[0].difference is None
    assert rows[1].difference is not None
    assert rows[1].difference.value == pytest.approx(0.11)
    assert rows[1].difference.half == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert rows[1].loss.half == pytest.approx(4.303 * 0.505 / 3**0.5, rel=0.01)
    assert rows[0].bits_per_byte.value == pytest.approx(2.5 / 0.693147 / 3, rel=1e-5)
    assert "| 8 | delay 2 | 3 | 2.6100 ± " in table(rows)
    assert "| +0.1100 ± 0.0248 | 1.50 |" in table(rows)


def test_differences_over_all_lanes() -> None:
    results = [result_of("delay 0", seed, 2.0 + seed) | {"lanes": lanes} for seed in (0, 1) for lanes in (2, 4)]
    results += [result_of("none", seed, 2.0 + seed + 0.01 * lanes) | {"lanes": lanes} for seed in (0, 1) for lanes in (2, 4)]
    results.append(result_of("ladder", 0, 2.5))  # its reference is not there
    means = over_lanes(results)
    assert list(means) == [(1.0, "none")]
    assert means[1.0, "none"].value == pytest.approx(0.03)
    assert means[1.0, "none"].count == 4
    assert "| none | 4 | +0.0300 ± 0.0184 |" in table_over_lanes(means)


def test_intervals() -> None:
    assert mean_of([4.0]).half is None
    assert mean_of([1.0, 3.0]).half == pytest.approx(12.706)
    half = mean_of([1.0, 3.0] * 13).half  # Student's t with 25 degrees of freedom: 2.060
    assert half == pytest.approx(2.060 * 1.0198 / 26**0.5, rel=1e-3)
    assert paired({0: 1.0}, {1: 1.0}) is None
    with pytest.raises(ValueError, match="no mean of no values"):
        mean_of([])


def test_shipped_grids_compare_like_with_like() -> None:
    for name, num_runs in (("ablation", 81), ("ablation-rate", 18), ("ablation-nano", 42)):
        config = read_ablation_config(CONFIGS / f"{name}.toml")
        assert len(config.grid.jobs()) == num_runs
        assert len({job.key for job in config.grid.jobs()}) == num_runs
        assert len(config.grid.seeds) >= 3
    grid = read_ablation_config(CONFIGS / "ablation.toml")
    job = next(job for job in grid.grid.jobs(lanes=[4], seeds=[1]) if job.form.name == "delay 4 without early")
    spec = grid.spec(job)
    assert (spec.num_lanes, spec.delay, spec.early_comm, spec.num_parameters) == (4, 4, False, 4_197_504)
    assert grid.run_settings(job).seed == 1


def test_forms_and_what_is_no_grid(tmp_path: Path) -> None:
    base = ablation_spec()
    none, ladder = Form("none"), Form("ladder")
    assert not none.spec(base, 2).attention_comm
    assert not none.spec(base, 2).mlp_comm
    assert (ladder.residual, ladder.spec(base, 2).delay) == (Residual.LADDER, 0)
    for name in ("delay", "delay 0 without early", "tree"):
        with pytest.raises(ConfigError, match="there is no form"):
            Form(name)
    for old, new, message in (
        ("num_steps = 12", "", "needs num_steps"),
        ('"delay 0", ', "", "must contain 'delay 0'"),
        ("lanes = [4, 2]", "lanes = [3]", "power of two"),
        ("seeds", "seed", "there is no key 'seed'"),
    ):
        (tmp_path / "bad.toml").write_text(SMALL.replace(old, new), encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_ablation_config(tmp_path / "bad.toml")
