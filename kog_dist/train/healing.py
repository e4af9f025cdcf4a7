"""`healing`: a model of delay 0 goes on as one with delay, its units as they lie and regrouped, beside one that keeps delay 0.

All of a seed see the same tokens, so what the rows of a seed differ by is the delay and the regrouping.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.train.affinity import Regrouping, regrouped_for_delay
from kog_dist.train.config import read_tables, settings_of, spec_of
from kog_dist.train.curves import data_digest
from kog_dist.train.display import nothing
from kog_dist.train.distributed import Ranks
from kog_dist.train.intervals import Mean, mean_of, paired
from kog_dist.train.run import Run
from kog_dist.train.settings import Execution, RunSettings, with_defaults
from kog_dist.train.start import healing_start
from kog_dist.train.state import write_json
from kog_dist.train.tokens import TokenSet

REFERENCE, PLAIN, REGROUPED = "goes on with delay 0", "as the units lie", "regrouped"


@dataclass(frozen=True)
class HealSettings:
    """How the base is healed. learning_rate_factor: of the base's rates; final_batches: of the compared held-out losses."""

    delay: int
    num_steps: int
    seeds: list[int]
    learning_rate_factor: float = 0.5
    warmup_steps: int = 20
    final_batches: int = 32


@dataclass(frozen=True)
class HealingConfig:
    """A base model of delay 0, how it is trained, and how it is healed."""

    base: ModelSpec
    settings: RunSettings
    execution: Execution
    heal: HealSettings

    def heal_settings(self, seed: int) -> RunSettings:
        """How the runs of a seed are trained. Their tokens are others than the base's."""
        factor = self.heal.learning_rate_factor
        return replace(
            self.settings,
            num_steps=self.heal.num_steps,
            warmup_steps=self.heal.warmup_steps,
            seed=1 + self.settings.seed + seed,
            learning_rate=self.settings.learning_rate * factor,
            adam_learning_rate=self.settings.adam_learning_rate * factor,
        )


def read_healing_config(path: Path) -> HealingConfig:
    """Read [model], [run], [execution] and [heal] of a TOML file. Raises ConfigError naming what is wrong."""
    tables = read_tables(path, ("model", "run", "execution", "heal"))
    config = HealingConfig(
        spec_of(tables.get("model", {}), path),
        settings_of(RunSettings, tables.get("run", {}), path),
        settings_of(Execution, tables.get("execution", {}), path),
        settings_of(HealSettings, tables.get("heal", {}), path),
    )
    if config.settings.num_steps is None:
        raise ConfigError(f"{path}: [run] needs num_steps")
    healing_start(config.base, config.heal.delay)  # raises if it cannot be
    return config


class Healing:
    """The experiment on one device. What is finished lies in `out/runs`; the base's state in `out/base`."""

    def __init__(self, config: HealingConfig, data: Path, out: Path, device: Ranks) -> None:
        self.config, self.out, self.device = config, out, device
        self.described = json.loads(
            json.dumps(
                {
                    "model": config.base.to_config(),
                    "run": asdict(config.settings),
                    "heal": asdict(config.heal),
                    "data_digest": data_digest(data),
                }
            )
        )
        file = out / "config.json"
        if not file.exists():
            write_json(file, self.described)
        before = json.loads(read_text(file))
        if {**before, "run": with_defaults(before["run"])} != self.described:
            raise ConfigError(f"{out} holds an experiment with other settings or data; use another folder")
        self._tokens = TokenSet.load(data, config.settings.time, device.device)

    def train(
        self, *, call_seconds: float = math.inf, report: Callable[[str], None] = print, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train what is missing until all is done (True), or `call_seconds` are over (False)."""
        called = time.perf_counter()
        missing = [(start, seed) for start, seed in self._jobs() if not self._file(start, seed).exists()]
        if not missing:
            return True
        base = self._base(call_seconds, report, stop)
        if base is None:
            return False
        starts = self._starts(base, report)
        for start, seed in missing:
            if time.perf_counter() - called > call_seconds or stop():
                return False
            spec, weights = starts[start]
            settings = self.config.heal_settings(seed)
            run = Run(spec, settings, self._tokens, ranks=self.device, execution=self.config.execution, start=weights)
            before = run.held_out_loss(self.config.heal.final_batches)
            run.train(report=nothing, report_every=settings.steps_between(8))
            run.close()
            result = {
                "start": start,
                "seed": seed,
                "loss_before": before,
                "loss": run.held_out_loss(self.config.heal.final_batches),
                "held_out_losses": run.held_out_losses,
                "seconds": round(run.trained_s, 2),
            }
            write_json(self._file(start, seed), result)
            report(f"{start}, seed {seed}: held-out {before:.4f} before, {result['loss']:.4f} after, {run.trained_s:.1f} s")
        return True

    def results(self) -> list[dict[str, Any]]:
        """The outcome of every finished run."""
        files = [self._file(start, seed) for start, seed in self._jobs()]
        return [json.loads(read_text(file)) for file in files if file.exists()]

    def _jobs(self) -> list[tuple[str, int]]:
        return [(start, seed) for seed in self.config.heal.seeds for start in (REFERENCE, PLAIN, REGROUPED)]

    def _file(self, start: str, seed: int) -> Path:
        return self.out / "runs" / f"{start.replace(' ', '-')}-seed{seed}.json"

    def _base(self, call_seconds: float, report: Callable[[str], None], stop: Callable[[], bool]) -> dict[str, Tensor] | None:
        run = Run(self.config.base, self.config.settings, self._tokens, ranks=self.device, execution=self.config.execution)
        run.resume(self.out / "base")
        finished = run.train(call_seconds=call_seconds, report=report, save_to=self.out / "base", stop=stop)
        run.close()
        return {name: weight.detach().cpu() for name, weight in run.module.state_dict().items()} if finished else None

    def _starts(
        self, base: dict[str, Tensor], report: Callable[[str], None]
    ) -> Mapping[str, tuple[ModelSpec, dict[str, Tensor]]]:
        healed = healing_start(self.config.base, self.config.heal.delay)
        found: Regrouping = regrouped_for_delay(self.config.base, base, self._tokens.train, self.config.heal.delay)
        shares = {"share_before": found.share_before, "share_after": found.share_after}
        write_json(self.out / "regrouping.json", shares)
        report(f"coupling inside lanes: {found.share_before:.4f} as the units lie, {found.share_after:.4f} regrouped")
        return {REFERENCE: (self.config.base, base), PLAIN: (healed, base), REGROUPED: (healed, dict(found.tensors))}


def means(results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Mean, Mean, Mean | None]]:
    """By start: held-out loss before and after, and the difference after to what goes on with delay 0, seed by seed."""
    after = {start: {r["seed"]: r["loss"] for r in results if r["start"] == start} for start in (REFERENCE, PLAIN, REGROUPED)}
    return {
        start: (
            mean_of([r["loss_before"] for r in results if r["start"] == start]),
            mean_of(list(by_seed.values())),
            None if start == REFERENCE else paired(by_seed, after[REFERENCE]),
        )
        for start, by_seed in after.items()
        if by_seed
    }


def table(results: Sequence[Mapping[str, object]]) -> str:
    """Markdown."""
    lines = ["| start | seeds | held-out loss before | after | more than with delay 0 |", "|---|---:|---:|---:|---:|"]
    for start, (before, after, difference) in means(results).items():
        cells = [f"{after.count}", f"{before.value:.4f}", after.text(".4f")]
        cells.append("" if difference is None else difference.text("+.4f"))
        lines.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_report(out: Path, described: Mapping[str, object], results: Sequence[Mapping[str, object]]) -> None:
    """Write `results.json` and `table.md` of what is done so far."""
    shares = out / "regrouping.json"
    coupling = json.loads(read_text(shares)) if shares.exists() else None
    write_json(out / "results.json", {"config": described, "coupling_inside_lanes": coupling, "runs": list(results)})
    (out / "table.md").write_text(table(results), encoding="utf-8")
