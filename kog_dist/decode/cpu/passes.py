"""How many tokens a pass of the weights has on CPU ranks: of a prompt, and of drafts."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.decode.draft_lengths import SIZES
from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.plan.steps import Phase, When

MOST_TOKENS = 64
_LEAST_TOKENS = 8
_WORK = 50e9  # multiplications of a rank in a pass, about a second: cancels are looked for between passes
_BOX_BYTES = 64 << 20  # of a rank, for all that it hears in a pass
_WORD_BYTES = 8


def most_tokens(plan: Plan) -> int:
    """Of a prompt, in one pass: a power of two, the same on all ranks."""
    spec = plan.spec
    d = spec.hidden_size
    work = sum(layer.mixer.num_values(d) + layer.ffn.num_read(d) for layer in spec.layers) / plan.world_size
    names = pass_mailboxes(plan) if plan.world_size > 1 else frozenset()
    tokens = MOST_TOKENS
    while tokens > _LEAST_TOKENS and tokens * work > _WORK:
        tokens //= 2
    while tokens > 1 and tokens * _box_bytes(plan, names) > _BOX_BYTES:
        tokens //= 2
    return tokens


def most_verified(plan: Plan) -> int:
    """Tokens of a pass that chooses: one of SIZES, the same on all ranks."""
    of_token = _box_bytes(plan, frozenset(box.name for box in plan.mailboxes)) if plan.world_size > 1 else 0
    return max(size for size in SIZES if size == 1 or size * of_token <= _BOX_BYTES)


def _box_bytes(plan: Plan, names: frozenset[str]) -> int:
    """Of a rank's mailboxes, for one token of a pass."""
    return _WORD_BYTES * sum(box.num_slots * plan.world_size * box.length for box in plan.mailboxes if box.name in names)


def pass_mailboxes(plan: Plan) -> frozenset[str]:
    """Those that carry something of each token of a pass, rather than one thing of the pass."""
    steps = [step for part in plan.ranks for step in part.steps if step.when is When.ALWAYS and step.phase is not Phase.SAMPLE]
    return frozenset(message.mailbox for step in steps for message in (step.publishes, step.waits) if message is not None)


def pass_sizes(num_tokens: int, most: int) -> Iterator[int]:
    """Passes for so many tokens: as many of `most` as there are, then ever smaller powers of two."""
    size = most
    while num_tokens:
        while size > num_tokens:
            size //= 2
        yield size
        num_tokens -= size
