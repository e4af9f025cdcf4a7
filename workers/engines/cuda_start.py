"""A GPU rank's weights, kernel and prefill. With `--prefill auto` all ranks go without prefill where one cannot start it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from kog_dist.cuda.errors import is_out_of_memory
from kog_dist.errors import AbortedError, CheckpointError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.notes import Watch, note
from kog_dist.runtime.startup import NOBODY, StartStage, StartTeller

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap
    from kog_dist.cuda.device_array import DeviceArray
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.runtime.forced import ForcedSlot
    from kog_dist.runtime.masks import MaskSlots
    from kog_dist.workers.arguments import WorkerArgs
    from kog_dist.workers.cuda.device_weights import DeviceWeights
    from kog_dist.workers.cuda.head_start import LastStreams
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel
    from kog_dist.workers.prefill.base.matrices import Matrices
    from kog_dist.workers.prefill.exchange.peer_exchange import PeerExchange

_CAUSE_CHARACTERS = 300
_T = TypeVar("_T")
_REFUSED, _REMEDY = "prefill cannot start: ", "; with --prefill off prompts go token by token"


class Prefiller(Protocol):
    """What the engine needs of `prefill.Prefill`."""

    def steps(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool],
        on_progress: Callable[[int], None],
        on_queued: Callable[[], None],
        pauses: Callable[[], bool],
        cache: int = 0,
    ) -> Generator[None, None, int]:
        """Fill a KV cache of the kernel's behind the first `start` tokens; the generator's value is how many it holds then.
        `on_queued` is called when `streams` are queued; they are valid if all tokens are held in the end. Between two parts it
        stands still, as long as `pauses` says so.
        """

    @property
    def streams(self) -> LastStreams:
        """Those of the last token given to `steps`."""

    def next_end(self, start: int, num_tokens: int) -> int:
        """Where the chunk ends that `steps` begin with behind `start` of so many tokens."""

    def forget(self, position: int, cache: int = 0) -> None:
        """The kernel writes this KV cache from `position` on, without prefill."""


@dataclass(frozen=True)
class Start:
    """What a rank is started with. `link` maps the peers' memory, with room for chunks of so many tokens; None: no peers."""

    args: WorkerArgs
    shape: KernelShape
    checkpoint: Checkpoint
    masks: Sequence[MaskSlots]  # of each decode slot
    limit_us: int  # of the kernel's waits
    link: Callable[[int], CudaHeap | None]
    sums: Callable[[float], PeerExchange] | None  # the exchange of prefill whose waits are bounded by so many seconds
    tell: StartTeller = NOBODY  # what the rank does meanwhile
    forced: Sequence[ForcedSlot] | None = None  # of each decode slot, where requests with processors have drafts
    first_cause: Callable[[str], str] = str  # of all ranks, which call it together: one that is not empty; `str` for one rank

    def load(self) -> tuple[Monokernel, Prefiller | None]:
        """The kernel, and prefill if it is wanted and can be had. Raises CheckpointError, CompileError or LaunchError.

        Collective. With `auto` all ranks have prefill, or none: where one fails before the peers' memory is mapped, or when it
        has been, all go on without. One that cannot map it ends the engine.
        """
        from kog_dist.workers.prefill.base.chunks import sizes_within

        if self.args.prefill == "off":
            return self._without_prefill(partial(self.link, 0)), None
        watch = Watch()
        loaded: tuple[DeviceWeights, Matrices] | None = None
        kernel: Monokernel | None = None
        heap: CudaHeap | None = None
        cause = self._agreed(obstacle(self.shape))
        watch.ended("cuBLAS")
        if not cause:
            loaded, cause = self._attempt(self._load_both)
            watch.ended("weights")
        if loaded is not None:
            heap = self._link(max(sizes_within(self.shape.spec)))
            kernel, cause = self._make_kernel(loaded[0], heap)
            watch.ended("kernel")
        if loaded is not None and kernel is not None:
            made, cause = self._attempt(partial(self._make_prefill, kernel, loaded[1], watch.ended))
            if made is not None:
                if self.args.info.rank == 0:
                    note(f"started prefill in {watch}")
                return kernel, made
        loaded = None
        free_memory()
        note(f"prompts go token by token, since prefill cannot start: {cause}")
        return kernel or self._without_prefill(lambda: heap or self.link(0)), None

    def _without_prefill(self, link: Callable[[], CudaHeap | None]) -> Monokernel:
        """The kernel alone."""
        from kog_dist.workers.cuda.load import load_weights

        self.tell.begin(StartStage.WEIGHTS)
        weights = load_weights(self.shape, self.checkpoint, on_share=self.tell.share)
        return self._kernel(weights, link())

    def _attempt(self, make: Callable[[], _T]) -> tuple[_T | None, str]:
        """What `make` makes, None if it failed on any rank, and why. Raises a refusal instead where prefill was told `on`."""
        made, cause = None, ""
        try:
            made = make()
        except (AbortedError, CheckpointError):
            raise
        except Exception as error:
            if self.args.prefill == "on":
                _refuse_without_memory(error)
                raise
            cause = cause_of(error)
        cause = self._agreed(cause)  # not within the handler: its traceback holds on to what has been made
        return (None if cause else made), cause

    def _agreed(self, cause: str) -> str:
        if cause and self.args.prefill == "on":
            raise refusal(cause)
        return self.first_cause(cause)

    def _load_both(self) -> tuple[DeviceWeights, Matrices]:
        """The kernel's weights, and prefill's. Errors of prefill's own are `LaunchError`s that name it."""
        from kog_dist.workers.cuda.load import load_weights
        from kog_dist.workers.prefill import gpu

        with _of_prefill():
            matrices, observe = gpu.matrices_for(self.shape)

        def show(name: str, words: DeviceArray) -> None:
            with _of_prefill():
                observe(name, words)

        self.tell.begin(StartStage.WEIGHTS)
        return load_weights(self.shape, self.checkpoint, show, on_share=self.tell.share), matrices

    def _link(self, prefill_tokens: int) -> CudaHeap | None:
        """The memory that the peers map, with room for prefill; once they have begun, they keep it."""
        try:
            return self.link(prefill_tokens)
        except Exception as error:
            _refuse_without_memory(error)
            raise

    def _make_kernel(self, weights: DeviceWeights, heap: CudaHeap | None) -> tuple[Monokernel | None, str]:
        """The kernel beside prefill's weights, if all ranks have room for theirs."""
        made: list[Monokernel] = []

        def make() -> Monokernel:
            made.append(self._kernel(weights, heap))
            return made[0]

        kernel, cause = self._attempt(make)
        for own in made if kernel is None else ():  # the next one maps the same memory of the host
            own.close()
        return kernel, cause

    def _make_prefill(self, kernel: Monokernel, matrices: Matrices, ended: Callable[[str], None]) -> Prefiller:
        from kog_dist.workers.prefill import gpu

        with _of_prefill():
            exchange = None if self.sums is None else self.sums(self.limit_us / 1e6)
            return gpu.prefill_for(kernel, matrices, exchange=exchange, ended=ended, tell=self.tell)

    def _kernel(self, weights: DeviceWeights, heap: CudaHeap | None) -> Monokernel:
        from kog_dist.workers.cuda.company_build import company_sizes
        from kog_dist.workers.cuda.monokernel import Monokernel

        self.tell.begin(StartStage.KERNEL)
        args = self.args
        return Monokernel(
            self.shape,
            weights,
            rank=args.info.rank,
            wait_limit_us=self.limit_us,
            heap=heap,
            processors=True,
            masks=self.masks,
            drafts=args.drafts,
            forced=self.forced,
            num_slots=args.parallel,
            num_caches=args.num_kv_caches,
            company=company_sizes(self.shape, args.parallel),
        )


def obstacle(shape: KernelShape) -> str:
    """Why this rank cannot have prefill, as far as that can be said before anything is made; empty if it may."""
    from kog_dist.workers.prefill import gpu
    from kog_dist.workers.prefill.memory import obstacle_to_prefill

    return obstacle_to_prefill(shape.spec, shape.coding, shape.kv_dtype) or gpu.obstacle_on_gpu()


def refusal(cause: str) -> LaunchError:
    """What a rank says that cannot have prefill, and cannot go on without."""
    return LaunchError(f"{_REFUSED}{cause}{_REMEDY}")


def _refuse_without_memory(error: Exception) -> None:
    """Also of weights and kernel, which had less room, and of the memory that peers map."""
    if is_out_of_memory(error) and not str(error).startswith(_REFUSED):
        raise refusal(cause_of(error)) from error


def cause_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()).removeprefix(_REFUSED).removesuffix(_REMEDY)[:_CAUSE_CHARACTERS]
    return text if isinstance(error, LaunchError) else f"{type(error).__name__}: {text}"


def free_memory() -> None:
    """Give back GPU memory that nobody uses any more."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


@contextmanager
def _of_prefill() -> Iterator[None]:
    try:
        yield
    except AbortedError:
        raise
    except Exception as error:
        raise refusal(cause_of(error)) from error
