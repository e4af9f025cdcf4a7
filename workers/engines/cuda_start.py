"""A GPU rank's weights, kernel and prefill. With `--prefill auto` a rank goes on without prefill where that cannot start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kog_dist.errors import AbortedError, CheckpointError, LaunchError
from kog_dist.workers.notes import note

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.arguments import WorkerArgs
    from kog_dist.workers.cuda.head_start import LastStreams
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel
    from kog_dist.workers.engines.launches import Kernel
    from kog_dist.workers.prefill.peer_exchange import PeerExchange

_CAUSE_CHARACTERS = 300
_REFUSED, _REMEDY = "prefill cannot start: ", "; with --prefill off prompts go token by token"


class Prefiller(Protocol):
    """What the engine needs of `prefill.Prefill`."""

    def run(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool],
        on_progress: Callable[[int], None],
        on_queued: Callable[[], None],
    ) -> int:
        """Fill the kernel's KV cache behind the first `start` tokens; returns how many it holds then. `on_queued` is called when
        `streams` are queued; they are valid if all tokens are held in the end.
        """

    @property
    def streams(self) -> LastStreams:
        """Those of the last token given to `run`."""

    def forget(self, position: int) -> None:
        """The kernel writes its KV cache from `position` on, without prefill."""


@dataclass(frozen=True)
class Start:
    """What a rank is started with. `link` maps the peers' memory, with room for blocks of so many tokens; None: no peers."""

    args: WorkerArgs
    shape: KernelShape
    checkpoint: Checkpoint
    masks: Any
    limit_us: int  # of the kernel's waits
    link: Callable[[int], CudaHeap | None]
    sums: Callable[[float], PeerExchange] | None  # the exchange of prefill whose waits are bounded by so many seconds

    def load(self) -> tuple[Kernel, Prefiller | None]:
        """The kernel, and prefill if it is wanted and can be had. Raises CheckpointError, CompileError or LaunchError."""
        args = self.args
        if args.prefill == "off" or (args.prefill == "auto" and args.info.world_size > 1):
            return self.without_prefill(), None
        cause = obstacle(self.shape)
        if not cause:
            try:
                return self.with_prefill()
            except (AbortedError, CheckpointError):
                raise
            except Exception as error:
                if args.prefill == "on":
                    if type(error).__name__ == "OutOfMemoryError":  # also of weights and kernel, which had less room
                        raise refusal(cause_of(error)) from error
                    raise
                cause = cause_of(error)
            free_memory()  # not within the handler: its traceback holds on to what has been made
        if args.prefill == "on":
            raise refusal(cause)
        note(f"prompts go token by token, since prefill cannot start: {cause}")
        return self.without_prefill(), None

    def without_prefill(self) -> Kernel:
        """The kernel alone."""
        from kog_dist.workers.cuda.load import load_weights

        return self._kernel(load_weights(self.shape, self.checkpoint), 0)

    def with_prefill(self) -> tuple[Kernel, Prefiller]:
        """Both. Errors of prefill's own are `LaunchError`s that name it."""
        from kog_dist.workers.cuda.load import load_weights
        from kog_dist.workers.prefill import gpu
        from kog_dist.workers.prefill.blocks import BLOCK_SIZES

        with _of_prefill():
            matrices, observe = gpu.matrices_for(self.shape)

        def show(name: str, words: Any) -> None:
            with _of_prefill():
                observe(name, words)

        weights = load_weights(self.shape, self.checkpoint, show)
        with _of_prefill():
            gpu.release_unused()
        kernel = self._kernel(weights, max(BLOCK_SIZES))
        try:
            with _of_prefill():
                exchange = None if self.sums is None else self.sums(self.limit_us / 1e6)
                return kernel, gpu.prefill_for(kernel, matrices, exchange=exchange)
        except BaseException:
            kernel.close()
            raise

    def _kernel(self, weights: Any, prefill_tokens: int) -> Monokernel:
        from kog_dist.workers.cuda.monokernel import Monokernel

        options: Any = {"shaped": True, "masks": self.masks}
        heap = self.link(prefill_tokens)
        return Monokernel(self.shape, weights, rank=self.args.info.rank, wait_limit_us=self.limit_us, heap=heap, **options)


def obstacle(shape: KernelShape) -> str:
    """Why this rank cannot have prefill, as far as that can be said before anything is made; empty if it may."""
    from kog_dist.workers.prefill import gpu
    from kog_dist.workers.prefill.buffers import misfit

    finding = misfit(shape.spec)
    return f"the model has {finding}" if finding else gpu.obstacle_in_torch()


def refusal(cause: str) -> LaunchError:
    """What a rank says that was told `--prefill on`."""
    return LaunchError(f"{_REFUSED}{cause}{_REMEDY}")


def cause_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()).removeprefix(_REFUSED).removesuffix(_REMEDY)[:_CAUSE_CHARACTERS]
    return text if isinstance(error, LaunchError) else f"{type(error).__name__}: {text}"


def free_memory() -> None:
    """Give back GPU memory that nobody uses any more."""
    import cupy

    from kog_dist.workers.prefill import gpu

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    gpu.release_unused()


@contextmanager
def _of_prefill() -> Iterator[None]:
    try:
        yield
    except AbortedError:
        raise
    except Exception as error:
        raise refusal(cause_of(error)) from error
