"""`run`: trains a Laneformer, in one go or in pieces that resume where the last one stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kog_dist.errors import ConfigError
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.spec import ModelSpec
from kog_dist.train.muon import Muon
from kog_dist.train.state import load_progress, load_tensors, save_progress, save_tensors

_RATE_STEPS = 40  # steps over which the speed is measured before the number of steps is fixed


@dataclass(frozen=True)
class RunSettings:
    """What decides the outcome of a run; kept with its state and compared when it resumes.

    num_steps: optimizer steps in all; None = as many as fit into `train_seconds`, by the speed of the first steps.
    decay_share: last part of the steps, in which the learning rate falls linearly to zero.
    """

    num_steps: int | None = None
    train_seconds: float = 1200.0
    batch: int = 128
    time: int = 2048
    learning_rate: float = 5e-3
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_share: float = 0.4
    seed: int = 0


class Run:
    """One training run: the model, its optimizers and the data, on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: RunSettings,
        data: Path,
        *,
        device: str = "cpu",
        compiled: bool = False,
        flex: bool = False,
    ) -> None:
        self.spec, self.settings, self.device = spec, settings, torch.device(device)
        self.tokens = _load_tokens(sorted(data.glob("train-*.npy")), settings.time, self.device)
        self.held_out = _load_tokens([data / "held_out.npy"], settings.time, self.device)
        self.module = Laneformer(spec, seed=settings.seed).to(self.device)
        if flex:
            self.module.use_flex_windows(settings.time)
        named = dict(self.module.named_parameters())
        self._matrix_names = [name for name, p in named.items() if p.ndim == 3 and name.startswith("model.layers.")]
        self._other_names = [name for name in named if name not in self._matrix_names]
        self.muon = Muon([named[name] for name in self._matrix_names], weight_decay=settings.weight_decay)
        self.adam = torch.optim.AdamW(
            [named[name] for name in self._other_names], lr=settings.adam_learning_rate, betas=(0.9, 0.95), eps=1e-10,
            weight_decay=0.01, fused=self.device.type == "cuda",
        )  # fmt: skip
        self._loss: Callable[[Tensor], Tensor] = torch.compile(self._plain_loss, dynamic=False) if compiled else self._plain_loss
        self.step_idx = 0
        self.num_steps = settings.num_steps
        self.trained_s = 0.0
        self.losses: list[tuple[int, float]] = []  # (step, training loss)
        self.held_out_losses: list[tuple[int, float]] = []

    def _plain_loss(self, token_ids: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.module(token_ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())

    def learning_rate_factor(self, step_idx: int) -> float:
        """Share of the full learning rate: linear warm-up, flat, linear decay to zero."""
        num_steps = self.num_steps or 10**9
        decay = max(1, int(num_steps * self.settings.decay_share))
        return min(1.0, (step_idx + 1) / self.settings.warmup_steps, (num_steps - step_idx) / decay)

    def train_step(self) -> Tensor:
        """One optimizer step on rows drawn by (seed, step); returns the loss, still on the device."""
        settings = self.settings
        draw = np.random.default_rng((settings.seed, self.step_idx))
        starts = torch.from_numpy(draw.integers(0, len(self.tokens) - settings.time, settings.batch)).to(self.device)
        loss = self._loss(_rows(self.tokens, starts, settings.time))
        loss.backward()  # type: ignore[no-untyped-call]
        factor = self.learning_rate_factor(self.step_idx)
        self.muon.step(settings.learning_rate * factor)
        self.adam.param_groups[0]["lr"] = settings.adam_learning_rate * factor
        self.adam.step()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.step_idx += 1
        return loss.detach()

    def held_out_loss(self) -> float:
        """Mean loss per token in nats over one batch of evenly spaced rows of the held-out tokens.

        Same shape and gradient mode as a training step, so that it needs no compilation of its own.
        """
        last = len(self.held_out) - self.settings.time - 1
        starts = torch.linspace(0, last, self.settings.batch, device=self.device).long()
        return float(self._loss(_rows(self.held_out, starts, self.settings.time)).detach())

    def train(self, *, call_seconds: float = math.inf, report: Callable[[str], None] = print, report_every: int = 200) -> bool:
        """Train until the last step (returns True) or until `call_seconds` from now have passed (False)."""
        called = rate_from = time.perf_counter()
        first_step = self.step_idx
        recent: list[Tensor] = []
        while self.num_steps is None or self.step_idx < self.num_steps:
            recent.append(self.train_step())
            in_call = self.step_idx - first_step
            if in_call == _RATE_STEPS // 2:  # compilation is over
                float(recent[-1])
                rate_from = time.perf_counter()
            elif in_call == _RATE_STEPS * 3 // 2:
                float(recent[-1])
                self._fix_num_steps((time.perf_counter() - rate_from) / _RATE_STEPS, report)
            if self.step_idx % report_every == 0 or self.step_idx == self.num_steps:
                self._report(recent, called, report)
                recent.clear()
            if in_call % 10 == 0 and time.perf_counter() - called > call_seconds:
                break
        self.trained_s += time.perf_counter() - called
        return self.step_idx == self.num_steps

    def _fix_num_steps(self, step_s: float, report: Callable[[str], None]) -> None:
        tokens_per_s = self.settings.batch * self.settings.time / step_s
        if self.num_steps is None:
            self.num_steps = max(2 * _RATE_STEPS, int(self.settings.train_seconds / step_s))
        report(f"{step_s * 1e3:.1f} ms per step, {tokens_per_s:,.0f} tokens/s, {self.num_steps} steps in all")

    def _report(self, recent: Sequence[Tensor], called: float, report: Callable[[str], None]) -> None:
        loss = float(torch.stack(list(recent)).mean())
        if not math.isfinite(loss):
            raise ConfigError(f"the training loss is {loss} at step {self.step_idx}; start again with a lower --lr")
        held_out = self.held_out_loss()
        self.losses.append((self.step_idx, round(loss, 5)))
        self.held_out_losses.append((self.step_idx, round(held_out, 5)))
        elapsed = time.perf_counter() - called
        report(f"step {self.step_idx}/{self.num_steps} loss {loss:.4f} held-out {held_out:.4f} {elapsed:.0f} s")

    # ---- state ----
    def save(self, folder: Path) -> None:
        """Write everything that `resume` needs."""
        save_tensors(folder, "weights", self.module.state_dict())
        moments = {f"muon.{name}": buffer for name, buffer in zip(self._matrix_names, self.muon.buffers, strict=True)}
        for name, parameter in self._others():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                moments[f"adam.{key}.{name}"] = self.adam.state[parameter][key]
        save_tensors(folder, "moments", moments)
        save_progress(folder, self.progress())

    def progress(self) -> dict[str, Any]:
        """What the run has done so far, as JSON."""
        return {
            "spec": self.spec.to_config(),
            "settings": asdict(self.settings),
            "step": self.step_idx,
            "num_steps": self.num_steps,
            "trained_tokens": self.step_idx * self.settings.batch * self.settings.time,
            "num_unique_tokens": len(self.tokens),
            "trained_seconds": round(self.trained_s, 1),
            "losses": self.losses,
            "held_out_losses": self.held_out_losses,
        }

    def resume(self, folder: Path) -> bool:
        """Continue a saved run; False if there is none. Raises ConfigError if it was another model or had other settings."""
        progress = load_progress(folder)
        if progress is None:
            return False
        for key, now in (("spec", self.spec.to_config()), ("settings", asdict(self.settings))):
            if progress[key] != json.loads(json.dumps(now)):
                raise ConfigError(f"{folder} holds a run with {key} {progress[key]}, now asked for: {now}; use another folder")
        self.module.load_state_dict(load_tensors(folder, "weights"))
        moments = load_tensors(folder, "moments")
        for name, buffer in zip(self._matrix_names, self.muon.buffers, strict=True):
            buffer.copy_(moments[f"muon.{name}"])
        for name, parameter in self._others():
            state = {key: moments[f"adam.{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
            # a fused AdamW counts its steps on the device, the plain one on the CPU
            step_device = self.device if self.adam.param_groups[0]["fused"] else torch.device("cpu")
            self.adam.state[parameter] = {
                key: value.to(step_device if key == "step" else self.device) for key, value in state.items()
            }
        self.step_idx, self.num_steps, self.trained_s = progress["step"], progress["num_steps"], progress["trained_seconds"]
        self.losses = [(int(step), float(loss)) for step, loss in progress["losses"]]
        self.held_out_losses = [(int(step), float(loss)) for step, loss in progress["held_out_losses"]]
        return True

    def _others(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = dict(self.module.named_parameters())
        return [(name, named[name]) for name in self._other_names]


def _load_tokens(files: Sequence[Path], row_time: int, device: torch.device) -> Tensor:
    """Token ids of .npy shards, (count,) int32 on the device."""
    try:
        shards = [np.load(file, allow_pickle=False) for file in files]
        if not shards:
            raise FileNotFoundError("there are no train-*.npy")
    except (OSError, ValueError) as error:
        raise ConfigError(f"token shards cannot be read: {error}; run `python -m kog_dist.train prepare` first") from None
    num_tokens = sum(len(shard) for shard in shards)
    if num_tokens <= row_time + 1:
        raise ConfigError(f"{num_tokens} tokens are too few for rows of {row_time}; prepare more source or lower --time")
    return torch.from_numpy(np.concatenate(shards).astype(np.int32)).to(device)


def _rows(tokens: Tensor, starts: Tensor, row_time: int) -> Tensor:
    """Rows of `row_time` + 1 token ids from each start, int64 (batch, row_time + 1)."""
    return tokens[starts[:, None] + torch.arange(row_time + 1, device=tokens.device)].long()
