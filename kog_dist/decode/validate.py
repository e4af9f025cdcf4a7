"""Proves a plan fit to run, or says what is wrong with it. Run before anything starts; pure Python, no numbers.

The rules, in the order in which they are looked at:
1. Every lane lives on exactly one rank, neighbours together and in the order of ranks (so that a rank's sum is a subtree).
2. Mailboxes have names of their own, and no more slots than two tokens use.
3. Every row of every matrix, the vocabulary's included, is on exactly one CTA's tape; rows are balanced; a row of the hidden size
   has the same owner everywhere.
4. Run over several tokens, in whatever order the ranks run (`flow`): every step reads what it must, made of what the model
   defines (`definition`), no step waits for what never comes, every message has its readers, and no slot is rewritten before
   it was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from kog_dist.decode.flow import Flow
from kog_dist.decode.plan import Plan
from kog_dist.decode.steps import WEIGHT_PHASES, Phase, RankPlan, RowSplit
from kog_dist.errors import PlanError
from kog_dist.model.spec import ModelSpec


def validate(plan: Plan) -> list[str]:
    """What is wrong with `plan`, in words; an empty list accepts it."""
    return list(_findings(plan))


@lru_cache(maxsize=16)
def _findings(plan: Plan) -> tuple[str, ...]:
    findings = [*_lane_findings(plan), *_mailbox_findings(plan)]
    findings += [finding for part in plan.ranks for finding in _tape_findings(plan, part)]
    return tuple(findings or Flow(plan).run())


def check(plan: Plan) -> None:
    """Raise PlanError listing the findings, if there are any."""
    findings = validate(plan)
    if findings:
        raise PlanError("the plan cannot be run:\n  " + "\n  ".join(findings))


def _lane_findings(plan: Plan) -> Iterator[str]:
    spec, world_size = plan.spec, plan.world_size
    if [part.rank for part in plan.ranks] != list(range(world_size)):
        yield f"the ranks are {[part.rank for part in plan.ranks]}, expected 0 .. {world_size - 1} in order"
        return
    if world_size < 1 or spec.num_lanes % world_size:
        yield f"{spec.num_lanes} lanes cannot be spread over {world_size} ranks"
        return
    for part in plan.ranks:
        if part.lanes != tuple(spec.lanes_of_rank(part.rank, world_size)):
            yield f"rank {part.rank} hosts lanes {part.lanes}, expected {tuple(spec.lanes_of_rank(part.rank, world_size))}"


def _mailbox_findings(plan: Plan) -> Iterator[str]:
    if len(plan.mailbox_by_name) != len(plan.mailboxes):
        yield "two mailboxes have one name"
    for box in plan.mailboxes:
        if box.per_token < 1 or not 1 <= box.num_slots <= 2 * box.per_token:
            allowed = f"use 1 to {2 * box.per_token}"
            yield f"mailbox {box.name} has {box.num_slots} slots for {box.per_token} messages a token; {allowed}"
        if box.length < 1:
            yield f"mailbox {box.name} has room for {box.length} values"
    for part in plan.ranks:
        for step in part.steps:
            for message in (step.publishes, step.waits):
                if message is None:
                    continue
                if message.mailbox not in plan.mailbox_by_name:
                    yield f"rank {part.rank}: {step.phase.name} uses mailbox {message.mailbox!r}, which is not declared"
                elif not 0 <= message.sequence < plan.mailbox_by_name[message.mailbox].per_token:
                    yield f"rank {part.rank}: {step.phase.name} uses message {message.sequence} of {message.mailbox} in a token"
                if any(not 0 <= peer < plan.world_size for peer in message.peers):
                    yield f"rank {part.rank}: {step.phase.name} names peers {message.peers}, some of which do not exist"


def _tape_findings(plan: Plan, part: RankPlan) -> Iterator[str]:
    spec = plan.spec
    splits: dict[tuple[Phase, int], RowSplit] = {(split.phase, split.lane): split for split in part.splits}
    expected = {(phase, lane) for phase in WEIGHT_PHASES for lane in part.lanes}
    if set(splits) != expected or len(part.splits) != len(expected):
        yield f"rank {part.rank}: the row splits are not one for each phase and hosted lane"
        return
    residual_rows = {splits[phase, lane].rows for phase in (Phase.OUT, Phase.DOWN) for lane in part.lanes}
    if len(residual_rows) != 1:
        yield f"rank {part.rank}: rows of the hidden size have different owners in some lanes or in OUT and DOWN"
    for split in part.splits:
        yield from _split_findings(plan, part, split, _num_rows(spec, split), unit=2 if split.phase is Phase.QKV else 1)


def _split_findings(plan: Plan, part: RankPlan, split: RowSplit, num_rows: int, unit: int) -> Iterator[str]:
    name = f"rank {part.rank}, {split.phase.name} of lane {split.lane}"
    if len(split.rows) != plan.num_ctas:
        yield f"{name}: rows of {len(split.rows)} CTAs, expected {plan.num_ctas}"
    next_row = 0
    for first, count in sorted(rows for rows in split.rows if rows[1]):
        if first != next_row or count < 0:
            yield f"{name}: rows {min(first, next_row)} .. {max(first, next_row)} are on no tape, or on two"
            return
        next_row = first + count
    if next_row != num_rows:
        yield f"{name}: {next_row} rows on the tapes, the matrix has {num_rows}"
    counts = [count for _, count in split.rows]
    if max(counts) - min(counts) > unit or any(count % unit for count in counts):
        yield f"{name}: rows are not balanced over the CTAs (from {min(counts)} to {max(counts)})"


def _num_rows(spec: ModelSpec, split: RowSplit) -> int:
    first, last = spec.vocab_slice(split.lane)
    return {
        Phase.QKV: spec.lane_qkv_rows,
        Phase.OUT: spec.hidden_size,
        Phase.GATE_UP: spec.lane_ffn,
        Phase.DOWN: spec.hidden_size,
        Phase.HEAD: last - first,
    }[split.phase]
