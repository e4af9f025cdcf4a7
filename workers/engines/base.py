"""What a worker asks of an engine: the same of NumPy on CPU ranks and of a persistent kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.runtime.ring import Finish
from kog_dist.workers.intake import Intake


class Engine(Protocol):
    """One rank's share of the model. All methods are collective: every rank calls them in the same order.

    The unit of work is a whole request, not a step: the loop over tokens may run on a device, where the host cannot follow it. On
    CPU ranks it is whole requests: those that come while one runs join it.
    """

    def startup(self) -> None:
        """Load weights, make and check the plan, agree with the other ranks, map their memory, and run one token as a trial.

        Says in the control page which KV caches it has (`set_kv_layout`).
        Raises KogError when this rank cannot serve, AbortedError when the engine is being stopped meanwhile.
        """

    def run(self, seq: int, request: DecodeRequest, intake: Intake | None = None) -> Finish:
        """Prefill and decode one request; rank 0 writes the token ring. Returns why the answer ended, the same on all ranks
        (but what is NO_MASK on rank 0 is CANCELLED elsewhere). `intake`: where the requests behind it are to be had; an engine
        that can run several at once takes them over, and returns when all have ended.

        Keys and values go to the KV cache that `request.kv` names, behind the positions that it says are there already; they stay
        there until another request is told to overwrite them. How far they are is written to the control page as it goes
        (`set_progress`), for the last time before the last entry. Copies of a state that `request.kv` asks for are made when it
        has come so far, before a request that comes later can use them.
        The entry with a Finish is the last one of `seq` in its ring. A cancel ends the request after the same token everywhere.
        Raises AbortedError when the engine is being stopped, DeviceError when a wait ran out of time; then nothing is published.
        """

    def copy_blocks(self, kv: KvUse) -> None:
        """Make the copies of `kv` between its KV cache and the block pool. Not collective: all ranks are told the same."""

    @property
    def rouse(self) -> Callable[[], None] | None:
        """Called when a request is about to come: the device and its driver wake while it is still being checked. None: a rank
        that is better left asleep, since it shares its core. Not collective.
        """

    def close(self) -> None:
        """Release everything. Also after a failed startup."""
