"""`run`: trains a Laneformer, in one go or in pieces that resume where the last one stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec
from kog_dist.train.display import duration
from kog_dist.train.distributed import Ranks
from kog_dist.train.execution import apply_determinism, faster_windows, with_windows
from kog_dist.train.model import Residual, TrainingModel
from kog_dist.train.optimizers import Optimizers
from kog_dist.train.repetition import with_loops
from kog_dist.train.schedule import learning_rate_factor
from kog_dist.train.settings import Execution, RunSettings, with_defaults
from kog_dist.train.state import load_progress, load_tensors, save_state, tensors_digest
from kog_dist.train.step_graph import StepGraph
from kog_dist.train.tokens import TokenSet

RATE_STEPS = 40  # steps over which the speed is measured before the number of steps is fixed
_CLOCK_STEPS = 10  # between two looks at the clock
Advanced = Callable[[int, int | None, float], None]  # step, steps in all if known, tokens per second


class _Loss(nn.Module):
    """The loss of rows (batch, time + 1) as a module, for data parallel wrappers."""

    def __init__(self, model: TrainingModel, autocast: bool, penalises_loops: bool) -> None:
        super().__init__()
        self.model, self.autocast, self.penalises_loops = model, autocast, penalises_loops

    def forward(self, rows: Tensor, before: Tensor | None = None) -> Tensor:
        """Mean loss in nats per token. before: of `with_loops`, for rows that have some."""
        if self.penalises_loops and before is None:  # so that all steps and held-out losses share one graph
            before = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.autocast):
            return self.model.loss(rows[:, :-1], rows[:, 1:], None if before is None else before[:, 1:] - 1)


class Run:
    """One training run: the model, its optimizers and its tokens on the device of this rank."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: RunSettings,
        tokens: Path | TokenSet,
        *,
        ranks: Ranks | None = None,
        execution: Execution | None = None,
        residual: Residual = Residual.LANES,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`tokens`: what `prepare` wrote, or that already loaded. `start`: weights to begin with instead of random ones."""
        self.spec, self.settings = spec, settings
        self.ranks = ranks or Ranks(0, 1, torch.device("cpu"))
        self.execution = execution or Execution()
        device = self.ranks.device
        apply_determinism(self.execution, device)
        self.tokens = tokens if isinstance(tokens, TokenSet) else TokenSet.load(tokens, settings.time, device)
        self.tokens.check_fits(spec.vocab_size)
        self.module = TrainingModel(spec, seed=settings.seed, residual=residual)
        self.start_digest = None if start is None else tensors_digest(start)
        if start is not None:
            self.module.load_state_dict(start)
        self.module.to(device)
        self.optimizers = Optimizers(
            self.module,
            settings.optimizer,
            learning_rate=settings.learning_rate,
            adam_learning_rate=settings.adam_learning_rate,
            weight_decay=settings.weight_decay,
        )
        if self.execution.compiled:
            self.module.compile_layers()
        autocast = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
        self._loss = _Loss(self.module, autocast, settings.repetition_share > 0)
        self.windows = with_windows(self.module, self.execution.windows, settings.time)
        self._parallel_loss = self.ranks.wrap(self._loss)
        self._share = self.ranks.share(settings.batch)
        self.step_idx = 0
        self.num_steps = settings.num_steps
        self.trained_s = 0.0
        self.losses: list[tuple[int, float]] = []  # (step, mean training loss since the last entry)
        self.held_out_losses: list[tuple[int, float]] = []
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # of the steps since the last entry
        self._num_summed = 0
        self._computed_step: Callable[..., None] = self._compute_step
        if self.execution.cuda_graph and device.type == "cuda" and self.ranks.world_size == 1:
            self._computed_step = StepGraph(self._compute_step)

    # ---- steps ----
    def learning_rate_factor(self, step_idx: int) -> float:
        """Share of the full learning rate at a step."""
        settings = self.settings
        return learning_rate_factor(
            step_idx,
            self.num_steps,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            decay_share=settings.decay_share,
        )

    @property
    def is_decaying(self) -> bool:
        """Whether the next step is one of the last `decay_share` of all steps."""
        return self.num_steps is not None and self.num_steps - self.step_idx <= int(self.num_steps * self.settings.decay_share)

    def drawn_rows(self) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of the next step, by (seed, step), and what `with_loops` gives with them if some may be loops."""
        settings = self.settings
        functions, loops = (
            round(settings.batch * share * self.is_decaying) for share in (settings.function_share, settings.repetition_share)
        )
        of_functions = loops // 2 if functions else 0  # half of the loops are made of functions
        rows = self.tokens.drawn(settings.batch, settings.time, settings.seed, self.step_idx, functions + of_functions)
        rows = rows.roll(of_functions, 0)
        if settings.repetition_share == 0:
            return rows[self._share], None
        draw = np.random.default_rng((settings.seed, self.step_idx, 1))
        rows, before = with_loops(rows, loops, draw)
        return rows[self._share], before[self._share]

    def train_step(self) -> None:
        """One optimizer step. Collective."""
        rows, before = self.drawn_rows()
        self.optimizers.set_rates(self.learning_rate_factor(self.step_idx))
        self._computed_step(rows, before)
        self._num_summed += 1
        self.step_idx += 1

    def _compute_step(self, rows: Tensor, before: Tensor | None) -> None:
        loss = self._parallel_loss(rows, before)
        loss.backward()
        self.optimizers.step()
        self._loss_sum += loss.detach()

    def held_out_loss(self, num_batches: int | None = None) -> float:
        """Mean loss per token in nats over evenly spaced held-out rows, by default as many as the settings say. Collective.

        Same shape and gradient mode as a training step, so that it needs no compilation of its own.
        """
        settings = self.settings
        num_batches = num_batches or settings.held_out_batches
        rows = self.tokens.spaced(settings.batch * num_batches, settings.time)
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        for batch in rows.view(num_batches, settings.batch, -1):
            total += self._loss(batch[self._share]).detach()
        return float(self.ranks.mean(total)) / num_batches

    def train(
        self,
        *,
        call_seconds: float = math.inf,
        report: Callable[[str], None] = print,
        report_every: int = 200,
        advanced: Advanced | None = None,
        stop: Callable[[], bool] = lambda: False,
        save_to: Path | None = None,
        save_seconds: float = 120.0,
    ) -> bool:
        """Train until the last step (returns True), or until `call_seconds` have passed or `stop` says so (False). Collective.

        report_every: steps between two entries of the loss curves. advanced: told now and then how far it is. save_to: folder
        that the state is saved to every `save_seconds`, and at the end.
        """
        if self.windows == "auto" and not (self.num_steps is not None and self.step_idx >= self.num_steps):
            self._measure_windows(report)
        called = saved = rate_from = time.perf_counter()
        first_step = rate_step = self.step_idx
        trained_before = self.trained_s
        while self.num_steps is None or self.step_idx < self.num_steps:
            self.train_step()
            in_call = self.step_idx - first_step
            if in_call == RATE_STEPS * 3 // 2:
                self._fix_num_steps(rate_from, trained_before - called, report)
            if self.step_idx % report_every == 0 or self.step_idx == self.num_steps:
                rate = self._tokens_per_s(time.perf_counter() - rate_from, self.step_idx - rate_step)
                self._report(rate, time.perf_counter() - called, report)
            if in_call == RATE_STEPS // 2:  # compilation is over
                self._wait_for_device()
                rate_from, rate_step = time.perf_counter(), self.step_idx
            if in_call % _CLOCK_STEPS == 0:
                now = time.perf_counter()
                if advanced is not None and self.step_idx > rate_step:
                    advanced(self.step_idx, self.num_steps, self._tokens_per_s(now - rate_from, self.step_idx - rate_step))
                if self.ranks.from_first(now - called > call_seconds or stop()):
                    break
                if save_to is not None and self.ranks.from_first(now - saved > save_seconds):
                    self.trained_s = trained_before + now - called
                    self.save(save_to)
                    saved = now
        self._wait_for_device()
        self.trained_s = trained_before + time.perf_counter() - called
        if save_to is not None:
            self.save(save_to)
        return self.step_idx == self.num_steps

    def _measure_windows(self, report: Callable[[str], None]) -> None:
        settings = self.settings
        rows = self.tokens.drawn(settings.batch, settings.time, settings.seed, 0)[self._share]
        self.windows, times_s = faster_windows(self.module, lambda: self._loss(rows), self.ranks)
        report(f"windowed layers: {self.windows} ({', '.join(f'{key} {s * 1e3:.1f} ms' for key, s in times_s.items())})")

    def _tokens_per_s(self, elapsed_s: float, num_steps: int) -> float:
        return self.settings.batch * self.settings.time * num_steps / elapsed_s

    def _fix_num_steps(self, rate_from: float, since: float, report: Callable[[str], None]) -> None:
        """since: what the clock has to be added to for the seconds of training so far."""
        self._wait_for_device()
        now = time.perf_counter()
        step_s = self.ranks.from_first((now - rate_from) / RATE_STEPS)
        if self.num_steps is None:
            left_s = self.ranks.from_first(self.settings.train_seconds - (now + since))
            self.num_steps = max(2 * RATE_STEPS, self.step_idx + int(left_s / step_s))
        report(f"{step_s * 1e3:.1f} ms per step, {self._tokens_per_s(step_s, 1):,.0f} tokens/s, {self.num_steps} steps in all")

    def _report(self, tokens_per_s: float, elapsed_s: float, report: Callable[[str], None]) -> None:
        loss = float(self.ranks.mean(self._loss_sum)) / self._num_summed
        self._loss_sum.zero_()
        self._num_summed = 0
        if not math.isfinite(loss):
            raise ConfigError(f"the training loss is {loss} at step {self.step_idx}; start again with a lower --lr")
        held_out = self.held_out_loss()
        self.losses.append((self.step_idx, round(loss, 5)))
        self.held_out_losses.append((self.step_idx, round(held_out, 5)))
        left_s = math.inf
        if self.num_steps is not None and tokens_per_s > 0:
            left_s = (self.num_steps - self.step_idx) * self.settings.batch * self.settings.time / tokens_per_s
        report(
            f"step {self.step_idx}/{self.num_steps} loss {loss:.4f} held-out {held_out:.4f}; {duration(elapsed_s)}, "
            f"{tokens_per_s:,.0f} tokens/s, {duration(left_s)} left"
        )

    def _wait_for_device(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def close(self) -> None:
        """Give back what a CUDA graph holds; steps cannot follow."""
        if isinstance(self._computed_step, StepGraph):
            self._computed_step.close()

    # ---- state ----
    def save(self, folder: Path) -> None:
        """Write everything that `resume` needs; rank 0 does it."""
        sums = {"loss_sum": self.ranks.mean(self._loss_sum)}
        if self.ranks.is_first:
            moments = {**self.optimizers.state(), **sums}
            save_state(folder, self.progress(), {"weights": self.module.state_dict(), "moments": moments})

    def progress(self) -> dict[str, Any]:
        """What the run has done so far, as JSON."""
        return {
            "spec": self.spec.to_config(),
            "settings": asdict(self.settings),
            "residual": self.module.residual.value,
            "start_digest": self.start_digest,
            "windows": self.windows,
            "step": self.step_idx,
            "num_steps": self.num_steps,
            "trained_tokens": self.step_idx * self.settings.batch * self.settings.time,
            "num_unique_tokens": len(self.tokens.train),
            "trained_seconds": round(self.trained_s, 1),
            "num_processes": self.ranks.world_size,
            "losses": self.losses,
            "held_out_losses": self.held_out_losses,
            "num_summed": self._num_summed,
        }

    def resume(self, folder: Path) -> bool:
        """Continue a saved run; False if there is none. Raises ConfigError if it was another model or had other settings."""
        progress = load_progress(folder)
        if progress is None:
            return False
        progress["settings"] = with_defaults(progress["settings"])
        now = json.loads(json.dumps(self.progress()))
        for key in ("spec", "settings", "residual", "start_digest"):
            if progress[key] != now[key]:
                raise ConfigError(
                    f"{folder} holds a run with {key} {progress[key]}, now asked for: {now[key]}; use another folder"
                )
        if self.windows == "auto" and progress["windows"] != "auto":  # measured when the run began
            self.windows = progress["windows"]
            self.module.window_mask = self.module.window_mask if self.windows == "flex" else None
        self.module.load_state_dict(load_tensors(folder, "weights"))
        moments = load_tensors(folder, "moments")
        self._loss_sum.copy_(moments.pop("loss_sum"))
        self._num_summed = progress["num_summed"]
        if progress["step"] > 0:
            self.optimizers.load_state(moments)
        self.step_idx, self.num_steps, self.trained_s = progress["step"], progress["num_steps"], progress["trained_seconds"]
        self.losses = [(int(step), float(loss)) for step, loss in progress["losses"]]
        self.held_out_losses = [(int(step), float(loss)) for step, loss in progress["held_out_losses"]]
        return True
