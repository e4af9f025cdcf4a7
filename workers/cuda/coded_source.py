"""Quantised matrices of a checkpoint for the GPU: how they are coded, and their codes lane by lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import HEAD_CODING, Coding, Codings
from kog_dist.errors import ConfigError
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.layout import EXPERTS, NET_OUTPUTS, NETS, SHARED, TensorLayout, is_layer_matrix

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

_READERS, _AHEAD = 8, 24  # matrices of lanes that are read before they are asked for


def coding_of(checkpoint: Checkpoint) -> Coding | None:
    """How the matrices of all layers are coded, or those of experts alone; None if they are 16 bit.

    Raises ConfigError where they are quantised in several ways, or in one that the kernel does not read.
    """
    if not checkpoint.forms:
        return None
    layouts = checkpoint.layouts
    forms = {name: checkpoint.forms.get(name) for name in layouts}
    others = [name for name in checkpoint.forms if not is_layer_matrix(layouts, name)]
    if others:
        raise ConfigError(f"GPUs run quantised weights of layers alone, and {others[0]} is quantised, too; use --device cpu")
    of_experts = {form for name, form in forms.items() if is_layer_matrix(layouts, name) and EXPERTS in name}
    of_rest = {form for name, form in forms.items() if is_layer_matrix(layouts, name) and EXPERTS not in name}
    is_of_experts = of_rest == {None} and bool(of_experts - {None})
    of_layers = of_experts if is_of_experts else of_experts | of_rest
    if of_layers == {None}:
        return None
    if is_of_experts and any(SHARED in name for name in layouts):
        raise ConfigError(
            "GPUs run quantised experts beside a shared one in codes, and this model's has 16 bit; use --device cpu"
        )
    nets = [name for name in layouts if NETS in name and is_layer_matrix(layouts, name)]
    inputs, outputs = ([name for name in nets if name.endswith(NET_OUTPUTS) == is_last] for is_last in (False, True))
    plain_inputs, plain_outputs = (bool(names) and not any(map(forms.get, names)) for names in (inputs, outputs))
    if not is_of_experts:  # delta nets may have 16 bit beside codes
        left = {*(inputs if plain_inputs else ()), *(outputs if plain_outputs else ())}
        of_layers = {form for name, form in forms.items() if is_layer_matrix(layouts, name) and name not in left}
    of_layers = _in_smallest_groups(of_layers)
    codings = {None if form is None else Coding.of(form, is_of_experts=is_of_experts) for form in of_layers}
    if len(codings) > 1:
        ways = " and ".join(sorted("16 bit" if form is None else str(form) for form in of_layers))
        raise ConfigError(f"GPUs run models whose layers are all quantised in one way, and this one has {ways}; use --device cpu")
    coding = codings.pop()
    if coding is None or is_of_experts:
        return coding
    return replace(coding, plain_inputs=plain_inputs, plain_outputs=plain_outputs)


def _in_smallest_groups(forms: set[WeightFormat | None]) -> set[WeightFormat | None]:
    """The form of which all are, if they differ in the columns of a group alone: a large group is several with the same scale."""
    sizes = {form.block_columns for form in forms if form is not None}
    least = min(sizes, default=0)
    if None in forms or not least or any(size % least for size in sizes):
        return forms
    alike: set[WeightFormat | None] = {replace(form, block_columns=least) for form in forms if form is not None}
    return alike if len(alike) == 1 else forms


def codings_of(checkpoint: Checkpoint) -> Codings:
    """The same, and how the LM head is coded."""
    return {"coding": coding_of(checkpoint), "head_coding": None if checkpoint.head_rounding is None else HEAD_CODING}


def is_coded(layouts: Mapping[str, TensorLayout], coding: Coding | None, name: str) -> bool:
    """Whether a tensor is a matrix of those that `coding` is of."""
    if coding is None or not is_layer_matrix(layouts, name) or (coding.is_of_experts and EXPERTS not in name):
        return False
    return NETS not in name or not (coding.plain_outputs if name.endswith(NET_OUTPUTS) else coding.plain_inputs)


class CodesReader:
    """The codes of a checkpoint's hosted lanes on the GPU, read ahead in the order of use by threads of their own."""

    def __init__(self, checkpoint: Checkpoint, coding: Coding | None, hosted: range) -> None:
        self._checkpoint, self._coding, self._hosted = checkpoint, coding, hosted
        self._pool = ThreadPoolExecutor(_READERS, "kog-codes")
        names = [name for name in checkpoint.layouts if is_coded(checkpoint.layouts, coding, name)]  # layer by layer
        self._waiting = deque((name, lane) for name in names for lane in range(len(hosted)))
        self._reading: dict[tuple[str, int], Future[CodedMatrix]] = {}

    def codes(self, name: str, lane: int) -> Codes:
        """See `CodesSource`. Each can be taken once. Raises CheckpointError."""
        import cupy

        while self._waiting and ((name, lane) not in self._reading or len(self._reading) < _AHEAD):
            matrix, one = self._waiting.popleft()
            read = partial(lane_codes, self._checkpoint, matrix, self._hosted[one], may_split=EXPERTS in matrix)
            self._reading[matrix, one] = self._pool.submit(read)
        return Codes.of(self._reading.pop((name, lane)).result(), cupy.asarray, self._coding)

    def close(self) -> None:
        """Read nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
