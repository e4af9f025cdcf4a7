"""Quantised matrices of a checkpoint for the GPU: how they are coded, and their codes lane by lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import Coding
from kog_dist.errors import ConfigError
from kog_dist.model.formats.lanes import lane_codes, weight_format
from kog_dist.model.formats.weight_format import CodedMatrix
from kog_dist.model.layout import EXPERTS, is_layer_matrix

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

_OF_EXPERTS = "MXFP4 (E2M1) in groups of 32"
_READERS, _AHEAD = 8, 24  # matrices of lanes that are read before they are asked for


def coding_of(checkpoint: Checkpoint) -> Coding | None:
    """How the matrices of all layers are coded, or of experts those that are quantised; None if they are 16 bit.

    Raises ConfigError where they are quantised in several ways, or in one that the kernel does not read.
    """
    has_experts = checkpoint.spec.experts is not None

    def may_be_coded(name: str) -> bool:
        return is_layer_matrix(checkpoint.layouts, name) and (EXPERTS in name or not has_experts)

    forms = {name: weight_format(checkpoint, name) for name in checkpoint.layouts}
    of_layers = {form for name, form in forms.items() if may_be_coded(name)}
    if has_experts and of_layers != {None} and any(form is None or str(form) != _OF_EXPERTS for form in of_layers):
        raise ConfigError(f"GPUs run experts in 16 bit or in {_OF_EXPERTS} alone; use --device cpu")
    others = [name for name, form in forms.items() if form is not None and not may_be_coded(name)]
    if others:
        which = "experts" if has_experts else "layers"
        raise ConfigError(f"GPUs run quantised weights of {which} alone, and {others[0]} is quantised, too; use --device cpu")
    if of_layers == {None}:
        return None
    codings = {None if form is None else Coding.of(form) for form in of_layers}
    if len(codings) > 1:
        ways = " and ".join(sorted("16 bit" if form is None else str(form) for form in of_layers))
        raise ConfigError(f"GPUs run models whose layers are all quantised in one way, and this one has {ways}; use --device cpu")
    return codings.pop()


class CodesReader:
    """The codes of a checkpoint's hosted lanes on the GPU, read ahead in the order of use by threads of their own."""

    def __init__(self, checkpoint: Checkpoint, hosted: range) -> None:
        self._checkpoint, self._hosted = checkpoint, hosted
        self._pool = ThreadPoolExecutor(_READERS, "kog-codes")
        self._waiting = deque(_in_order(checkpoint, len(hosted)))
        self._reading: dict[tuple[str, int], Future[CodedMatrix]] = {}

    def codes(self, name: str, lane: int) -> Codes:
        """See `CodesSource`. Each can be taken once. Raises CheckpointError."""
        import cupy

        while self._waiting and ((name, lane) not in self._reading or len(self._reading) < _AHEAD):
            matrix, one = self._waiting.popleft()
            read = partial(lane_codes, self._checkpoint, matrix, self._hosted[one], may_split=EXPERTS in matrix)
            self._reading[matrix, one] = self._pool.submit(read)
        return Codes.of(self._reading.pop((name, lane)).result(), cupy.asarray)

    def close(self) -> None:
        """Read nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _in_order(checkpoint: Checkpoint, num_lanes: int) -> Iterator[tuple[str, int]]:
    """Layer by layer, as `tensor_layouts` has them."""
    for name in checkpoint.layouts:
        if is_layer_matrix(checkpoint.layouts, name) and (EXPERTS in name or checkpoint.spec.experts is None):
            yield from ((name, lane) for lane in range(num_lanes))
