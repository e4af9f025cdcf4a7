"""`python -m tests.gpu.run`: the steps are true to tests/gpu and docs/reproduce.md, and none of them outlives its limit."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from _pytest.mark.expression import Expression

from kog_dist.bench.cli import app
from kog_dist.bench.shapes import DENSE
from kog_dist.hardware.gpus import Gpu
from kog_dist.launch.gpu_choice import gpu_rank_shape
from kog_dist.model.checkpoint import planned_checkpoint
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.gpu import prebuild
from tests.gpu import run as runner
from tests.gpu.publish.rows import rows_on
from tests.gpu.run import Result, run
from tests.gpu.steps import STEPS, Step

ROOT = Path(__file__).parents[2]
GPUS = [Gpu(index, f"GPU-{index}", "played", f"0000:0{index}:00.0") for index in range(4)]


def python(code: str, *, gpus: int = 1, limit_s: float = 30.0, alone: bool = False) -> Step:
    return Step(gpus, 0.0, limit_s, (sys.executable, "-S", "-c", code), "shown", alone)


@pytest.fixture(scope="module")
def tests_by_file() -> dict[str, list[str]]:
    """Names of all tests: with their parameters in files of which steps take parts, and else without, which needs no import."""
    parts = {word for step in STEPS.values() if "-k" in step.command for word in step.command if word.endswith(".py")}
    parts -= {"tests/gpu/test_train.py"}  # imports torch, and its steps go by names
    command = [sys.executable, "-m", "pytest", "--noconftest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(parts)]
    quiet = os.environ | {"PYTEST_ADDOPTS": ""}  # a -v of whoever runs this would change what is read here
    listed = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, list[str]] = {}
    for path, _, name in (line.partition("::") for line in listed.stdout.splitlines() if "::" in line):
        found.setdefault(path, []).append(name)
    for path in sorted({f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py")} - parts):
        found[path] = re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(encoding="utf-8"), re.M)
    return found


def holds(expression: Expression, name: str) -> bool:
    def occurs(word: str, /, **_: object) -> bool:
        return word in name

    return expression.evaluate(occurs)


def test_every_test_is_in_a_step_and_no_step_is_empty(tests_by_file: dict[str, list[str]]) -> None:
    left = {(path, name) for path, names in tests_by_file.items() for name in names}
    for step_name, step in STEPS.items():
        paths = [word for word in step.command if word.startswith("tests/gpu/")]
        assert all((ROOT / path).is_file() for path in paths), step_name
        if "pytest" in step.command:
            expression = Expression.compile(step.command[step.command.index("-k") + 1] if "-k" in step.command else "test")
            chosen = {(path, name) for path in paths for name in tests_by_file[path] if holds(expression, name)}
            assert chosen, f"{step_name} selects nothing"
            left -= chosen
    assert not left, "in no step"


PUBLISHED = {f"{row.name} of {gpus}": row.step for gpus in (1, 2, 4) for row in rows_on(gpus)}
BENCHMARKS = {name: step.command[3:] for name, step in (STEPS | PUBLISHED).items() if "kog_dist.bench.cli" in step.command}

MODULES = {"scaling": "kernel.scaling_run", "collectives": "collectives.run"} | {
    name: f"engine.{name}" for name in ("requests", "soak")
}


def test_benchmarks_of_reproduce_md_are_steps() -> None:
    text = (
        (ROOT / "docs/reproduce.md").read_text(encoding="utf-8").partition("| single benchmarks")[2].partition("## CPU ranks")[0]
    )
    assert set(re.findall(r"`kog-bench ([\w-]+)", text)) == {words[0] for words in BENCHMARKS.values()}


@cache
def commands() -> Any:
    """Of `kog-bench`; typer makes them anew at every start."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("words", BENCHMARKS.values(), ids=BENCHMARKS)
def test_benchmarks_get_as_far_as_the_gpu(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read, and looked at, by the commands themselves; what they would measure is played."""
    name, begun = words[0], list[inspect.BoundArguments]()
    module = importlib.import_module(f"kog_dist.bench.{MODULES.get(name, f'kernel.{name}')}")
    entry = "run_on_several" if name == "prefill" and "--gpus" in words else "run"
    signature = inspect.signature(getattr(module, entry))

    def run(*arguments: Any, **options: Any) -> bool:
        begun.append(signature.bind(*arguments, **options))
        return True

    monkeypatch.setattr(module, entry, run)
    assert not commands().commands[name].main(list(words[1:]), standalone_mode=False)
    assert len(begun) == 1


def test_limits_leave_room_and_groups_exist() -> None:
    assert all(step.limit_s >= 1.25 * step.about_s and step.gpus in (1, 2, 4) for step in [*STEPS.values(), *PUBLISHED.values()])
    steps = [*STEPS.values(), *PUBLISHED.values()]
    groups = {group.partition(":")[0] for step in steps for group in step.builds}
    assert all(group in prebuild.CHUNK_ROWS or next(prebuild.models(group)) for group in groups)
    assert len(prebuild.builds_of(["2b:1,2"])) == 10 + 7 + 2  # products of one rank; of two the exchange, and the sums
    assert len(prebuild.builds_of(["kernel.qwen3-4b@9216:1,2"])) == 2 + 4  # kernel, reader of the tape; of two ranks
    kv_dtypes = ("bfloat16", "fp8")
    assert [next(prebuild.models(f"qwen3-4b/{name}"))[1]["kv_dtype"] for name in kv_dtypes] == list(kv_dtypes)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_rounded_models_are_built_as_engines_build_them(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE["llama-3.1-8b"]))
    checkpoint = planned_checkpoint(tmp_path, context=8192, quantize=form)
    ((spec, options),) = prebuild.models(f"drafts.llama-3.1-8b@8192!{form}")
    shapes = [KernelShape(spec, range(spec.num_lanes), **options), gpu_rank_shape(checkpoint, 0, 1, "bfloat16")]
    assert headers(shapes[0]) == headers(shapes[1])


def test_modules_of_steps_read_their_arguments() -> None:
    """Those that are neither tests nor `kog-bench`."""
    found = {step.command[2]: step.command[3:] for step in STEPS.values() if step.command[1:2] == ("-m",)}
    modules = {name: words for name, words in found.items() if name.startswith("tests.gpu.")}
    assert set(modules) == {"tests.gpu.agents", "tests.gpu.chains", "tests.gpu.counted_bytes", "tests.gpu.together"}
    for name, words in modules.items():
        importlib.import_module(name).parsed(words)


def test_list_prints_every_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "list"])
    assert runner.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STEPS)


def test_a_failure_is_code_1_and_its_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {
        "good": python("print('shown'); print('{\"benchmark\": 1, \"shown\": 2}')", gpus=0),
        "bad": python("import sys; print('shown'); sys.exit(3)", gpus=0),
    }
    monkeypatch.setattr(runner, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "logs"), "good", "bad"])
    assert runner.main() == 1
    assert (tmp_path / "logs/bad.log").read_text() == "shown\n"
    assert json.loads((tmp_path / "logs/good.json").read_text()) == {"benchmark": 1, "shown": 2}
    summary = {one["name"]: one for one in json.loads((tmp_path / "logs/summary.json").read_text())}
    assert {name: one["outcome"] for name, one in summary.items()} == {"good": "ok", "bad": "code 3"}
    assert summary["good"]["lines"] == ["shown"], "the object is in a file, and longer than a line"
    table = capsys.readouterr().out.rpartition("logs: ")[2].splitlines()[1:]
    assert [line.split()[:2] for line in table] == [["good", "ok"], ["bad", "code"]]
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "logs"), "good"])
    assert runner.main() == 0


@pytest.fixture
def no_sigint() -> Iterator[None]:
    """Steps inherit that SIGINT is blocked, so it waits for them however long they take to start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("no_sigint")
def test_a_step_that_overruns_is_asked_to_end(tmp_path: Path) -> None:
    step = python("import signal; signal.sigwait([signal.SIGINT]); print('shown')", limit_s=0.0)
    (result,) = run({"polite": step}, GPUS, tmp_path)
    assert (result.outcome, result.lines) == ("over its limit", ["shown"])


@pytest.mark.usefixtures("no_sigint")
def test_a_step_that_does_not_end_is_killed(tmp_path: Path) -> None:
    results = run({"deaf": python("import signal; signal.pause()", limit_s=0.0), "next": python("")}, GPUS, tmp_path, grace_s=0.0)
    assert [(result.outcome, result.left) for result in results] == [("over its limit", []), ("ok", [])]


def test_tests_that_are_all_skipped_are_no_success(tmp_path: Path) -> None:
    skipped = replace(python(""), command=(sys.executable, "-S", "-c", "print('5 skipped')", "pytest"))
    (result,) = run({"skipped": skipped}, GPUS, tmp_path)
    assert (result.outcome, result.lines) == ("nothing passed", ["5 skipped"])


def test_a_process_that_was_left_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAVING_S", 0.0)
    code = "import os, signal; pid = os.fork() or os.setsid() or signal.pause(); print('shown', pid)"
    (result,) = run({"leaves": python(code)}, GPUS, tmp_path)
    pid = int(result.lines[0].split()[1])
    assert result.outcome == "left something"
    assert result.left[0].startswith(f"{pid} ")
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_steps_share_gpus_where_none_must_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two meet in a named pipe, so they run at the same time; the third begins when they are gone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    shows = "import os; print('shown', os.environ.get('CUDA_VISIBLE_DEVICES')); "
    steps = {
        "reads": python(f"{shows} open({str(pipe)!r}).read(); os.remove({str(pipe)!r})", gpus=2),
        "writes": python(f"{shows} open({str(pipe)!r}, 'w').close()", gpus=2),
        "alone": python(f"{shows} assert not os.path.exists({str(pipe)!r})", gpus=4, alone=True),
    }
    results = run(steps, GPUS, tmp_path)
    assert [result.outcome for result in results] == ["ok"] * 3
    assert [result.lines for result in results] == [["shown 0,1"], ["shown 2,3"], ["shown None"]]


@pytest.mark.parametrize(("waiting", "under_way", "free", "chosen"), [
    (["one", "four"], [], 4, "one"),
    (["four", "one"], ["one"], 3, "one"),  # what fits goes first
    (["four", "alone"], ["one"], 3, None),
    (["alone", "one"], ["one"], 3, None),  # not overtaken
    (["alone", "one"], [], 4, "alone"),
    (["one"], ["alone"], 3, None),
])  # fmt: skip
def test_who_begins(waiting: list[str], under_way: list[str], free: int, chosen: str | None) -> None:
    one = python("")
    steps = {"one": one, "four": replace(one, gpus=4), "alone": replace(one, alone=True)}
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        running = [runner.Running(Result(name), steps[name], [], process, "", 0.0, 0.0) for name in under_way]
    assert runner._next({name: steps[name] for name in waiting}, running, free) == chosen
