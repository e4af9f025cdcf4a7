"""What a rank does before it is ready: told by the rank, shown by whoever waits for it.

A stage is one of a few, and may know which share of it is done. Compilers say for themselves that they are at work, since that
takes long and happens only at the first start on a machine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kog_dist.records import dataclass


class StartStage(enum.IntEnum):
    """In the order in which ranks mostly come to them."""

    INTERPRETER = 0
    CHECKPOINT = 1
    DEVICE = 2
    WEIGHTS = 3
    COMPILING = 4
    KERNEL = 5
    PRODUCTS = 6
    GRAPHS = 7
    PEERS = 8
    TRIAL = 9


DOING: Final[Mapping[StartStage, str]] = {
    StartStage.INTERPRETER: "starting its interpreter",
    StartStage.CHECKPOINT: "opening the checkpoint",
    StartStage.DEVICE: "starting CUDA",
    StartStage.WEIGHTS: "loading and packing weights",
    StartStage.COMPILING: "compiling, as at the first start on a machine",
    StartStage.KERNEL: "setting up the kernel",
    StartStage.PRODUCTS: "choosing algorithms for prefill",
    StartStage.GRAPHS: "recording graphs for prefill",
    StartStage.PEERS: "waiting for the other ranks",
    StartStage.TRIAL: "decoding a token on trial",
}
_WHOLE: Final = 1000  # parts of a stage, which a word counts from 1


@dataclass(frozen=True, slots=True)
class StartReport:
    """`share` of the stage that is done, from 0 to 1; None: not known."""

    stage: StartStage = StartStage.INTERPRETER
    share: float | None = None

    def pack(self) -> int:
        """As one word, which is 0 for what a rank does that has not said anything yet."""
        parts = 0 if self.share is None else 1 + round(_WHOLE * min(max(self.share, 0.0), 1.0))
        return int(self.stage) << 32 | parts

    @classmethod
    def unpack(cls, word: int) -> StartReport:
        """The report that `pack` made a word of."""
        parts = word & 0xFFFFFFFF
        return cls(StartStage(word >> 32), (parts - 1) / _WHOLE if parts else None)


class StartTeller:
    """The rank's side: `tell` hands a report on."""

    def __init__(self, tell: Callable[[StartReport], None] = lambda report: None) -> None:
        self._tell = tell
        self._stage = StartStage.INTERPRETER

    def begin(self, stage: StartStage) -> None:
        """From now on this is done; of another stage before it no more is said."""
        self._stage = stage
        self._tell(StartReport(stage))

    def share(self, share: float) -> None:
        """So much of the stage is done."""
        self._tell(StartReport(self._stage, share))

    @contextmanager
    def during(self, stage: StartStage) -> Iterator[None]:
        """The stage within the block, behind it again what was done before."""
        before = self._stage
        self.begin(stage)
        try:
            yield
        finally:
            self.begin(before)

    @contextmanager
    def hearing_compilers(self) -> Iterator[None]:
        """Within the block a compiler that this thread starts is a stage of its own."""
        token = _HEARS_COMPILERS.set(self)
        try:
            yield
        finally:
            _HEARS_COMPILERS.reset(token)


NOBODY: Final = StartTeller()
_HEARS_COMPILERS: Final = ContextVar("hears compilers", default=NOBODY)


@contextmanager
def compiling() -> Iterator[None]:
    """Around the work of a compiler, where its product is not there from an earlier start."""
    with _HEARS_COMPILERS.get().during(StartStage.COMPILING):
        yield
