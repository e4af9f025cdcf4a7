"""The optimizers of a run as one: Muon for the lanes' matrices and AdamW for the rest, or AdamW for all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kog_dist.train.muon import Muon

OPTIMIZERS = ("muon", "adamw")
_ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")


class Optimizers:
    """Updates all parameters of a module from their gradients."""

    def __init__(
        self, module: nn.Module, kind: str, *, learning_rate: float, adam_learning_rate: float, weight_decay: float
    ) -> None:
        """Learning rate and weight decay are those of matrices in layers; the decay of all others is 0.01."""
        self.named = dict(module.named_parameters())
        matrices = [name for name, p in self.named.items() if p.ndim == 3 and name.startswith("model.layers.")]
        others = [name for name in self.named if name not in set(matrices)]
        self._muon_names = matrices if kind == "muon" else []
        self.learning_rate = learning_rate
        self.muon = Muon([self.named[name] for name in self._muon_names], weight_decay=weight_decay)
        groups = [{"params": [self.named[name] for name in others], "lr": adam_learning_rate, "weight_decay": 0.01}]
        if kind == "adamw":
            groups.append({"params": [self.named[name] for name in matrices], "lr": learning_rate, "weight_decay": weight_decay})
        self._adam_names = others if kind == "muon" else [*others, *matrices]
        self._full_rates = [float(group["lr"]) for group in groups]  # type: ignore[arg-type]
        device = next(module.parameters()).device
        self._fused = device.type == "cuda"
        self._muon_rate: float | Tensor = learning_rate
        if self._fused:  # in tensors: what a CUDA graph has captured reads them
            self._muon_rate = torch.full((), learning_rate, device=device)
            for group, rate in zip(groups, self._full_rates, strict=True):
                group["lr"] = torch.full((), rate, device=device)
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=self._fused, capturable=self._fused)

    def set_rates(self, factor: float) -> None:
        """From now on, `step` uses `factor` of the full learning rates."""
        if isinstance(self._muon_rate, Tensor):
            self._muon_rate.fill_(self.learning_rate * factor)
        else:
            self._muon_rate = self.learning_rate * factor
        for group, rate in zip(self.adam.param_groups, self._full_rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def step(self) -> None:
        """Update all parameters, and drop the gradients."""
        self.muon.step(self._muon_rate)
        self.adam.step()
        for parameter in self.named.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides the parameters."""
        moments = {f"muon.{name}": buffer for name, buffer in zip(self._muon_names, self.muon.buffers, strict=True)}
        for name in self._adam_names:
            for key, value in self.adam.state[self.named[name]].items():  # nothing before the first step
                moments[f"adam.{key}.{name}"] = value
        return moments

    def load_state(self, moments: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave after a step."""
        for name, buffer in zip(self._muon_names, self.muon.buffers, strict=True):
            buffer.copy_(moments[f"muon.{name}"])
        for name in self._adam_names:
            parameter = self.named[name]
            # a fused AdamW counts its steps on the device, the plain one on the CPU
            places = {key: parameter.device if key != "step" or self._fused else torch.device("cpu") for key in _ADAM_STATE}
            self.adam.state[parameter] = {key: moments[f"adam.{key}.{name}"].to(place) for key, place in places.items()}
