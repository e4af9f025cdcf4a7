"""What a wait for peers was for, in terms of the model: the phase and the layer that a mailbox of sums belongs to."""

from __future__ import annotations

from dataclasses import replace

from kog_dist.decode.plan.schedule import is_summed
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.runtime.abi import WaitRecord

_SUMMED = {Sublayer.ATTENTION: Phase.OUT, Sublayer.MLP: Phase.DOWN}  # the product whose outputs are summed over lanes
_OTHERS = {
    "final": Phase.HEAD_INPUT,
    "streams": Phase.HEAD_INPUT,
    "logits": Phase.GATHER,
    "candidates": Phase.SAMPLE,
    "choices": Phase.SAMPLE,
    "reports": Phase.SAMPLE,
}


def with_place(spec: ModelSpec, record: WaitRecord) -> WaitRecord:
    """With the phase, and of a sum the layer, of the mailbox that `label` names; unchanged if it is none of a plan's.

    CPU ranks and GPUs name their mailboxes alike, and a layer's slot is its place among those that are summed.
    """
    for sublayer, phase in _SUMMED.items():
        if record.label == sublayer.name.lower():
            layers = [layer for layer in range(spec.num_layers) if is_summed(spec, layer, sublayer)]
            layer = layers[record.slot] if record.slot < len(layers) else NONE
            return replace(record, phase=phase, layer=layer)
    if record.label == "experts":
        return replace(record, phase=Phase.SELECT, layer=record.slot)
    return replace(record, phase=_OTHERS[record.label]) if record.label in _OTHERS else record
