"""What every rank does for one token, as data: made once, in pure Python, from the model spec and the world size.

Two engines execute it: the interpreter (`decode/cpu/interpreter.py`) and the GPU kernel. `validate.py` proves a plan correct
before anything starts; docs/plan.md explains the model in words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property

from kog_dist.decode.plan.products import Product, RowShare, undivided
from kog_dist.decode.plan.schedule import RankPlan, Scheduler
from kog_dist.decode.plan.steps import Message, PlannedMailbox, Value, place
from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

LARGEST_VOCAB = 1 << 24  # candidates travel as float32, which counts exactly to here


@dataclass(frozen=True)
class Plan:
    """What every rank does in one pass. `token` numbers below count passes of the engine from 1 and never restart.

    `num_ctas`: thread blocks of each rank, among which products are divided; 1 on CPUs. `num_tokens`: most tokens of a pass that
    chooses, each of which has the steps, and in messages vectors of its own.
    """

    spec: ModelSpec
    world_size: int
    num_ctas: int
    mailboxes: tuple[PlannedMailbox, ...]
    ranks: tuple[RankPlan, ...]
    num_tokens: int = 1

    @cached_property
    def mailbox_by_name(self) -> dict[str, PlannedMailbox]:
        """The mailboxes by name."""
        return {mailbox.name: mailbox for mailbox in self.mailboxes}

    def place(self, value: Value) -> tuple[int, ...]:
        """Where a rank keeps a value, its lane included."""
        return (*place(value, self.spec.delay), value.lane)

    def epoch(self, message: Message, token: int) -> int:
        """Epoch of a message of the `token`-th step of the engine: at least 1, larger for every later message of the mailbox."""
        return token * self.mailbox_by_name[message.mailbox].per_token + message.sequence

    def slot(self, message: Message, token: int) -> int:
        """Slot of a message: its epoch modulo the slots of the mailbox."""
        return self.epoch(message, token) % self.mailbox_by_name[message.mailbox].num_slots

    def digest(self) -> str:
        """SHA-256 over everything in the plan: ranks that agree on it run the same program."""
        content = [
            self.spec.to_config(),
            self.world_size,
            self.num_ctas,
            [[box.name, box.num_slots, box.length, box.per_token] for box in self.mailboxes],
            [[part.rank, part.lanes, part.steps, list(map(_described, part.products))] for part in self.ranks],
            *([self.num_tokens] if self.num_tokens > 1 else []),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _described(product: Product) -> tuple[object, ...]:
    """A product for JSON."""
    rows: RowShare = product.rows
    return (*product._replace(rows=rows[:3]), None if rows.form is None else astuple(rows.form))  # type: ignore[arg-type]


def make_plan(
    spec: ModelSpec,
    world_size: int,
    products: Sequence[Sequence[Product]] | None = None,
    *,
    num_ctas: int = 1,
    checks_experts: bool = False,
    num_tokens: int = 1,
) -> Plan:
    """The plan of `spec` on `world_size` ranks, each with its `products`, divided among `num_ctas` thread blocks.

    Without them each rank multiplies phase by phase, undivided: that suits the interpreter, which joins neighbouring lanes. All
    orders make the same values.
    `num_tokens`: most tokens of a pass that chooses.
    `checks_experts`: in every layer with experts each rank compares its choice with those of all others.
    Deterministic. Raises ConfigError if the lanes cannot be spread over the ranks or the sizes cannot be run, PlanError for
    products with matrices that the model has not.
    """
    if spec.vocab_size > LARGEST_VOCAB:
        raise ConfigError(f"vocab_size {spec.vocab_size} is not supported: token ids must stay below {LARGEST_VOCAB}")
    spec.lanes_of_rank(0, world_size)  # raises if they cannot be spread
    lists = products or [undivided(spec, spec.lanes_of_rank(rank, world_size)) for rank in range(world_size)]
    schedulers = [Scheduler(spec, rank, world_size, own, checks_experts=checks_experts) for rank, own in enumerate(lists)]
    ranks = tuple(scheduler.rank_plan() for scheduler in schedulers)
    return Plan(spec, world_size, num_ctas, schedulers[0].mailboxes(), ranks, num_tokens)
