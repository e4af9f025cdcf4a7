"""Muon: momentum whose update is orthogonalised, for the lanes' matrices; everything else is left to AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz iteration of Keller Jordan's Muon
_RMS = 0.2  # root mean square of an AdamW update; makes one learning rate fit both optimizers


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Each of `matrices` (count, rows, columns) with its singular values moved to about 1, in bfloat16 on CUDA, else float32."""
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon:
    """Updates per-lane matrices (lanes, out, in); every lane's matrix is one operator of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self.parameters = list(parameters)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._groups: dict[torch.Size, list[int]] = defaultdict(list)
        for index, parameter in enumerate(self.parameters):
            self._groups[parameter.shape].append(index)

    @torch.no_grad()
    def step(self, learning_rate: float | Tensor) -> None:
        """Update all matrices from their gradients (Nesterov momentum, decoupled weight decay).

        learning_rate: a number, or a tensor of shape () on the parameters' device.
        """
        for shape, members in self._groups.items():
            parameters: list[Tensor] = [self.parameters[i] for i in members]
            buffers = [self.buffers[i] for i in members]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
            updates = torch.cat(torch._foreach_lerp(gradients, buffers, self.momentum))
            scale = -learning_rate * _RMS * max(shape[-2:]) ** 0.5
            steps = (orthogonalise(updates).float() * scale).to(parameters[0].dtype).split(shape[0])
            torch._foreach_mul_(parameters, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(parameters, list(steps))
