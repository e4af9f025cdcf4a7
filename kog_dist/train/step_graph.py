"""One training step as a CUDA graph: launching its thousand small kernels one by one takes longer than a small model computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_EAGER_STEPS = 3  # before the capture: compilation, the optimizers' state and cuBLAS are ready then


class StepGraph:
    """Runs `step` on inputs of one shape: the first times as it is, then as a graph of what it did.

    `step` must do all its work on the current stream, and read whatever changes from tensors that stay in place. All runs on a
    stream of its own that waits for the caller's, and that the caller's waits for.
    """

    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor | None, ...] = ()
        self._num_eager = 0

    def __call__(self, *inputs: Tensor | None) -> None:
        """One step. Inputs that are None the first time must be None always."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _run(self, inputs: tuple[Tensor | None, ...]) -> None:
        if self._num_eager < _EAGER_STEPS:
            self._num_eager += 1
            self._step(*inputs)
            return
        if self._graph is None:
            self._inputs = tuple(None if value is None else value.clone() for value in inputs)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._step(*self._inputs)
        for kept, value in zip(self._inputs, inputs, strict=True):
            if kept is not None and value is not None:
                kept.copy_(value)
        self._graph.replay()

    def close(self) -> None:
        """Give the graph's memory back."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph = None
