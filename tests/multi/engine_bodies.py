"""What one rank does in the tests of whole engines on real communicators. A body takes a RankContext and returns JSON."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.ranks import RankContext
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.sampling_params import SamplingParams


def generate(context: RankContext) -> list[tuple[int, str]]:
    """Feed the prompt, then generate. For each sampled token: its id, and on rank 0 the SHA-256 of its logits."""
    arguments = context.arguments
    checkpoint = open_checkpoint(Path(arguments["folder"]))
    plan = make_plan(checkpoint.spec, context.info.world_size)
    comm = context.communicator([MailboxSpec(box.name, box.num_slots, box.length) for box in plan.mailboxes])
    weights = checkpoint.rank_weights(plan.ranks[context.info.rank].lanes)
    engine = Interpreter(plan, context.info.rank, weights, comm)
    sampling = SamplingParams(arguments["temperature"], arguments["seed"])
    prompt: list[int] = arguments["prompt"]
    results: list[tuple[int, str]] = []
    token = prompt[0]
    for position in range(len(prompt) + arguments["num_generated"]):
        is_inner = position < len(prompt) - 1
        output: Any = engine.step(token, position, None if is_inner else sampling, gather_logits=True)
        token = prompt[position + 1] if is_inner else output.token_id
        if not is_inner:
            digest = hashlib.sha256(output.logits.tobytes()).hexdigest() if output.logits is not None else ""
            results.append((output.token_id, digest))
    comm.barrier()
    comm.close()
    return results
