"""What a training run may start from: a model folder in the published form, with another delay if that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import write_checkpoint


def start_weights(folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Spec and weights (float32, CPU, under the names of `Laneformer.state_dict()`) of a published folder.

    Raises CheckpointError as `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(folder)
    return checkpoint.spec, {name: torch.from_numpy(checkpoint.tensor(name)) for name in checkpoint.layouts}


def write_start(folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that `start_weights` reads back without a changed bit: float32."""
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
    write_checkpoint(folder, spec, arrays, dtype="float32")


def healing_start(spec: ModelSpec, delay: int) -> ModelSpec:
    """The spec of the same weights with delayed reductions, to be trained until they fit it.

    The shapes of tensors do not depend on the delay, but the function does: layers from `delay` on see the other lanes' outputs
    `delay` layers late, and the last `delay` layers' outputs reach only their own lane. Raises ConfigError unless `spec` has
    delay 0 and `delay` is positive and below the number of layers.
    """
    if spec.delay != 0:
        raise ConfigError(f"healing starts from a model of delay 0, this one has delay {spec.delay}")
    if not 0 < delay < spec.num_layers:
        raise ConfigError(f"the delay to heal to must be from 1 to {spec.num_layers - 1}, got {delay}")
    return replace(spec, delay=delay)
