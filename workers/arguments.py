"""What a worker process is told on its command line: one JSON object, checked field by field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from kog_dist.config import PREFILL
from kog_dist.errors import ConfigError
from kog_dist.hardware.placement import ANYWHERE, Placement
from kog_dist.topology import RankInfo


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """Arguments of `python -m kog_dist.workers.worker`. Every launcher makes the same ones."""

    info: RankInfo
    model: str  # folder of the checkpoint
    device: str
    kv_dtype: str
    verify: bool
    startup_timeout_s: float
    step_timeout_s: float
    num_kv_caches: int = 1
    placement: Placement = ANYWHERE
    prefill: str = "off"  # whether a GPU takes prompts in blocks of many tokens: on, off, or auto: if it can

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerArgs:
        """The inverse of `to_json`. Raises ConfigError naming what is missing, unknown or of another type."""
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the worker's argument is not JSON: {error}") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ConfigError(f"the worker's argument must be an object with {', '.join(sorted(names))}; got {found}")
        kinds: dict[str, tuple[type, ...]] = {
            "model": (str,), "device": (str,), "kv_dtype": (str,), "verify": (bool,), "startup_timeout_s": (float, int),
            "step_timeout_s": (float, int), "num_kv_caches": (int,), "prefill": (str,),
        }  # fmt: skip
        for name, accepted in kinds.items():
            if not isinstance(values[name], accepted):
                raise ConfigError(f"the worker's argument {name} must be {accepted[0].__name__}, got {values[name]!r}")
        if values["prefill"] not in PREFILL:
            raise ConfigError(f"the worker's argument prefill must be one of {', '.join(PREFILL)}, got {values['prefill']!r}")
        info = RankInfo.from_json(json.dumps(values["info"]))
        return cls(**{**values, "info": info, "placement": Placement.from_dict(values["placement"])})
