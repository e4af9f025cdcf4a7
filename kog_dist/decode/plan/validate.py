"""Proves a plan fit to run, or says what is wrong with it. Run before anything starts; pure Python, no numbers.

The rules, in the order in which they are looked at:
1. Every lane lives on exactly one rank, neighbours together and in the order of ranks (so that a rank's sum is a subtree).
2. Mailboxes have names of their own, and no more slots than two tokens use.
3. Run over several tokens, in whatever order the ranks run (`flow`): every step reads what it must, made of what the model
   defines (`definition`), no step waits for what never comes, every message has its readers, and no slot is rewritten before
   it was read.
4. Products are the steps that multiply, in their order; every row of every matrix, the vocabulary's included, has one owner, and
   every column a warp; a row of the hidden size has the same owner everywhere (`product_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from kog_dist.decode.plan.flow import Flow
from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.plan.product_rules import product_findings
from kog_dist.errors import PlanError


def validate(plan: Plan) -> list[str]:
    """What is wrong with `plan`, in words; an empty list accepts it."""
    return list(_findings(plan))


@lru_cache(maxsize=16)
def _findings(plan: Plan) -> tuple[str, ...]:
    findings = [*_lane_findings(plan), *_mailbox_findings(plan)] or Flow(plan).run()
    return tuple(findings or [finding for part in plan.ranks for finding in product_findings(plan, part)])


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
