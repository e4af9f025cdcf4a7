"""What logits processors cost: the kernel's time per token with kinds of sampling, beside greedy decoding in the same run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kog_dist.bench.kernel.token_times import token_times_us
from kog_dist.bench.report import percentile
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.masks import MaskSlots, num_words
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest

# By name: temperature and seed, and what a request asks for besides; None: the plain build.
SAMPLINGS: dict[str, tuple[SamplingParams, ProcessedRequest | None]] = {
    "greedy": (SamplingParams(), None),
    "temperature": (SamplingParams(0.8, 7), None),
    "penalties": (SamplingParams(), ProcessedRequest(SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1))),
    "top-p": (SamplingParams(0.8, 7), ProcessedRequest(SamplingParams(top_p=0.9))),
    "top-p-logprobs": (SamplingParams(0.8, 7), ProcessedRequest(SamplingParams(top_p=0.9, logprobs=5))),
    "top-k-top-p": (SamplingParams(0.8, 7), ProcessedRequest(SamplingParams(top_p=0.9, top_k=50))),
    "mask": (SamplingParams(), ProcessedRequest(mask_epoch=1)),
}
_STEP_S = 2.0  # after which the writer gives up on a token


class MaskWriter:
    """Plays the grammar process: every mask allows all ids, and is written when the token before it is there."""

    def __init__(self, masks: MaskSlots, kernel: Monokernel, first_epoch: int) -> None:
        self._masks, self._kernel, self._epoch = masks, kernel, first_epoch
        self._thread = threading.Thread(target=self._write)
        self._ends = False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def _write(self) -> None:
        mask = np.full(num_words(self._masks.vocab_size), 0xFFFFFFFF, np.uint32)
        index, deadline_s = 0, time.monotonic() + _STEP_S
        self._masks.put(self._epoch, mask)
        while not self._ends and time.monotonic() < deadline_s:
            if self._kernel.token(index) is None:
                time.sleep(0)
                continue
            index, deadline_s = index + 1, time.monotonic() + _STEP_S
            self._masks.put(self._epoch + index, mask)


def times_us(kernel: Monokernel, page: ControlPage, names: Sequence[str], context: int, tokens: int) -> dict[str, list[float]]:
    """By name of a sampling: the times of the steps of one launch. The kernel reads the masks of `page`, which has none yet."""
    times: dict[str, list[float]] = {}
    for place, name in enumerate(names):
        sampling, processed = SAMPLINGS[name]
        writer: object = nullcontext()
        if processed is not None and processed.mask_epoch:
            epoch = 1 + place * 2 * kernel.shape.spec.max_context
            processed, writer = ProcessedRequest(processed.sampling, epoch), MaskWriter(page.masks, kernel, epoch)
        times[name] = token_times_us(kernel, context, tokens, sampling, processed, during=writer)
    return times


def figures(times: dict[str, list[float]], context: int, **where: Any) -> list[dict[str, Any]]:
    """Print a line for each sampling; the same as figures. The first one is what the others are compared with."""
    base = percentile(next(iter(times.values())), 0.5)
    found = []
    for name, of_steps in times.items():
        median = percentile(of_steps, 0.5)
        figure = {
            **where,
            "context": context,
            "sampling": name,
            "us_per_token": round(median, 1),
            "mean_us": round(float(np.mean(of_steps)), 1),
            "p99_us": round(percentile(of_steps, 0.99), 1),
            "ratio": round(median / base, 4),
            "mean_ratio": round(float(np.mean(of_steps)) / base, 4),
        }
        found.append(figure)
        print(
            f"  {name:>15}, context {context:5}: {figure['us_per_token']:8.1f} us median, {figure['mean_us']:8.1f} mean, "
            f"{figure['p99_us']:8.1f} p99, {1e6 / median:8.1f} tokens/s, {figure['ratio']:.4f} (mean {figure['mean_ratio']:.4f}) "
            f"of {next(iter(times))}",
            flush=True,
        )
    return found
