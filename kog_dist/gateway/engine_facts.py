"""What an engine serves, reads for one token and runs on: from the model's folder and from what it says of its ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kog_dist.errors import KogError
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.hardware.gpus import Gpu
from kog_dist.model.gguf.folder import main_format
from kog_dist.model.published_config import read_config_file
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.messages import StatusReport

CPU_WEIGHT_BYTES = 4  # CPU ranks keep weights as float32
GPU_WEIGHT_BYTES = 2  # GPUs as they are on disk: 16 bit


def read_spec(folder: str | None, quantize: str = "none") -> ModelSpec | None:
    """The model's shape; None where nobody told the folder, or it has no config.json of a model that we know.

    `quantize`: as in `LaunchConfig`.
    """
    if folder is None:
        return None
    try:
        return read_config_file(Path(folder)).spec_to_run(0, quantize)
    except KogError:
        return None  # a folder with a tokenizer alone serves a gateway as well


def has_codes(folder: str | None, quantize: str = "none", quantize_head: str = "none") -> bool:
    """Whether weights are quantised, as published or while they are loaded."""
    if folder is None:
        return False
    try:
        return {quantize, quantize_head} != {"none"} or read_config_file(Path(folder)).quantisation is not None
    except KogError:
        return False


def read_format(folder: str | None) -> str | None:
    """How most of the model's values are stored: bfloat16, or Q4_K of a GGUF file. None where the folder does not say."""
    if folder is None:
        return None
    try:
        return main_format(Path(folder)) or read_config_file(Path(folder)).dtype
    except KogError:
        return None


def devices(report: StatusReport) -> dict[str, int]:
    """Names of the ranks' devices, with how many of each there are; a router does not say its replicas'."""
    if report.rank_places:
        names = (re.match(r"GPU \d+ \((.+), GPU-", place) for place in report.rank_places)
        return dict(Counter("GPU" if name is None else name[1] for name in names))
    return {"CPU": report.world_size} if report.world_size and not report.replica_names else {}


def engine_facts(
    max_context: int, spec: ModelSpec | None, report: StatusReport, gpus: Sequence[Gpu], *, has_codes: bool = False
) -> EngineFacts:
    """Facts of one engine; of one of them where a router speaks for several. `gpus`: those of this machine.

    The peak is known only if every rank has a GPU that is here and tells its memory's clock; what a token reads is not where
    the model `has_codes`.
    """
    if spec is None or not report.world_size or has_codes:
        return EngineFacts(max_context)
    places = report.rank_places  # only ranks on GPUs say theirs
    bytes_per_token = spec.bytes_per_token(GPU_WEIGHT_BYTES if places else CPU_WEIGHT_BYTES)
    num_ranks = report.world_size // max(1, len(report.replica_names))
    peaks = [gpu.peak_bytes_s for place in places for gpu in gpus if place.startswith(str(gpu))]
    if not places or len(peaks) != len(places) or not all(peaks):
        return EngineFacts(max_context, bytes_per_token)
    source = f"{num_ranks} x memory clock x bus width (NVML)" if num_ranks > 1 else "memory clock x bus width (NVML)"
    return EngineFacts(max_context, bytes_per_token, num_ranks * min(peaks), source)
