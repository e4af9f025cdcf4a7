"""`/kog/info`: the engine, its ranks and its speed as one JSON object, for the playground and for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kog_dist import __version__
from kog_dist.gateway.engine_facts import devices
from kog_dist.rpc.messages import StatusReport

if TYPE_CHECKING:
    from kog_dist.gateway.openai.served import ServedModel
    from kog_dist.gateway.service import Service


def describe(service: Service) -> dict[str, Any]:
    """Everything known at this moment; null where nobody knows."""
    health, report, welcome = service.readiness.health(), service.readiness.report, service.welcome
    return {
        "version": __version__,
        "url": service.url,
        "uptime_s": round(time.monotonic() - service.begin_s, 3),
        "state": str(health.state),
        "reason": health.reason,
        "model": None if service.served is None else _model(service, service.served),
        "instance": welcome.instance if welcome is not None else None,
        "speed": _speed(service),
        "engine": None if report is None else _engine(report),
        "devices": [] if report is None else [{"name": name, "count": count} for name, count in devices(report).items()],
        "ranks": [] if report is None else _ranks(report),
        "replicas": [] if report is None else _replicas(report),
    }


def _model(service: Service, served: ServedModel) -> dict[str, object]:
    """Size, lanes and format are the folder's, of which a gateway by itself may know nothing."""
    spec = None if service.checkpoint is None else service.checkpoint.spec
    return {
        **served.card(),
        "vocab_size": served.vocab_size,
        "has_tokenizer": service.tokenizer is not None,
        "num_parameters": None if spec is None else spec.num_parameters,
        "num_lanes": None if spec is None else spec.num_lanes,
        "format": service.weights_format,
    }


def _speed(service: Service) -> dict[str, object]:
    """Of the newest request through this gateway, and what it says about the memory bandwidth."""
    newest, facts = service.metrics.newest, service.facts
    rate = newest.tokens_per_s if newest is not None else 0.0
    known = bool(facts.bytes_per_token and facts.peak_bytes_s)
    return {
        "tokens_per_s": round(rate, 1) if rate else None,
        "ttft_s": round(newest.ttft_s, 6) if newest is not None and newest.ttft_s is not None else None,
        "num_tokens": newest.num_tokens if newest is not None else None,
        "is_running": newest is not None and not newest.ended,
        "bytes_per_token": facts.bytes_per_token or None,
        "peak_bytes_s": facts.peak_bytes_s or None,
        "peak_source": facts.peak_source if known else None,
        "bandwidth_share": round(rate * facts.bytes_per_token / facts.peak_bytes_s, 4) if known and rate else None,
        "ceiling_tokens_per_s": round(facts.peak_bytes_s / facts.bytes_per_token, 1) if known else None,
    }


def _engine(report: StatusReport) -> dict[str, object]:
    return {
        "state": str(report.state), "build": report.build, "pid": report.pid, "uptime_s": round(report.uptime_s, 3),
        "num_running": report.num_running, "parallel": report.parallel,
        "num_waiting": len(report.waiting), "queue_limit": report.queue_limit,
        "prefill": report.prefill, "own_sampling": report.own_sampling,
        "running_position": report.running_position, "running_prompt_tokens": report.running_prompt_tokens,
        "num_tokens": report.num_tokens, "num_completed": report.num_completed, "num_cancelled": report.num_cancelled,
        "num_failed": report.num_failed, "num_refused": report.num_refused, "num_expired": report.num_expired,
    }  # fmt: skip


def _ranks(report: StatusReport) -> list[dict[str, object]]:
    places = (*report.rank_places, *[None] * len(report.rank_states))
    return [
        {"rank": rank, "state": state, "beat_age_s": round(age_s, 4), "place": place}
        for rank, (state, age_s, place) in enumerate(zip(report.rank_states, report.beat_ages_s, places, strict=False))
    ]


def _replicas(report: StatusReport) -> list[dict[str, object]]:
    return [
        {"name": name, "state": state, "is_running": bool(running)}
        for name, state, running in zip(report.replica_names, report.replica_states, report.replica_running, strict=False)
    ]
