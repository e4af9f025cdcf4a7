"""The table and the picture of `kog-bench collectives`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kog_dist.bench.report import drawn

_KCCL = "KCCL, "
_OWNERS, _EVERYONE = f"{_KCCL}row owner to row owner", f"{_KCCL}to every thread block"
# Of an all-reduce that leaves the whole vector with everybody, on H200s: by GPUs and bytes.
WANTED_US = {(4, 6144): 2.0, (4, 12288): 2.3}


def rows_of(figures: Mapping[str, Any], sizes: Sequence[int]) -> list[tuple[str, list[float | None]]]:
    """Name and microseconds for each size; None where there is no figure."""
    found: list[tuple[str, list[float | None]]] = []
    for everyone, name in ((False, _OWNERS), (True, _EVERYONE)):
        for ctas in (128, 48, 16):
            line: list[float | None] = []
            for num_bytes in sizes:
                fits = [e for e in figures["kccl"] if e["everyone"] == everyone and 4 * e["length"] == num_bytes]
                mine = [e["median_us"] for e in fits if e["length"] == e["rows"] * ctas]
                line.append(mine[0] if mine else None)
            found.append((f"{name}, {ctas} thread blocks", line))
    for variant, methods in figures["libraries"].items():
        for method, times in methods.items() if isinstance(methods, dict) else ():
            values = [times.get(str(num_bytes)) for num_bytes in sizes]
            found.append((f"{method} ({variant}), CUDA graph", [v if isinstance(v, float) else None for v in values]))
    return found


def kccl_table(figures: Mapping[str, Any], sizes: Sequence[int]) -> list[str]:
    """The lines that are printed of KCCL, with what is wanted."""
    lines = [f"all-reduce on {figures['world_size']} GPUs, us per dependent operation, synchronisation included"]
    lines.append(f"{'':48}" + "".join(f"{num_bytes / 1024:>8.0f} KB" for num_bytes in sizes))
    rows = [row for row in rows_of(figures, sizes) if row[0].startswith(_KCCL)]
    lines += [_line(*row) for row in rows]
    columns = zip(*(values for name, values in rows if name.startswith(_EVERYONE)), strict=True)
    best = [min((us for us in column if us is not None), default=None) for column in columns]
    wanted = [WANTED_US.get((figures["world_size"], num_bytes)) for num_bytes in sizes]
    lines += [_line("  the best of them", best), _line("  wanted, at most", wanted)] if any(wanted) else []
    hop = [entry["median_us"] for entry in figures["kccl"] if entry["length"] == 2]
    return lines + ([f"{'one word to every peer and back in':48}{hop[0]:>11.2f}"] if hop else [])


def library_table(figures: Mapping[str, Any], sizes: Sequence[int]) -> list[str]:
    """The lines that are printed of other libraries, and what they could not do."""
    lines = [_line(*row) for row in rows_of(figures, sizes) if not row[0].startswith(_KCCL)]
    for variant, methods in figures["libraries"].items():
        texts = {"all methods": {"": methods}} if isinstance(methods, str) else methods
        lines += [
            f"{method} ({variant}): {text}"
            for method, by_size in texts.items()
            for text in set(by_size.values())
            if isinstance(text, str)
        ]
    return lines


def kill_line(kill: Mapping[str, Any]) -> str:
    """The line of one kill."""
    left = ", ".join(f"{survivor['left_ms']:.1f}" for survivor in kill["survivors"])
    return f"killed while all spun: the others had left after {left} ms{'' if kill['good'] else '  BAD: ' + str(kill)}"


def _line(name: str, values: Sequence[float | None]) -> str:
    return f"{name:48}" + "".join(f"{'-' if value is None else format(value, '.2f'):>11}" for value in values)


def write(folder: Path, figures: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """`collectives.json`, and `collectives.png` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "collectives.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    drawn(lambda: _draw(folder / "collectives.png", figures, sizes))


def _draw(path: Path, figures: Mapping[str, Any], sizes: Sequence[int]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [(name, values) for name, values in rows_of(figures, sizes) if any(value is not None for value in values)]
    figure = Figure(figsize=(10, 1.2 + 0.4 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(sizes)
    for column, num_bytes in enumerate(sizes):
        places = [row + (column - (len(sizes) - 1) / 2) * height for row in range(len(lines))]
        axes.barh(places, [values[column] or 0 for _, values in lines], height, label=f"{num_bytes / 1024:.0f} KB")
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"us per dependent all-reduce on {figures['world_size']} GPUs, logarithmic")
    axes.legend()
    figure.savefig(path, dpi=120)
