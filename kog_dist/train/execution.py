"""How a run is computed: kernels that repeat bits, and the measured choice between two ways to compute windows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kog_dist.errors import ConfigError
from kog_dist.train.distributed import Ranks
from kog_dist.train.model import TrainingModel
from kog_dist.train.settings import Execution

_WARM_UP, _MEASURED = 3, 5  # forward and backward passes


def apply_determinism(execution: Execution, device: torch.device) -> None:
    """For CUDA, tell torch and cuBLAS whether only deterministic kernels may be used; CPU kernels repeat their bits anyway.

    An operation without a deterministic kernel is then an error of torch. (Told only to warn, attention would keep its
    kernels that do not repeat.)
    """
    if device.type != "cuda":
        return
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # filling every new tensor costs a pass over memory and decides nothing here
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(execution.deterministic)


def with_windows(model: TrainingModel, windows: str, row_time: int) -> str:
    """Prepare `model` for `windows`; returns it, or `sdpa` if `auto` has nothing to choose from.

    Raises ConfigError if flex attention is asked for on the CPU.
    """
    on_cuda = model.cos.is_cuda
    if windows == "auto" and not (on_cuda and model.spec.window_layers):
        return "sdpa"
    if windows == "flex":
        if not on_cuda:
            raise ConfigError("flex attention is trained on CUDA only; use windows sdpa")
        model.use_flex_windows(row_time)
    elif windows == "auto":
        model.use_flex_windows(row_time)
    return windows


def faster_windows(model: TrainingModel, loss: Callable[[], Tensor], ranks: Ranks) -> tuple[str, dict[str, float]]:
    """Time forward and backward passes of `loss` both ways, leave `model` with the faster one; returns it and the seconds."""
    flex_mask = model.window_mask
    times_s = {}
    for name, mask in (("sdpa", None), ("flex", flex_mask)):
        model.window_mask = mask
        for count in range(_WARM_UP + _MEASURED):
            if count == _WARM_UP:
                torch.cuda.synchronize()
                start = time.perf_counter()
            loss().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times_s[name] = ranks.from_first((time.perf_counter() - start) / _MEASURED)
    for parameter in model.parameters():
        parameter.grad = None
    chosen = min(times_s, key=lambda name: times_s[name])
    model.window_mask = flex_mask if chosen == "flex" else None
    return chosen, times_s
