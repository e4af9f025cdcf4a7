"""What a GPU rank does together with its peers: agree, map their memory, and carry what the host needs of all ranks.

Sums, streams and candidates travel inside the monokernel (workers/cuda/kernel_boxes.py). Here are the meetings of the start, and
what hosts exchange between launches: slices of the logits on their way to rank 0, and rank 0's choice on its way back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cuda import CudaCommunicator
from kog_dist.errors import KogError, LaunchError, RendezvousTimeout
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.company_build import company_shape, company_sizes
from kog_dist.workers.cuda.draft_builds import PassCosts, drafting_shape
from kog_dist.workers.engines.agreement import agree, common_terms
from kog_dist.workers.engines.cuda_programs import compile_ahead, kernel_builds
from kog_dist.workers.prefill.exchange import peer_exchange

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.prefill.exchange.peer_exchange import PeerExchange

_LOGITS, _CHOICE = "logits", "choice"
_SLOTS = 2  # in turn
_CHOICE_VALUES = 3  # upper and lower 16 bits of the token id, and the Finish: whole numbers that float32 holds exactly


class CudaPeers:
    """One rank's side. All methods but `close` are collective. `deadline` bounds every meeting of the start."""

    def __init__(self, args: WorkerArgs, control: ControlPage, shapes: list[KernelShape], deadline: Deadline) -> None:
        """`shapes`: what every rank's kernel is compiled for, in the order of ranks."""
        self._args, self._control, self._deadline = args, control, deadline
        self._rank, self._shapes = args.info.rank, shapes
        self._slices = [last - first for first, last in (shape.head.vocab_rows for shape in shapes)]
        self._rendezvous = LocalRendezvous.from_fd(args.info.rendezvous_fd, self._rank, aborted=self._is_over)
        self._comm: CudaCommunicator | None = None
        self._num_gathered = self._num_chosen = self._prefill_tokens = 0

    @property
    def vocab_size(self) -> int:
        """Logits of all ranks together."""
        return sum(self._slices)

    # ---- startup ----
    def agree(self, checkpoint: Checkpoint, plan_digest: str, device: int) -> None:
        """Return when all ranks are about to run the same program on GPUs of one kind. Raises ConfigError otherwise."""
        import cupy

        from kog_dist.workers.cuda.build import cubin_name

        runtime: ModuleType = cupy.cuda.runtime
        name = runtime.getDeviceProperties(device)["name"]
        kernels = sorted({cubin_name(generated, source) for generated, source in self._builds()})
        terms = common_terms(self._args, checkpoint, plan_digest) | {
            "kernel": hashlib.sha256("\n".join(kernels).encode()).hexdigest(),
            "version of the CUDA driver": str(runtime.driverGetVersion()),
            "kind of GPU": name.decode() if isinstance(name, bytes) else str(name),
        }
        agree(self._rendezvous, terms, self._deadline)

    def build(self) -> None:
        """Have every rank's programs in the cache: rank 0 compiles, the others wait for it. Raises CompileError on rank 0."""
        from kog_dist.workers.cuda.build import build

        if self._rank == 0:
            compile_ahead(self._shapes, self._args)
            for generated, source in self._builds():
                build(generated, source)
        self.meet()

    def _builds(self) -> Iterator[tuple[dict[str, str], str]]:
        """Headers and source of each program of every rank's kernel."""
        return (one for shape in self._shapes for one in kernel_builds(shape, self._args))

    def link(self, device: int, prefill_tokens: int = 0) -> CudaHeap:
        """Map the peers' memory and try it. Returns the heap with the mailboxes of the monokernel, which come first.

        `prefill_tokens`: most tokens in a chunk of prefill; 0: there is none.
        """
        shape = self._shapes[self._rank]
        self._prefill_tokens = prefill_tokens
        boxes = [
            *self._exchanging(shape).words.boxes.specs(),
            MailboxSpec(_LOGITS, _SLOTS, max(self._slices)),
            MailboxSpec(_CHOICE, _SLOTS, _CHOICE_VALUES),
            *(peer_exchange.mailboxes(shape.spec, prefill_tokens, shape.num_ranks) if prefill_tokens else ()),
        ]
        self._comm = CudaCommunicator.create(
            boxes,
            rendezvous=self._rendezvous,
            control=self._control,
            deadline=self._deadline,
            device=device,
            timeout_s=self._args.step_timeout_s,
        )
        return self._comm.heap

    def _exchanging(self, shape: KernelShape) -> KernelShape:
        """The build whose mailboxes are those of all builds, as they lie in the heap."""
        if sizes := company_sizes(shape, self._args.parallel):
            return company_shape(shape, sizes[-1])
        return drafting_shape(shape) if self._args.drafts else shape

    def prefill_sums(self, limit_s: float) -> PeerExchange:
        """What adds up the ranks' sums during prefill, after `link`; `limit_s` bounds its waits."""
        assert self._comm is not None
        spec = self._shapes[self._rank].spec
        return peer_exchange.peer_exchange(spec, self._prefill_tokens, self._comm, limit_s=limit_s)

    def meet(self) -> None:
        """Return when all ranks have come as often."""
        self._rendezvous.barrier(self._deadline)

    def first_cause(self, cause: str) -> str:
        """Of what all ranks give, with the rank's name: the first that is not empty; empty if nobody gives one."""
        found = [raw.decode() for raw in self._rendezvous.all_gather_bytes(cause.encode(errors="replace"), self._deadline)]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")

    def compare_trials(self, token_id: int) -> None:
        """Return when all ranks chose the same token on trial. LaunchError if not: memory does not work."""
        found = [int(raw) for raw in self._rendezvous.all_gather_bytes(str(token_id).encode(), self._deadline)]
        if len(set(found)) > 1:
            raise LaunchError(
                f"the ranks chose different tokens on trial ({', '.join(map(str, found))}, in the order of ranks): their GPUs do "
                f"not read what the others wrote; see kog-doctor, and nvidia-smi topo -p2p rw"
            )

    def share_costs(self, costs: PassCosts) -> PassCosts:
        """Those that rank 0 gives, on every rank: each decides by them which build of the kernel takes the next turn."""
        return PassCosts.from_json(self._rendezvous.all_gather_bytes(costs.to_json().encode(), self._deadline)[0].decode())

    # ---- requests; no launch of the monokernel may be under way ----
    def gather_logits(self, own: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """All logits (vocab_size,) on rank 0, from this rank's slice of them on each; None on the other ranks.

        Ranks above 0 do not wait, so between two calls they must have waited for what rank 0 did after the first: a token that
        its kernel decoded, or a choice.
        """
        assert self._comm is not None
        epoch = self._num_gathered = self._num_gathered + 1
        padded = np.zeros(max(self._slices), np.float32)
        padded[: len(own)] = own
        if self._rank != 0:
            self._comm.publish(_LOGITS, epoch % _SLOTS, epoch, padded)
            return None
        rows = self._comm.collect(_LOGITS, epoch % _SLOTS, epoch, padded)
        return np.concatenate([row[:length] for row, length in zip(rows, self._slices, strict=True)])

    def share_choice(self, token_id: int, finish: Finish) -> tuple[int, Finish]:
        """Rank 0's token and finish, on every rank; what the others give does not count."""
        assert self._comm is not None
        epoch = self._num_chosen = self._num_chosen + 1
        word = 0 if token_id == NO_TOKEN else token_id + 1
        values = np.array([word >> 16, word & 0xFFFF, finish], np.float32)
        upper, lower, ended = map(int, self._comm.all_gather(_CHOICE, epoch % _SLOTS, epoch, values)[0])
        word = upper << 16 | lower
        return (word - 1 if word else NO_TOKEN), Finish(ended)

    def share_number(self, number: int) -> int:
        """Rank 0's, on every rank: from 0 to 2^31."""
        return self.share_choice(number, Finish.NONE)[0]

    def gather_choices(self, own: bytes) -> list[bytes]:
        """What every rank says of the experts that it chose, in the order of ranks. Bounded by the time of a step."""
        limit_s = self._args.step_timeout_s
        try:
            return self._rendezvous.all_gather_bytes(own, Deadline.after(limit_s))
        except RendezvousTimeout as error:
            names = ", ".join(map(str, error.missing))
            raise RendezvousTimeout(
                error.missing,
                f"rank {self._rank} waited {limit_s:g} s to compare choices of experts and rank {names} did not come; look at "
                f"its last words, or raise --step-timeout",
            ) from error

    def _is_over(self) -> bool:
        """Whether this rank must not meet the others any more: what it gave would be taken for an answer of a rank that is well,
        and it would wait for them before anybody hears why it failed.
        """
        return self._control.aborted() or self._control.state(self._rank) is RankState.FAILED

    def close(self) -> None:
        """Unmap the peers' memory, meet, free the own; the kernel must have left. Never hangs, and raises nothing: see below."""
        try:
            if self._comm is not None:
                self._comm.close()
        except KogError:
            pass  # the context is broken: its memory goes with this process, and the error that broke it is the one to tell
        finally:
            self._rendezvous.close()
