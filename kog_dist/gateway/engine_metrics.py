"""What the engine's own reports say, as Prometheus metrics: state, ranks, queue, replicas, and the bandwidth it uses.

Everything is made from the last `StatusReport` when somebody asks: nothing of a rank or replica that is gone stays behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kog_dist.records import dataclass
from kog_dist.rpc.messages import EngineState, StatusReport

UNREACHABLE = "unreachable"  # the state of an engine that does not answer
STATES = (*EngineState, UNREACHABLE)
RANK_STATES = ("starting", "loading", "linking", "ready", "running", "stopped", "failed")  # of kog_dist.runtime.control.RankState
LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine runs. Zero where nobody knows.

    `bytes_per_token`: weights that all ranks together read for one token; the KV cache comes on top. `peak_bytes_s`: memory
    bandwidth of all devices together, and `peak_source` where that figure comes from ("4.8 TB/s data sheet of an H200").
    """

    max_context: int = 0
    bytes_per_token: int = 0
    peak_bytes_s: float = 0.0
    peak_source: str = "unknown"


@dataclass(slots=True)
class EngineView:
    """The last report, and when it came. `reported_s` is None before the first one."""

    clock: Callable[[], float]
    facts: EngineFacts = EngineFacts()
    report: StatusReport | None = None
    reported_s: float | None = None
    reachable: bool = False

    def update(self, report: StatusReport | None) -> None:
        """Take a report; None: the engine was asked and does not answer."""
        self.reachable = report is not None
        if report is not None:
            self.report, self.reported_s = report, self.clock()

    def families(self, model_name: str, tokens_per_s: float) -> Iterator[Metric]:
        """All metrics of the engine. `tokens_per_s`: decode speed of the newest request, 0 before the first."""
        labels = [model_name, "0"]
        state = self.report.state if self.report is not None and self.reachable else UNREACHABLE
        yield _one_hot("kog:engine_state", "1 for the state the engine is in.", labels, STATES, state)
        yield from self._speed(labels, tokens_per_s)
        if self.report is None or self.reported_s is None:
            return
        age_s = max(0.0, self.clock() - self.reported_s)
        yield _gauge("kog:engine_report_age_seconds", "Seconds since the engine last reported.", labels, age_s)
        if self.reachable:
            yield from _queue(self.report, self.facts, labels)
            yield from _ranks(self.report, labels)
        yield from _totals(self.report, labels)

    def _speed(self, labels: list[str], tokens_per_s: float) -> Iterator[Metric]:
        facts = self.facts
        text = "Decode speed of the newest request: tokens after the first per second."
        yield _gauge("kog:decode_tokens_per_second", text, labels, tokens_per_s)
        if not facts.bytes_per_token:
            return
        text = "Bytes of weights that all ranks together read for one token."
        yield _gauge("kog:bytes_per_token", text, labels, facts.bytes_per_token)
        if facts.peak_bytes_s:
            labelled = [*labels, facts.peak_source]
            text = "Memory bandwidth of all devices together; `peak` says where the figure comes from."
            yield _gauge("kog:memory_peak_bytes_per_second", text, labelled, facts.peak_bytes_s, extra=("peak",))
            share = tokens_per_s * facts.bytes_per_token / facts.peak_bytes_s
            text = "Decode speed of the newest request x bytes per token / peak bandwidth."
            yield _gauge("kog:memory_bandwidth_share", text, labelled, share, extra=("peak",))


def _queue(report: StatusReport, facts: EngineFacts, labels: list[str]) -> Iterator[Metric]:
    running, waiting = "Requests that are being decoded", "Requests that wait in the engine"
    yield _gauge("kog:num_requests_running", f"{running}.", labels, report.num_running)
    yield _gauge("kog:num_requests_waiting", f"{waiting}.", labels, len(report.waiting))
    yield _gauge("kog:requests_processing", f"{running}, as llama.cpp calls it.", labels, report.num_running)
    yield _gauge("kog:requests_deferred", f"{waiting}, as llama.cpp calls it.", labels, len(report.waiting))
    yield _gauge("kog:queue_limit", "Requests that may wait.", labels, report.queue_limit)
    used = max(report.used_positions, report.running_position)  # a router tells of one request
    used_share = used / (facts.max_context * report.parallel) if facts.max_context else 0.0
    text = "Share of the contexts that running requests fill, from 0 to 1; kept caches of earlier ones do not count."
    yield _gauge("kog:kv_cache_usage_perc", text, labels, used_share)
    yield from _kept(report, labels)
    if report.replica_names:
        family = GaugeMetricFamily("kog:num_replicas", "Engines behind the router by state.", labels=(*LABELS, "state"))
        counts = Counter(state.split(maxsplit=1)[0].rstrip(":,") or "unknown" for state in report.replica_states)
        for name in sorted({"ready", *counts}):
            family.add_metric([*labels, name], counts[name])
        yield family


def _kept(report: StatusReport, labels: list[str]) -> Iterator[Metric]:
    """The block pool's tokens, and copies of states; nothing without one."""
    names = (*LABELS, "memory")
    used = GaugeMetricFamily("kog:kept_tokens", "Tokens of earlier requests that blocks are taken for.", labels=names)
    room = GaugeMetricFamily("kog:kept_tokens_limit", "Tokens of earlier requests that there are blocks for.", labels=names)
    for memory, num_used, num_slots in (
        ("device", report.kept_used, report.kept_slots),
        ("host", report.kept_host_used, report.kept_host_slots),
    ):
        if num_slots:
            used.add_metric([*labels, memory], num_used * report.kept_block_tokens)
            room.add_metric([*labels, memory], num_slots * report.kept_block_tokens)
    if room.samples:
        yield used
        yield room
    if report.kept_states:
        text = "Copies of states of earlier requests"
        yield _gauge("kog:kept_states", f"{text} that are kept.", labels, report.kept_states_used)
        yield _gauge("kog:kept_states_limit", f"{text} that there is room for.", labels, report.kept_states)


def _ranks(report: StatusReport, labels: list[str]) -> Iterator[Metric]:
    yield _gauge("kog:num_ranks", "Rank processes of the engine.", labels, report.world_size)
    text = "1: prompts go through prefill on all ranks, in blocks of many tokens; 0: by the decoder."
    yield _gauge("kog:prefill", text, labels, report.prefill)
    names = (*LABELS, "rank")
    ages = GaugeMetricFamily("kog:rank_heartbeat_age_seconds", "Seconds since a rank's last heartbeat.", labels=names)
    states = GaugeMetricFamily("kog:rank_state", "1 for the state a rank is in.", labels=(*names, "state"))
    for rank, (age_s, state) in enumerate(zip(report.beat_ages_s, report.rank_states, strict=False)):
        ages.add_metric([*labels, str(rank)], age_s)
        for name in RANK_STATES:
            states.add_metric([*labels, str(rank), name], name == state)
    yield ages
    yield states
    for name, text, values in (
        ("kog:epochs_waited", "Epochs of peers' values that were not there when a rank first looked.", report.epochs_waited),
        ("kog:epoch_wait_seconds", "Seconds that a rank waited for them.", report.waited_s),
    ):
        waits = CounterMetricFamily(name, text, labels=names)
        for rank, value in enumerate(values):
            if value is not None:  # device programs do not count
                waits.add_metric([*labels, str(rank)], value)
        if waits.samples:
            yield waits


def _totals(report: StatusReport, labels: list[str]) -> Iterator[Metric]:
    """Counters of the engine since its start: they begin anew with it, as Prometheus expects of counters."""
    yield _gauge("kog:engine_uptime_seconds", "Seconds since the engine's coordinator started.", labels, report.uptime_s)
    requests = CounterMetricFamily(
        "kog:engine_requests", "Requests of all clients that the engine has ended, by outcome.", labels=(*LABELS, "outcome")
    )
    for outcome in ("completed", "cancelled", "failed", "refused", "expired"):
        requests.add_metric([*labels, outcome], getattr(report, f"num_{outcome}"))
    yield requests
    for name, text, value in (
        ("kog:engine_tokens", "Tokens that the engine has sent to all clients.", report.num_tokens),
        ("kog:engine_dropped_clients", "RPC clients that lost requests by going or not reading.", report.num_dropped_clients),
        ("kog:engine_bad_messages", "RPC messages that were refused as malformed.", report.num_bad_messages),
    ):
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(labels, value)
        yield family


def _gauge(name: str, text: str, values: list[str], value: float, *, extra: tuple[str, ...] = ()) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(*LABELS, *extra))
    family.add_metric(values, value)
    return family


def _one_hot(name: str, text: str, labels: list[str], states: tuple[str, ...], current: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(*LABELS, "state"))
    for state in states:
        family.add_metric([*labels, str(state)], state == current)
    return family
