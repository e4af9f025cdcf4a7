"""Plans whose products have the order of GPUs, undivided: so that CPU ranks can run it."""

from __future__ import annotations

from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.products import undivided
from kog_dist.model.spec import ModelSpec


def staggered_plan(spec: ModelSpec, world_size: int, *, checks_experts: bool = False) -> Plan:
    """The plan of all ranks."""
    lanes = (spec.lanes_of_rank(rank, world_size) for rank in range(world_size))
    return make_plan(spec, world_size, [undivided(spec, own, staggered=True) for own in lanes], checks_experts=checks_experts)
