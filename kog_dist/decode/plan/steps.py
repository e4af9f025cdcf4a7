"""The vocabulary of a plan: phases, values, messages and steps. Pure data; `decode/plan/plan.py` puts them together."""

from __future__ import annotations

import enum
from typing import NamedTuple

from kog_dist.records import dataclass

NONE = -1  # a value or step without this coordinate (no lane, no layer)


class Phase(enum.IntEnum):
    """Stage of one decode step, numbered alike in device programs (`kernel_abi`).

    The first five and ROUTE multiply with a matrix; the others only move or combine values. Device programs use that the first
    four fit into two bits, and that OUT and DOWN, whose outputs go to the residual, are the odd ones.
    """

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    EMBED = 5
    ATTEND = 6
    SUM = 7  # own lanes' partial outputs -> this rank's sum, published
    TOTAL = 8  # every rank's sum -> the sum over all lanes
    RESIDUAL = 9
    FINAL_NORM = 10
    HEAD_INPUT = 11
    GATHER = 12
    SAMPLE = 13
    ROUTE = 14  # logits of a layer's experts, from the stream that all lanes share
    SELECT = 15  # which of them the token's FFN is made of
    DELTA_IN = 16  # all that a delta net projects
    DELTA = 17  # its convolution and its state


ON_DEVICES = tuple(phase for phase in Phase if phase <= Phase.SELECT)  # those that device programs have
LAYER_OPS = (Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN)  # what each lane multiplies with in a layer, in this order
LANE_OPS = (*LAYER_OPS, Phase.DELTA_IN)  # the same of all kinds of layers
WEIGHT_PHASES = (*LAYER_OPS, Phase.HEAD, Phase.ROUTE, Phase.DELTA_IN)


class Site(enum.IntEnum):
    """Where a sum over lanes happens. The first two equal `spec.Block`; FINAL is the lane aggregation before the LM head."""

    ATTENTION = 0
    MLP = 1
    FINAL = 2


class When(enum.IntEnum):
    """For which tokens a step runs."""

    ALWAYS = 0
    SAMPLED = 1  # tokens whose logits are wanted: all but the inner tokens of a prompt
    GATHERED = 2  # sampled tokens whose logits rank 0 collects


class Kind(enum.IntEnum):
    """What a value is."""

    # Residual stream of a lane, or without a lane where all share it. The number counts its revisions: 0 = embedding,
    # 2 * layer + site + 1 after each sublayer.
    STREAM = 0
    QUERY = 1
    CACHE = 2  # keys and values of a lane and layer, positions 0 .. current
    MIXED = 3  # attention output of a lane's heads
    ACTIVATION = 4  # silu(gate) * up
    PARTIAL = 5  # a lane's own output of a sublayer: p_l of LANEFORMER's formula
    OWN_SUM = 6  # tree sum over this rank's lanes
    TOTAL = 7  # tree sum over all lanes
    HEAD_INPUT = 8
    LOGITS = 9  # of a lane's slice of the vocabulary
    ALL_LOGITS = 10
    TOKEN = 11
    ROUTER_LOGITS = 12  # of a layer's experts
    CHOICE = 13  # (2, K): numbers of the chosen experts, ascending, and their weights; behind them the shared one's
    GATE = 14  # what attention's output is gated with
    DELTA_INPUT = 15  # q, k, v, z, a, b of a delta net
    STATE = 16  # of a delta net: what it keeps of all tokens, and the convolution's last inputs
    SHARED_ACTIVATION = 17  # of the shared expert


class Value(NamedTuple):
    """Name of something that a step writes once per token. `number` is the layer (STREAM: the revision)."""

    kind: Kind
    number: int = NONE
    lane: int = NONE
    site: int = NONE


_REPLACED = (
    Kind.STREAM,
    Kind.QUERY,
    Kind.MIXED,
    Kind.ACTIVATION,
    Kind.GATE,
    Kind.DELTA_INPUT,
    Kind.SHARED_ACTIVATION,
)
_LASTING = (Kind.PARTIAL, Kind.OWN_SUM, Kind.TOTAL)


def place(value: Value, delay: int) -> tuple[int, ...]:
    """Where an engine keeps a value, lane left out: writing a value ends the life of the one that had its place.

    A lane has one query and so on, whatever the layer; a lane or a rank has one residual stream. Outputs and sums of a sublayer
    live until the same sublayer `delay` + 1 layers later.
    """
    if value.kind in _REPLACED:
        return (value.kind,)
    if value.kind in _LASTING:
        return (value.kind, value.site, value.number % (delay + 1))
    return (value.kind, value.number)


@dataclass(frozen=True, slots=True)
class PlannedMailbox:
    """A mailbox of the plan. Its epochs grow by `per_token` with each token; the slot is the epoch modulo `num_slots`.

    `length` is the number of float32 values that each rank writes.
    """

    name: str
    num_slots: int
    length: int
    per_token: int


class Message(NamedTuple):
    """One message of a token: `sequence` tells it from the others of its mailbox. `peers` are its readers, or its writers."""

    mailbox: str
    sequence: int
    peers: tuple[int, ...]


class Step(NamedTuple):
    """One step of a rank, run to its end before the next. A step that both publishes and waits publishes first."""

    phase: Phase
    layer: int = NONE
    lane: int = NONE
    site: int = NONE
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    publishes: Message | None = None
    waits: Message | None = None
    when: When = When.ALWAYS
