"""Steps of steps.py on the GPUs that CUDA_VISIBLE_DEVICES shows: `python -m tests.gpu.run --out FOLDER STEP...`, or `list`.

A step is a name, or a number of GPUs for all that need so many and have no group, or a group: `models`, `long`, ...; `list` says
which one.
Steps run side by side where GPUs are free and nothing measures. At its limit a step gets SIGINT, upon which benchmarks print what
they have, and GRACE_S later SIGKILL. Exit code 1 if one failed.

`--publish RAW_DIR` measures the tables of README and docs/results.md on one commit instead (docs/reproduce.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kog_dist.bench.engine.processes import marked_processes
from kog_dist.errors import ConfigError
from kog_dist.hardware.gpus import Gpu, read_inventory
from kog_dist.hardware.visible import ORDER_VARIABLE, VARIABLE, visible_gpus
from tests.gpu.steps import STEPS, Step

ROOT = Path(__file__).parents[2]
GRACE_S, LEAVING_S, KILLED_S = 12.0, 3.0, 5.0  # after SIGINT; of processes that outlive the one that was started; after SIGKILL
MARK = "GPU_STEP"  # a variable that all processes of a step inherit; engines would not hand on one that begins with KOG_
_WIDTH, _MOST_LINES = 200, 30
_HELD_BYTES = 1 << 30  # of a GPU's memory, that are not free any more after a step


@dataclass
class Result:
    name: str
    outcome: str = "not run"
    seconds: float = 0.0
    gpus: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what it left behind
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"GPU {','.join(map(str, self.gpus))}" if self.gpus else ""
        return f"{self.name:<16} {self.outcome:<15} {self.seconds:6.1f} s  {where:<12} {'; '.join(self.left)}".rstrip()


@dataclass
class Running:
    """A step under way; `process` leads a process group."""

    result: Result
    step: Step
    gpus: list[Gpu]
    process: subprocess.Popen[bytes]
    mark: str
    begin_s: float
    until_s: float
    stopped_as: str = ""  # once it got SIGINT

    def interrupt(self, why: str, grace_s: float) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        self.stopped_as, self.until_s = why, time.monotonic() + grace_s


def run(steps: Mapping[str, Step], gpus: Sequence[Gpu], out: Path, *, grace_s: float = GRACE_S) -> list[Result]:
    """Run them all, none of which needs more GPUs than there are. The folder gets logs, JSON of benchmarks, summary.json."""
    assert all(step.gpus <= len(gpus) for step in steps.values())
    out.mkdir(parents=True, exist_ok=True)
    results = {name: Result(name) for name in steps}
    waiting, running, free = dict(steps), list[Running](), list(gpus)
    try:
        while waiting or running:
            try:
                while name := _next(waiting, running, len(free)):
                    step = waiting.pop(name)
                    given, free = free[: step.gpus], free[step.gpus :]
                    running.append(_start(results[name], step, given, len(given) < len(gpus), out))
                _wait([one.process.pid for one in running], min(one.until_s for one in running) - time.monotonic())
            except KeyboardInterrupt:
                waiting.clear()
                for one in running:
                    one.interrupt("interrupted", 0.0 if one.stopped_as else grace_s)
            for one in list(running):
                if one.process.poll() is None and not one.stopped_as and time.monotonic() >= one.until_s:
                    one.interrupt("over its limit", grace_s)
                if one.process.poll() is None and time.monotonic() < one.until_s:
                    continue
                running.remove(one)
                if not _finish(one, out):
                    print("== something cannot be ended: no further step begins", flush=True)
                    waiting.clear()
                free = sorted([*free, *one.gpus], key=lambda gpu: gpu.index)
                print(f"== {one.result}", *one.result.lines, sep="\n   ", flush=True)
                (out / "summary.json").write_text(json.dumps([asdict(result) for result in results.values()], indent=1))
    finally:  # upon an error, or an interrupt meanwhile
        for one in running:
            _kill(one.mark)
    return list(results.values())


def _next(waiting: Mapping[str, Step], running: Collection[Running], num_free: int) -> str | None:
    """The first that can begin now. One that must be alone is not overtaken."""
    for name, step in waiting.items():
        if step.alone or any(one.step.alone for one in running):
            return None if running else name
        if step.gpus <= num_free:
            return name
    return None


def _start(result: Result, step: Step, gpus: list[Gpu], are_part: bool, out: Path) -> Running:
    result.gpus = [gpu.index for gpu in gpus]
    chosen = {VARIABLE: ",".join(map(str, result.gpus)), ORDER_VARIABLE: "PCI_BUS_ID"} if gpus and are_part else {}
    mark = uuid.uuid4().hex
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environ, **chosen, MARK: mark}
    command = [word.replace("{out}", str(out.resolve())) for word in step.command]
    with (out / f"{result.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    begin_s = time.monotonic()
    return Running(result, step, gpus, process, f"{MARK}={mark}", begin_s, begin_s + step.limit_s)


def _wait(pids: Collection[int], limit_s: float, *, for_all: bool = False) -> None:
    """Until one of these processes has ended, or all, or the time is over."""
    end_s, poller, files = time.monotonic() + limit_s, select.poll(), set[int]()
    try:
        for pid in pids:
            try:
                files.add(os.pidfd_open(pid))
            except ProcessLookupError:  # it has ended
                continue
        for file in files:
            poller.register(file, select.POLLIN)
        num_left = len(files) if for_all else min(1, len(files))
        while num_left > 0 and (ended := poller.poll(max(0.0, end_s - time.monotonic()) * 1e3)):
            num_left -= len(ended)
            for file, _ in ended:
                poller.unregister(file)
    finally:
        for file in files:
            os.close(file)


def _finish(one: Running, out: Path) -> bool:
    """Clean up behind a step and fill in its result. False if a process or a GPU does not let go."""
    result, log = one.result, out / f"{one.result.name}.log"
    result.seconds = round(time.monotonic() - one.begin_s, 1)
    if not one.stopped_as:
        _wait(_marked(one.mark), LEAVING_S, for_all=True)
        result.left = [f"{command} was left" for command in _marked(one.mark).values()]
    result.left += [f"{command} cannot be ended" for command in _kill(one.mark)]
    is_stuck = one.process.poll() is None
    if any(gpu.memory_bytes for gpu in one.gpus):
        now = read_inventory()
        is_stuck |= now.driver_hangs
        free_bytes = {gpu.index: gpu.free_bytes for gpu in now.gpus}
        sizes = ((gpu.index, gpu.free_bytes - free_bytes.get(gpu.index, 0)) for gpu in one.gpus)
        held = [f"GPU {index}: {size >> 20} MiB not free any more" for index, size in sizes if size > _HELD_BYTES]
        result.left += held
        is_stuck |= bool(held)  # a process whose kernel hangs holds its memory, but cannot be found any more
    code = one.process.returncode
    text = log.read_text(errors="replace").splitlines()
    result.outcome = one.stopped_as or (f"code {code}" if code else "left something" if result.left else "ok")
    if result.outcome == "ok" and "pytest" in one.step.command and not any(re.search(r"\d passed", line) for line in text):
        result.outcome = "nothing passed"
    objects = [line for line in text if line.startswith('{"benchmark"')]
    result.lines = [line[:_WIDTH] for line in text if line not in objects and re.search(one.step.shown, line)]
    if code or not result.lines:
        result.lines += [line[:_WIDTH] for line in text[-6:] if line[:_WIDTH] not in result.lines]
    result.lines = result.lines[-_MOST_LINES:]
    if objects:
        log.with_suffix(".json").write_text(objects[-1] + "\n")
    return not is_stuck


def _marked(mark: str) -> dict[int, str]:
    """Command lines of all live processes of a step, by pid."""
    return {pid: f"{pid} {' '.join(command)[:80]}" for pid, command, _ in marked_processes(mark)}


def _kill(mark: str) -> list[str]:
    """End all processes of a step; returns those that do not end."""
    pids = _marked(mark)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _wait(pids, KILLED_S, for_all=True)
    return list(_marked(mark).values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-logs"), help="folder of the logs")
    parser.add_argument("--no-prebuild", action="store_true", help="do not build device programs beforehand")
    parser.add_argument("--publish", type=Path, metavar="RAW_DIR", help="measure the tables' rows that this folder lacks")
    parser.add_argument("--dry-run", action="store_true", help="with --publish: say what would be measured, and the time")
    parser.add_argument("--begin", action="store_true", help="with --publish: only note the commit, for a machine without git")
    parser.add_argument("--budget-s", type=float, default=540.0, help="with --publish: begin no row that would end later")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), help="with --publish: on so many instead of all")
    parser.add_argument("steps", nargs="*", metavar="STEP")
    given = parser.parse_args()
    if given.publish:
        from tests.gpu.publish.measure import publish  # it has this module's results

        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return publish(given, visible_gpus(read_inventory().gpus, os.environ).gpus, run)
        except ConfigError as error:
            parser.error(str(error))
    if not given.steps:
        parser.error("give steps, `list`, or --publish RAW_DIR")
    if given.steps == ["list"]:
        for name, step in STEPS.items():
            group = f" ({step.group})" if step.group else ""
            print(f"{name:<16} {step.gpus} GPU{group}, about {step.about_s:g} s, at most {step.limit_s:g}: {step}")
        return 0
    steps: dict[str, Step] = {}
    for word in given.steps:
        found = {name: step for name, step in STEPS.items() if word in (name, step.group or str(step.gpus))}
        if not found:
            parser.error(f"there is no step {word}; `list` names all")
        steps |= found
    inventory = read_inventory()
    visible = visible_gpus(inventory.gpus, os.environ)
    if lacking := [name for name, step in steps.items() if step.gpus > len(visible.gpus)]:
        why = "; ".join(filter(None, [*inventory.findings, visible.why]))
        parser.error(f"{len(visible.gpus)} GPUs are too few for {', '.join(lacking)}. {why}")
    groups = dict.fromkeys(group for step in steps.values() for group in step.builds)
    if groups and not given.no_prebuild:
        steps = {"prebuild": Step(0, 60, 600, (sys.executable, "-m", "tests.gpu.prebuild", *groups), "programs"), **steps}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # were it ignored here, it would be in every step
    results = run(steps, visible.gpus, given.out)
    print(f"\nlogs: {given.out.resolve()}", *results, sep="\n")
    return int(any(result.outcome != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
