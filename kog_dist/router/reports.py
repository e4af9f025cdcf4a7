"""What a router says of itself: to clients as one engine with many ranks, to the launcher in full."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kog_dist.router.fleet import Fleet
from kog_dist.router.link import LinkState, ReplicaLink
from kog_dist.router.orders import FleetReport, ReplicaReport
from kog_dist.router.requests import RoutedRequest
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.messages import EngineState, StatusReport, Welcome, build_hash

_SHOWN = 4096  # items of an array in a status report
# Of replicas that have blocks of the same size.
_SUMMED = ("used_positions", "kept_used", "kept_slots", "kept_host_used", "kept_host_slots", "kept_states_used", "kept_states")
_Value = TypeVar("_Value")


def engine_state(fleet: Fleet, *, is_draining: bool) -> EngineState:
    """What clients may expect: ready as soon and as long as one replica is."""
    states = {link.state for link in fleet.links()}
    if is_draining:
        return EngineState.DRAINING
    return EngineState.READY if LinkState.READY in states else EngineState.LOADING


def welcome(fleet: Fleet, instance: str, *, is_draining: bool) -> Welcome | None:
    """Who serves here; None before the first replica has said it."""
    served = fleet.served
    if served is None:
        return None
    state = engine_state(fleet, is_draining=is_draining)
    return Welcome(
        build_hash(),
        instance,
        served.model,
        state,
        _world_size(fleet),
        served.max_context,
        served.vocab_size,
        served.has_tokenizer,
    )


def status_report(
    fleet: Fleet, instance: str, counters: Counters, attempts: Mapping[str, RoutedRequest], waiting: Sequence[str], *,
    max_waiting: int, max_waiting_of_one: int, uptime_s: float, num_bad_messages: int, is_draining: bool,
) -> StatusReport:  # fmt: skip
    """Everything about the fleet; ranks are those of all replicas, one replica after the other."""
    links = fleet.links()
    running = dict[ReplicaLink | None, list[str]]()  # in the order in which they began
    for request in attempts.values():
        running.setdefault(request.link, []).append(request.request_id)
    all_running = [request.request_id for request in attempts.values()]
    position, num_prompt_tokens = _progress(running)
    reports = [link.report for link in links if link.report is not None]
    of_all = reports if len(reports) == len(links) else []  # a counter must not slip to another rank while a replica is away
    return StatusReport(
        state=engine_state(fleet, is_draining=is_draining), instance=instance,
        model=fleet.served.model if fleet.served is not None else "", build=build_hash(), pid=os.getpid(),
        world_size=_world_size(fleet),
        rank_states=tuple(state for report in reports for state in report.rank_states)[:_SHOWN],
        beat_ages_s=tuple(age_s for report in reports for age_s in report.beat_ages_s)[:_SHOWN],
        epochs_waited=tuple(count for report in of_all for count in _of_ranks(report.epochs_waited, report))[:_SHOWN],
        waited_s=tuple(waited_s for report in of_all for waited_s in _of_ranks(report.waited_s, report))[:_SHOWN],
        prefill=bool(of_all) and all(report.prefill for report in of_all),
        uptime_s=uptime_s, running=next(iter(all_running), None), waiting=tuple(waiting)[:_SHOWN],
        queue_limit=max_waiting, client_queue_limit=max_waiting_of_one,
        num_completed=counters.num_completed, num_cancelled=counters.num_cancelled,
        num_failed=counters.num_failed, num_refused=counters.num_refused, num_dropped_clients=counters.num_dropped_clients,
        num_bad_messages=num_bad_messages, num_tokens=counters.num_tokens,
        num_expired=counters.num_expired, running_position=position, running_prompt_tokens=num_prompt_tokens,
        replica_names=tuple(link.name for link in links),
        replica_states=tuple(_shown_state(link) for link in links),
        replica_addresses=tuple(link.order.access.address for link in links),
        replica_running=tuple(" ".join(running.get(link, ()))[:1024] for link in links),
        also_running=tuple(all_running[1:_SHOWN]),
        parallel=sum(link.num_places for link in links if link.is_usable()),
        replica_ranks=tuple(map(_num_ranks, links)),
        kept_block_tokens=max((report.kept_block_tokens for report in reports), default=0),
        kept_ring=max((report.kept_ring for report in reports), default=0),
        **{name: sum(getattr(report, name) for report in reports) for name in _SUMMED},
    )  # fmt: skip


def fleet_report(fleet: Fleet, num_waiting: int, is_draining: bool, address: str) -> FleetReport:
    """What the launcher needs to know."""
    replicas = tuple(
        ReplicaReport(
            link.name,
            link.order.generation,
            link.state.value,
            link.reason,
            len(link.attempt_ids),
            link.order.is_retiring,
            link.welcome.model if link.welcome is not None else "",
            _num_ranks(link),
        )
        for link in fleet.links()
    )
    return FleetReport(replicas, num_waiting, is_draining, address)


def _of_ranks(values: tuple[_Value | None, ...], report: StatusReport) -> tuple[_Value | None, ...]:
    """As many values as the replica shows ranks, so that those of the next replica stand at their ranks."""
    num_ranks = len(report.rank_states)
    return (*values, *[None] * num_ranks)[:num_ranks]


def _progress(running: Mapping[ReplicaLink | None, Sequence[str]]) -> tuple[int, int]:
    """How far the request is that the report names as running, and how long its prompt is, as of its replica's last report."""
    report = next((link.report for link in running if link is not None), None)
    return (report.running_position, report.running_prompt_tokens) if report is not None else (0, 0)


def _world_size(fleet: Fleet) -> int:
    return sum(map(_num_ranks, fleet.links()))


def _num_ranks(link: ReplicaLink) -> int:
    return link.welcome.world_size if link.welcome is not None else 0


def _shown_state(link: ReplicaLink) -> str:
    state = "retiring" if link.order.is_retiring and link.state is LinkState.READY else link.state.value
    return f"{state}: {link.reason}"[:1000] if link.reason else state
