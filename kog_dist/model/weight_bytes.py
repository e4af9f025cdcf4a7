"""How the weights of a checkpoint are kept, for people, and how many bytes of them a token needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Final

from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.mxfp4 import GROUP, kept_shapes
from kog_dist.model.layout import EXPERTS, head_name

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

_HALF: Final = 2  # bytes of a weight that is not quantised


def formats(checkpoint: Checkpoint) -> str:
    """`bfloat16`, or how matrices are quantised and what the others are: `FP8 (E4M3) ..., the rest bfloat16`.

    Of a GGUF file what it has, and what that is read as: `Q4_1 (read as float16)`.
    """
    return quantised(checkpoint) or _stored(checkpoint)


def _stored(checkpoint: Checkpoint) -> str:
    form, dtype = checkpoint.stored_format, checkpoint.dtype
    return dtype if form == dtype else f"{form} (read as {dtype})"


def quantised(checkpoint: Checkpoint) -> str:
    """`formats` of a model with quantised matrices; empty if it has none."""
    found = dict.fromkeys(map(str, dict.fromkeys(checkpoint.forms.values())))
    head = "" if checkpoint.head_rounding is None else f", LM head rounded at the start to {checkpoint.head_rounding}"
    if not found:
        return f"{_stored(checkpoint)}{head}" if head else ""
    source = "rounded at the start" if checkpoint.quantisation is None else f"as published ({checkpoint.quantisation.method})"
    return f"{'; '.join(found)}, {source}{head}, the rest {checkpoint.dtype}"


def num_quantised(checkpoint: Checkpoint, *, of_token: bool = False) -> int:
    """Values of all matrices that are quantised; or `of_token`, of those that a token reads."""
    return _sum(checkpoint, {name: checkpoint.layouts[name].num_values for name in checkpoint.forms}, of_token)


def num_kept_coded(checkpoint: Checkpoint, *, of_token: bool = False) -> tuple[int, int]:
    """Of experts in MXFP4, which CPU ranks keep so: values, and bytes that they keep. `of_token` as above."""
    layouts = checkpoint.layouts
    names = [name for name, form in checkpoint.forms.items() if EXPERTS in name and form == MXFP4]
    values = {name: layouts[name].num_values for name in names}
    num_bytes = {name: _kept_bytes(layouts[name].shape, splits_columns=name.endswith(".w2.weight")) for name in names}
    return _sum(checkpoint, values, of_token), _sum(checkpoint, num_bytes, of_token)


@cache
def _kept_bytes(shape: tuple[int, ...], *, splits_columns: bool) -> int:
    lanes, rows, columns = shape
    firsts = (columns * lane % GROUP if splits_columns else 0 for lane in range(lanes))
    return rows * sum(sum(kept_shapes(first, columns)) for first in firsts)


def bytes_per_token(checkpoint: Checkpoint) -> int:
    """Weight bytes that a decode step reads where matrices stay as they are: codes with their scales, others in 16 bit."""
    return checkpoint.spec.bytes_per_token(_HALF) + _sum(checkpoint, _differences(checkpoint), of_token=True)


def weight_bytes(checkpoint: Checkpoint) -> int:
    """The same of all experts, whether a token reads them or not: what GPUs would keep besides the embedding table."""
    spec = checkpoint.spec
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    return (spec.num_parameters - embedding) * _HALF + _sum(checkpoint, _differences(checkpoint), of_token=False)


def _sum(checkpoint: Checkpoint, of_tensors: Mapping[str, int], of_token: bool) -> int:
    """The sum of what tensors have; `of_token`: of experts, which all have the same, as many as a token reads."""
    of_experts = sum(count for name, count in of_tensors.items() if EXPERTS in name)
    others = sum(of_tensors.values()) - of_experts
    spec = checkpoint.spec
    return others + (of_experts * spec.num_ffns_read // spec.num_ffns if of_token else of_experts)


def _differences(checkpoint: Checkpoint) -> dict[str, int]:
    """Of quantised matrices the bytes, less those in 16 bit; what lanes have in common counts once."""
    found = {}
    for name, form in checkpoint.forms.items():
        layout, stored = checkpoint.layouts[name], checkpoint.names[name]
        if checkpoint.is_rounded(name):
            lanes, rows, columns = layout.shape
            num_bytes = lanes // stored.copies * form.num_bytes(rows, columns)
        else:
            num_bytes = form.num_bytes(*stored.shape(layout))
        found[name] = num_bytes - _HALF * prod(layout.shape) // stored.copies
    if checkpoint.head_rounding is not None:
        name = head_name(checkpoint.spec)
        shape = checkpoint.layouts[name].shape
        found[name] = checkpoint.head_rounding.num_bytes(prod(shape[:-1]), shape[-1]) - _HALF * prod(shape)
    return found
