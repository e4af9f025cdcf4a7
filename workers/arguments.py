"""What a worker process is told on its command line: one JSON object, checked field by field."""

from __future__ import annotations

from typing import ClassVar

from kog_dist.config import CHOICES
from kog_dist.errors import ConfigError
from kog_dist.hardware.placement import ANYWHERE, Placement
from kog_dist.records import dataclass
from kog_dist.runtime.process_arguments import JsonArguments
from kog_dist.runtime.topology import RankInfo


@dataclass(frozen=True, slots=True)
class WorkerArgs(JsonArguments):
    """Arguments of `python -m kog_dist.workers.worker`. Every launcher makes the same ones."""

    reader: ClassVar[str] = "worker"

    info: RankInfo
    model: str  # folder of the checkpoint
    device: str
    kv_dtype: str
    verify: bool
    startup_timeout_s: float
    step_timeout_s: float
    num_kv_caches: int = 1
    parallel: int = 1  # requests that decode together
    kept_bytes: int = 0  # of memory that kept prefixes may take on the device: the block pool
    kept_host_bytes: int = 0  # and behind it in the host's
    whole_windows: bool = False  # whether windowed layers of a GPU keep all positions, not a ring
    placement: Placement = ANYWHERE
    prefill: str = "off"  # whether a GPU takes prompts in blocks of many tokens: on, off, or auto: if it can

    context: int = 0  # tokens of prompt and answer together; 0: as many as the model can
    quantize: str = "none"  # to what 16-bit weights of the layers are rounded as they are loaded
    quantize_head: str = "none"  # and the LM head
    rounded_cache_bytes: int = 0  # on disk for what they were rounded to, of all models
    check_experts: bool = False  # whether ranks compare the experts that they choose
    drafts: bool = False  # whether a GPU has what requests with drafts need

    def __post_init__(self) -> None:
        for name in ("prefill", "quantize", "quantize_head"):
            choices, given = CHOICES[name], getattr(self, name)
            if given not in choices:
                raise ConfigError(f"the worker's argument {name} must be one of {', '.join(choices)}, got {given!r}")
