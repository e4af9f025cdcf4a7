"""What an ablation compares: forms of communication x lanes x learning rates x seeds, at equal parameters and tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.train.config import read_tables, settings_of, spec_of
from kog_dist.train.model import Residual
from kog_dist.train.settings import Execution, RunSettings

REFERENCE = "delay 0"  # what all others are compared with
_DELAY = re.compile(r"delay (\d+)( without early)?")


@dataclass(frozen=True)
class Form:
    """One way to join the lanes.

    Names: `delay N` (the first N layers blocking), `delay N without early` (the first N layers without communication), `none`
    (no communication but for the final mean), `ladder` (Ladder residuals).
    """

    name: str

    def __post_init__(self) -> None:
        match = _DELAY.fullmatch(self.name)
        if self.name not in ("none", "ladder") and (match is None or (match[2] and match[1] == "0")):
            raise ConfigError(f"there is no form {self.name!r}; use 'delay N', 'delay N without early', 'none' or 'ladder'")

    @property
    def residual(self) -> Residual:
        """How the training model joins its blocks."""
        return Residual.LADDER if self.name == "ladder" else Residual.LANES

    def spec(self, base: ModelSpec, num_lanes: int) -> ModelSpec:
        """`base` with these lanes in this form."""
        if self.name == "none":
            return replace(base, num_lanes=num_lanes, delay=1, attention_comm=False, mlp_comm=False)
        match = _DELAY.fullmatch(self.name)
        return replace(base, num_lanes=num_lanes, delay=int(match[1]) if match else 0, early_comm=not (match and match[2]))


@dataclass(frozen=True)
class Job:
    """One training run of the grid."""

    num_lanes: int
    form: Form
    learning_rate_factor: float
    seed: int

    @property
    def key(self) -> str:
        """Its name on disk."""
        return f"lanes{self.num_lanes}-{self.form.name.replace(' ', '-')}-lr{self.learning_rate_factor:g}-seed{self.seed}"


@dataclass(frozen=True)
class Grid:
    """The lists whose product is trained. final_batches: held-out batches that the compared loss is the mean of."""

    lanes: list[int]
    forms: list[str]
    seeds: list[int]
    learning_rate_factors: list[float]
    final_batches: int = 32

    def jobs(self, lanes: Sequence[int] = (), seeds: Sequence[int] = (), first: int = 0) -> list[Job]:
        """All runs, or those with these lanes and seeds; all forms of the first seed come first.

        first: place in `self.lanes` to begin with. Processes that begin with different lanes compile different graphs.

        Raises ConfigError if lanes or seeds are not in the grid.
        """
        for what, asked, known in (("lanes", lanes, self.lanes), ("seed", seeds, self.seeds)):
            for value in asked:
                if value not in known:
                    raise ConfigError(f"there is no {what} {value} in the grid, only {', '.join(map(str, known))}")
        first %= len(self.lanes)
        return [
            Job(num_lanes, Form(form), factor, seed)
            for seed in self.seeds
            if not seeds or seed in seeds
            for num_lanes in [*self.lanes[first:], *self.lanes[:first]]
            if not lanes or num_lanes in lanes
            for factor in self.learning_rate_factors
            for form in self.forms
        ]


@dataclass(frozen=True)
class AblationConfig:
    """An ablation: a grid over one model and one way to train it."""

    base: ModelSpec
    settings: RunSettings
    execution: Execution
    grid: Grid

    def spec(self, job: Job) -> ModelSpec:
        """The model of a run."""
        return job.form.spec(self.base, job.num_lanes)

    def run_settings(self, job: Job) -> RunSettings:
        """How a run is trained."""
        factor = job.learning_rate_factor
        return replace(
            self.settings,
            seed=job.seed,
            learning_rate=self.settings.learning_rate * factor,
            adam_learning_rate=self.settings.adam_learning_rate * factor,
        )

    def described(self) -> dict[str, object]:
        """Everything that decides a run's outcome besides what its job says, as JSON."""
        return {"model": self.base.to_config(), "run": asdict(self.settings), "final_batches": self.grid.final_batches}


def read_ablation_config(path: Path) -> AblationConfig:
    """Read [model], [run], [execution] and [grid] of a TOML file. Raises ConfigError naming what is wrong.

    All models of the grid must have the same number of parameters, and each run a fixed number of steps.
    """
    tables = read_tables(path, ("model", "run", "execution", "grid"))
    config = AblationConfig(
        spec_of(tables.get("model", {}), path),
        settings_of(RunSettings, tables.get("run", {}), path),
        settings_of(Execution, tables.get("execution", {}), path),
        settings_of(Grid, {"learning_rate_factors": [1.0], **tables.get("grid", {})}, path),
    )
    if config.settings.num_steps is None:
        raise ConfigError(f"{path}: [run] needs num_steps, so that all runs see the same tokens")
    if REFERENCE not in config.grid.forms:
        raise ConfigError(f"{path}: [grid] forms must contain {REFERENCE!r}, which the others are compared with")
    counts = {config.spec(job).num_parameters for job in config.grid.jobs()}
    if len(counts) != 1:
        raise ConfigError(f"{path}: the models of the grid have different numbers of parameters: {sorted(counts)}")
    return config
