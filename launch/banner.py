"""What somebody who starts an engine at a terminal wants to know next: labelled lines below the one that says it is ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kog_dist.config import LaunchConfig
from kog_dist.launch import detach
from kog_dist.launch.events import EventLog, is_terminal, say
from kog_dist.launch.target import Target
from kog_dist.model.weight_bytes import formats

_LABEL_COLUMNS = 10


def show_banner(settings: LaunchConfig, url: str | None, facts: Mapping[str, str], events: EventLog) -> None:
    """Print where the service is, `facts` (by label), where logs are and how to stop; on a terminal, unless it shall be quiet."""
    if url is None or settings.quiet or not is_terminal("stdout"):
        return
    where = {} if url.startswith("unix:") else {"page": url, "API base": f"{url}/v1"}
    stop = f"Ctrl-C, which lets requests end for {settings.shutdown_timeout:g} s; again: at once"
    if detach.is_detached():
        stop = f"kog-client stop{'' if settings.instance is None else f' --instance {settings.instance}'}"
    shown = {**where, **facts, "logs": str(events.log_dir or events.without), "stop": stop}
    for label, text in shown.items():
        say(f"  {label:<{_LABEL_COLUMNS}}{text}")


def facts_of(target: Target) -> dict[str, str]:
    """Model, devices and context of an engine."""
    spec, checkpoint = target.checkpoint.spec, target.checkpoint
    places = Counter(target.place(rank) for rank in range(target.world_size))
    devices = [place if count == 1 else f"{count} x {place}" for place, count in places.items()]
    return {
        "model": f"{target.model_name}, {spec.num_parameters:,} parameters, {formats(checkpoint)}",
        "devices": "; ".join(devices),
        "context": f"{spec.max_context:,} tokens",
    }
