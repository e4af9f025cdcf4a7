"""What a coordinator says of its engine to clients."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from kog_dist.model.generation_config import shown_sampling
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.messages import EngineState, StatusReport, Welcome, build_hash
from kog_dist.runtime.control import ControlPage
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.decode_slot import DecodeSlots
from kog_dist.workers.coordinator.model_folder import ModelFolder
from kog_dist.workers.coordinator.open_requests import OpenRequests


def welcome(args: CoordinatorArgs, control: ControlPage, model: ModelFolder, state: EngineState) -> Welcome:
    """Who serves here."""
    return Welcome(
        build_hash(),
        args.instance,
        model.name,
        state,
        control.world_size,
        model.spec.max_context,
        model.spec.vocab_size,
        model.tokenizer is not None,
    )


def status_report(
    args: CoordinatorArgs, control: ControlPage, model: ModelFolder, state: EngineState, requests: OpenRequests,
    slots: DecodeSlots, counters: Counters, *, uptime_s: float, num_bad_messages: int,
) -> StatusReport:  # fmt: skip
    """The state of the engine and of every rank, what runs and waits, and what has been counted."""
    ranks, running = range(control.world_size), list(requests.running.items())
    positions = [slot.position for slot, _ in running]
    waits = [control.epoch_waits(rank) for rank in ranks]
    return StatusReport(
        state=state, instance=args.instance, model=model.name, build=build_hash(), pid=os.getpid(),
        world_size=control.world_size,
        rank_states=tuple(control.state(rank).name.lower() for rank in ranks),
        beat_ages_s=tuple(max(0.0, control.beat_age_s(rank)) for rank in ranks),
        rank_places=tuple(args.rank_places.splitlines()),
        epochs_waited=tuple(wait.num_epochs if wait is not None else None for wait in waits),
        waited_s=tuple(wait.waited_ns / 1e9 if wait is not None else None for wait in waits),
        uptime_s=uptime_s, prefill=control.has_prefill(), own_sampling=shown_sampling(model.own_sampling),
        running=running[0][1].request_id if running else None,
        also_running=tuple(stream.request_id for _, stream in running[1:]), parallel=len(slots.slots),
        used_positions=sum(positions),
        waiting=tuple(stream.request_id for stream in requests.queue),
        queue_limit=args.queue_limit, client_queue_limit=args.client_queue_limit,
        running_position=positions[0] if running else 0,
        running_prompt_tokens=len(running[0][1].request.prompt) if running else 0,
        num_bad_messages=num_bad_messages, **_kept(slots), **asdict(counters),
    )  # fmt: skip


def _kept(slots: DecodeSlots) -> dict[str, Any]:
    """What is kept of earlier requests."""
    blocks = slots.kept_blocks
    if blocks is None:
        return {"kept_ring": slots.ring_positions}
    used, used_of_host = blocks.num_used
    return {
        "kept_block_tokens": blocks.block_tokens,
        "kept_used": used,
        "kept_slots": blocks.num_slots,
        "kept_host_used": used_of_host,
        "kept_host_slots": blocks.num_host_slots,
        "kept_ring": slots.ring_positions,
        "kept_states_used": slots.kept_states.num_used,
        "kept_states": slots.kept_states.num_slots + slots.kept_states.num_host_slots,
    }
