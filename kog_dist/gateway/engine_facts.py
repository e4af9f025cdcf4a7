"""What an engine serves, reads for one token and runs on: from the model's folder and from what it says of its ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kog_dist.decode.cpu import cpu_weights
from kog_dist.errors import KogError
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.hardware.gpus import Gpu
from kog_dist.model import weight_bytes
from kog_dist.model.checkpoint import Checkpoint, has_weights, open_checkpoint, planned_checkpoint
from kog_dist.rpc.messages import StatusReport


def read_checkpoint(folder: str | None, quantize: str = "none", quantize_head: str = "none") -> Checkpoint | None:
    """The model of a folder, without its values; None where nobody told the folder, or it has no model that we know.

    Of a folder without weights what config.json says. `quantize`, `quantize_head`: as in `LaunchConfig`.
    """
    if folder is None:
        return None
    try:
        opens = open_checkpoint if has_weights(Path(folder)) else planned_checkpoint
        return opens(Path(folder), quantize=quantize, quantize_head=quantize_head)
    except KogError:
        return None  # a folder with a tokenizer alone serves a gateway as well


def devices(report: StatusReport) -> dict[str, int]:
    """Names of the ranks' devices, with how many of each there are; a router does not say its replicas'."""
    if report.rank_places:
        names = (re.match(r"GPU \d+ \((.+), GPU-", place) for place in report.rank_places)
        return dict(Counter("GPU" if name is None else name[1] for name in names))
    return {"CPU": report.world_size} if report.world_size and not report.replica_names else {}


def engine_facts(max_context: int, checkpoint: Checkpoint | None, report: StatusReport, gpus: Sequence[Gpu]) -> EngineFacts:
    """Facts of one engine; of one of them where a router speaks for several. `gpus`: those of this machine.

    The peak is known only if every rank has a GPU that is here and tells its memory's clock.
    """
    num_ranks = report.world_size // max(1, len(report.replica_names))
    if checkpoint is None or not num_ranks or checkpoint.spec.num_lanes % num_ranks:
        return EngineFacts(max_context)
    places = report.rank_places  # only ranks on GPUs say theirs
    bytes_per_token = weight_bytes.bytes_per_token(checkpoint) if places else cpu_weights.bytes_per_token(checkpoint, num_ranks)
    peaks = [gpu.peak_bytes_s for place in places for gpu in gpus if place.startswith(str(gpu))]
    if not places or len(peaks) != len(places) or not all(peaks):
        return EngineFacts(max_context, bytes_per_token)
    source = f"{num_ranks} x memory clock x bus width (NVML)" if num_ranks > 1 else "memory clock x bus width (NVML)"
    return EngineFacts(max_context, bytes_per_token, num_ranks * min(peaks), source)
