"""Loss curves of a run as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kog_dist.bench.service.svg_plots import lines
from kog_dist.foreign_file import read_text

_STYLE = (
    "svg{background:#fff;font:11px sans-serif}text{fill:#333}.axis{stroke:#333}.grid{stroke:#ddd}.mark{stroke:#888;"
    "stroke-dasharray:3 3}.line{fill:none;stroke-width:1.5}.interval{stroke-width:2}"
    ".series-0{stroke:#1f77b4}.series-1{stroke:#d62728}.series-2{stroke:#2ca02c}.series-3{stroke:#9467bd}"
    ".dot.series-0{fill:#1f77b4}.dot.series-1{fill:#d62728}.dot.series-2{fill:#2ca02c}.dot.series-3{fill:#9467bd}"
)


def standalone(svg: str) -> str:
    """A picture of `svg_plots` as a file of its own, with its colours."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f"><style>{_STYLE}</style>", 1)


def write_curves(folder: Path, progress: Mapping[str, Any], data: Path) -> None:
    """Write `curves.json`, and `curves.svg` once there are two points: training and held-out loss over tokens."""
    settings = progress["settings"]
    step_tokens = settings["batch"] * settings["time"]
    steps = [step for step, _ in progress["losses"]]
    losses = {key: [loss for _, loss in progress[key]] for key in ("losses", "held_out_losses")}
    curves = {"data_digest": data_digest(data), "steps": steps, "tokens": [step * step_tokens for step in steps], **losses}
    (folder / "curves.json").write_text(json.dumps(curves) + "\n", encoding="utf-8")
    if len(steps) < 2:
        return
    millions = [step * step_tokens / 1e6 for step in steps]
    series = {
        name: list(zip(millions, losses[key], strict=True))
        for name, key in (("training", "losses"), ("held-out", "held_out_losses"))
    }
    (folder / "curves.svg").write_text(standalone(lines(series, "million tokens", "nats per token")), encoding="utf-8")


def data_digest(folder: Path) -> str | None:
    """The digest of a prepared data set, if its `sources.json` has one."""
    try:
        digest = json.loads(read_text(folder / "sources.json")).get("digest")
    except (OSError, ValueError):
        return None
    return str(digest) if digest is not None else None
