"""What `kog-client` shows people: the figures of an answer, the state of an engine."""

from __future__ import annotations

from kog_dist.quoting import escaped
from kog_dist.rpc.messages import Done, StatusReport


def statistics(done: Done) -> str:
    """Of a finished answer, in one line."""
    cached = f" ({done.num_cached_tokens} cached)" if done.num_cached_tokens else ""
    generated = f"{done.num_generated_tokens} generated ({done.finish_reason.value})"
    parts = [f"{done.num_prompt_tokens} prompt tokens{cached}", generated]
    if done.ttft_s is not None:
        parts.append(f"first after {done.ttft_s * 1e3:.1f} ms")
    if done.tokens_per_s is not None:
        parts.append(f"{done.tokens_per_s:.1f} tokens/s")
    if done.itl_p50_s is not None and done.itl_p99_s is not None:
        parts.append(f"gaps p50 {done.itl_p50_s * 1e3:.2f} ms, p99 {done.itl_p99_s * 1e3:.2f} ms")
    if done.num_drafted_tokens:
        parts.append(f"{done.num_accepted_tokens} of {done.num_drafted_tokens} drafted tokens right")
    return ", ".join(parts)


def headline(report: StatusReport) -> str:
    """Who an engine is, in one line; to be escaped."""
    num_replicas = len(report.replica_names)
    runs_on = _count(num_replicas, "replica") if num_replicas else _count(report.world_size, "rank")
    what = f"{report.model} on {runs_on}" if report.model else "no model yet"
    return f"{report.instance}: {report.state.value}, {what}, up {report.uptime_s:.0f} s"


def describe(report: StatusReport) -> str:
    """An engine, or replicas behind a router, in a few lines."""
    states = ", ".join(f"{idx}: {state}" for idx, state in enumerate(report.rank_states)) or "-"
    is_router = bool(report.replica_names)
    of_one = f", {report.client_queue_limit} of one client" if report.client_queue_limit else ""
    lines = "\n".join(
        [
            headline(report),
            f"ranks    {states}{' (of all replicas, one after the other)' if is_router else ''}",
            *(f"rank {rank:<4}on {place}" for rank, place in enumerate(report.rank_places)),
            f"prompts  {'in blocks, through prefill' if report.prefill else 'by the decoder'}",
            *([f"sampling {report.own_sampling} by default over HTTP"] if report.own_sampling else []),
            *([f"kept     {_kept(report)}"] if report.kept_slots or report.kept_ring else []),
            f"running  {_running(report)}",
            f"waiting  {' '.join(report.waiting) or '-'} (at most {report.queue_limit}{of_one})",
            f"requests {report.num_completed} completed, {report.num_cancelled} cancelled, {report.num_expired} expired, "
            f"{report.num_failed} failed, {report.num_refused} refused; {report.num_tokens} tokens",
            f"clients  {report.num_dropped_clients} lost or dropped, {report.num_bad_messages} bad messages",
            *_describe_replicas(report),
        ]
    )
    return escaped(lines)


def _kept(report: StatusReport) -> str:
    if not report.kept_slots:
        return f"the last sequence; windowed layers have a ring of {report.kept_ring} positions"
    of_host = f", {report.kept_host_used} of {report.kept_host_slots} behind them on the host" if report.kept_host_slots else ""
    states = f", {report.kept_states_used} of {report.kept_states} copies of states" if report.kept_states else ""
    return f"{report.kept_used} of {report.kept_slots} blocks of {report.kept_block_tokens} tokens{of_host}{states}"


def _running(report: StatusReport) -> str:
    if report.running is None:
        return "-"
    num_prompt, position = report.running_prompt_tokens, report.running_position
    stage = f"prefill {position} of {num_prompt}" if position < num_prompt else f"{position - num_prompt} tokens generated"
    others = f", {' '.join(report.also_running)}" if report.also_running else ""
    of = f"; {len(report.all_running)} of {report.parallel} together" if report.parallel > 1 else ""
    return f"{report.running} ({stage}){others}{of}"


def _describe_replicas(report: StatusReport) -> list[str]:
    columns = (report.replica_names, report.replica_states, report.replica_addresses, report.replica_running)
    num_ranks = (*report.replica_ranks, *[0] * len(report.replica_names))
    return [
        f"{name:<8} {state}, {_count(ranks, 'rank') if ranks else 'ranks not known'}, {address}, running {running or '-'}"
        for name, state, address, running, ranks in zip(*columns, num_ranks, strict=False)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
