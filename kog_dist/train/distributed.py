"""Data parallel training: one process per GPU (or several on the CPU), as `torchrun` starts them."""

from __future__ import annotations

import gc
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # while there is no group: its functions keep the one of that moment as a default
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kog_dist.errors import ConfigError
from kog_dist.records import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one model together; alone when it was not started by torchrun."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process saves and reports."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean of every rank's `value`, on all ranks. Collective."""
        if self.world_size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world_size

    def from_first(self, value: float) -> float:
        """What rank 0 passed, on all ranks. Collective."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module`, with its gradients averaged over the ranks during the backward pass."""
        if self.world_size == 1:
            return module
        own_gpu = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=own_gpu, gradient_as_bucket_view=True)

    def share(self, batch: int) -> slice:
        """This rank's rows of a batch. Raises ConfigError if the batch cannot be divided."""
        if batch % self.world_size:
            raise ConfigError(f"a batch of {batch} rows cannot be divided among {self.world_size} ranks; choose a multiple")
        rows = batch // self.world_size
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def close(self) -> None:
        """Leave the group and end its threads; whoever has wrapped a module has let go of it. Collective.

        A thread of gloo that still gives back a tensor while Python ends aborts the process ("terminate called without an active
        exception"). They are joined when nobody holds the group any more.
        """
        if self.world_size > 1:
            gc.collect()
            dist.barrier()  # nobody takes its connections away while another still ends a collective
            dist.destroy_process_group()


def one_device(device: str) -> Ranks:
    """This process alone. Raises ConfigError if CUDA is asked for and there is none, and for what is no device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    place = torch.device(device)
    if place.index is not None and place.type == "cuda":
        torch.cuda.set_device(place)  # streams and graphs are made on the current one
    return Ranks(0, 1, place)


def join_ranks(device: str) -> Ranks:
    """The ranks that torchrun's environment names (RANK, WORLD_SIZE, LOCAL_RANK): NCCL on GPUs, gloo on the CPU.

    Collective. Raises ConfigError if CUDA is asked for and there is none.
    """
    alone = one_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return alone
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else alone.device
    if place.type == "cuda":
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), place)
