"""What decides a training run, and how it is computed; both can come from a TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.records import dataclass
from kog_dist.train.optimizers import OPTIMIZERS
from kog_dist.train.schedule import SCHEDULES

PRECISIONS = ("auto", "bf16", "float32")
WINDOWS = ("sdpa", "flex", "auto")


@dataclass(frozen=True)
class RunSettings:
    """What decides the outcome of a run; kept with its state and compared when it resumes.

    num_steps: optimizer steps in all; None = as many as fit into `train_seconds`, by the speed of the first steps;
    what compilation and those steps took counts.
    batch: rows per step over all ranks; time: tokens per row.
    schedule: see `learning_rate_factor`; decay_share: last part of the steps of `wsd`.
    precision: matrix products in bfloat16 (autocast; weights and moments stay float32) or all in float32; auto = bf16 on CUDA.
    function_share, repetition_share: parts of the rows of a step, in the last `decay_share` of all steps: single functions
    (`prepare --functions`), and loops (`train.repetition`), half of them made of functions if there are any.
    held_out_batches: batches of evenly spaced held-out rows that a held-out loss is the mean of.
    """

    num_steps: int | None = None
    train_seconds: float = 1200.0
    batch: int = 128
    time: int = 2048
    optimizer: str = "muon"
    learning_rate: float = 5e-3
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    schedule: str = "wsd"
    warmup_steps: int = 100
    decay_share: float = 0.4
    precision: str = "auto"
    function_share: float = 0.0
    repetition_share: float = 0.0
    held_out_batches: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for key, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            _one_of(key, getattr(self, key), choices)
        for key in ("batch", "time", "held_out_batches"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {self.num_steps}")
        for key in ("learning_rate", "adam_learning_rate", "train_seconds"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key} must be more than 0, got {getattr(self, key)}")
        for key in ("decay_share", "function_share", "repetition_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"{key} must be from 0 to 1, got {getattr(self, key)}")
        if self.function_share + self.repetition_share > 1:
            raise ConfigError("function_share and repetition_share are together more than 1: they are shares of the same rows")

    def steps_between(self, entries: int) -> int:
        """Steps between two of about so many entries of the loss curves. Needs `num_steps`."""
        assert self.num_steps is not None
        return max(1, self.num_steps // entries)


@dataclass(frozen=True)
class Execution:
    """How the same run is computed: changes speed and rounding.

    compiled: torch.compile, layer by layer. windows: windowed layers with a mask for torch's attention (sdpa), with flex
    attention, or with the faster one (auto, measured at the start; CUDA). deterministic: on CUDA, only kernels that repeat bits.
    cuda_graph: on one GPU, a step is captured and replayed whole, which small models need.
    """

    compiled: bool = False
    windows: str = "sdpa"
    deterministic: bool = True
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        _one_of("windows", self.windows, WINDOWS)


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Run settings from JSON; those that are younger than the file had their defaults."""
    return {**json.loads(json.dumps(asdict(RunSettings()))), **stored}


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
