"""`ablation`: trains every run of a grid, in pieces if need be, and compares their held-out losses."""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.train.ablation_grid import AblationConfig, Job
from kog_dist.train.curves import data_digest
from kog_dist.train.display import duration, nothing
from kog_dist.train.distributed import Ranks
from kog_dist.train.run import Run
from kog_dist.train.settings import with_defaults
from kog_dist.train.state import write_json
from kog_dist.train.tokens import TokenSet

_REPORTS = 8  # entries of each run's loss curve


class Ablation:
    """The runs of a grid on one device; what is finished lies in `out/runs`, one JSON file per run.

    Several processes may work on one `out` at the same time: each holds a lock on the run that it trains.
    """

    def __init__(self, config: AblationConfig, data: Path, out: Path, device: Ranks) -> None:
        self.config, self.data, self.out, self.device = config, data, out, device
        self.described = json.loads(json.dumps({**config.described(), "data_digest": data_digest(data)}))
        with self.alone():
            self._restore()
            self._check_same_config()

    def train(
        self,
        jobs: Sequence[Job],
        *,
        call_seconds: float = math.inf,
        report: Callable[[str], None] = print,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train what is missing of `jobs` and nobody else is training.

        Returns whether all `jobs` are done: not if `call_seconds` are over, and not if another process has one in hand.
        """
        called = time.perf_counter()
        num_done = before = self.num_done(jobs)
        report(f"{num_done} of {len(jobs)} runs are done")
        if num_done == len(jobs):
            return True
        tokens = TokenSet.load(self.data, self.config.settings.time, self.device.device)
        for job in jobs:
            left_s = call_seconds - (time.perf_counter() - called)
            if left_s <= 0 or stop():
                return False
            with self._claim(job) as claimed:
                if not claimed or self._result_file(job).exists():
                    continue
                result = self._train_one(job, tokens, left_s, stop)
            if result is None:
                return False
            num_done = self.num_done(jobs)
            rest = duration((time.perf_counter() - called) / max(1, num_done - before) * (len(jobs) - num_done))
            report(
                f"{num_done}/{len(jobs)} {job.key}: held-out {result['loss']:.4f}, {result['seconds']:.1f} s, "
                f"{result['tokens'] / result['seconds'] / 1e6:.2f} M tokens/s; about {rest} left"
            )
        return self.num_done(jobs) == len(jobs)

    def num_done(self, jobs: Sequence[Job]) -> int:
        """How many of `jobs` have their outcome, whoever trained them."""
        return sum(self._result_file(job).exists() for job in jobs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is in this block of the same folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _claim(self, job: Job) -> Iterator[bool]:
        """Whether this process may train `job` while the block lasts. A process that dies gives its claim back."""
        file = self.out / "claims" / job.key
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def results(self) -> list[dict[str, Any]]:
        """The outcome of every finished run of the grid, in its order."""
        files = [self._result_file(job) for job in self.config.grid.jobs()]
        return [json.loads(read_text(file)) for file in files if file.exists()]

    def _train_one(self, job: Job, tokens: TokenSet, left_s: float, stop: Callable[[], bool]) -> dict[str, Any] | None:
        settings = self.config.run_settings(job)
        run = Run(
            self.config.spec(job),
            settings,
            tokens,
            ranks=self.device,
            execution=self.config.execution,
            residual=job.form.residual,
        )
        unfinished = self.out / "unfinished" / job.key
        run.resume(unfinished)
        finished = run.train(call_seconds=left_s, report=nothing, report_every=settings.steps_between(_REPORTS), stop=stop)
        run.close()
        if not finished:
            run.save(unfinished)
            return None
        result = {
            "key": job.key,
            "lanes": job.num_lanes,
            "form": job.form.name,
            "learning_rate_factor": job.learning_rate_factor,
            "seed": job.seed,
            "loss": run.held_out_loss(self.config.grid.final_batches),
            "parameters": run.spec.num_parameters,
            "tokens": run.step_idx * settings.batch * settings.time,
            "seconds": round(run.trained_s, 2),
            "training_losses": run.losses,
            "held_out_losses": run.held_out_losses,
        }
        write_json(self._result_file(job), result)
        shutil.rmtree(unfinished, ignore_errors=True)
        return result

    def _result_file(self, job: Job) -> Path:
        return self.out / "runs" / f"{job.key}.json"

    def _restore(self) -> None:
        """Take over what `results.json` says and `runs` does not: on another machine that one file is enough to go on."""
        file = self.out / "results.json"
        if not file.exists():
            return
        results = json.loads(read_text(file))
        missing = {self.out / "runs" / f"{run['key']}.json": run for run in results["runs"]}
        for path, content in {self.out / "config.json": results["config"], **missing}.items():
            if not path.exists():
                write_json(path, content)

    def _check_same_config(self) -> None:
        file = self.out / "config.json"
        if not file.exists():
            write_json(file, self.described)
        before = json.loads(read_text(file))
        before["run"] = with_defaults(before.get("run", {}))
        for key, value in self.described.items():
            if before.get(key) != value:
                raise ConfigError(f"{self.out} holds an ablation with {key} {before.get(key)}, now {value}; use another folder")
