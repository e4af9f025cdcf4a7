"""`kog-bench chaos`: a fault every few seconds for as long as wanted, over the whole table again and again."""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kog_dist.bench.chaos.cell import Answers, CellRun, Played
from kog_dist.bench.chaos.engine import ChaosEngine, Lateness, right_answers, write_model
from kog_dist.bench.chaos.table import STARTUP_S, Cell, Layout, cells
from kog_dist.bench.engine.injection import FaultKind, Point
from kog_dist.bench.report import commit, finish, machine, percentile
from kog_dist.errors import KogError

_SHOWN = 60
_LATE_S = 0.1  # of this process: beyond it a violation may be the machine's


class Chaos:
    """The engine of the moment, and what came of all cells so far."""

    def __init__(self, model: Path, ranks: int, answers: Answers, seed: int, parallel: int) -> None:
        self._model, self._ranks, self._answers, self._parallel = model, ranks, answers, parallel
        self._chance = random.Random(seed)
        self._engine: ChaosEngine | None = None
        self.played: list[tuple[Played, float]] = []  # with how late this process was meanwhile
        self.lateness = Lateness()
        threading.Thread(target=self.lateness.watch, daemon=True).start()

    def round(self, until_s: float, only: str) -> None:
        """Every cell whose name has `only` once, in random order but one layout after the other, until a time."""
        for layout in Layout:
            deck = [cell for cell in cells() if cell.layout is layout and only in str(cell) and self._exists(cell)]
            self._chance.shuffle(deck)
            for cell in deck:
                if time.monotonic() >= until_s:
                    break
                self.play(cell)
            self.retire()

    def _exists(self, cell: Cell) -> bool:
        return cell.role != "rank 1" or self._ranks > 1

    def play(self, cell: Cell, slack_s: float = 0.0) -> Played:
        """One cell, on the engine that is there if it can be used for it. `slack_s` is added to every limit."""
        begin_s = time.monotonic()
        is_another = self._engine is not None and self._engine.layout is not cell.layout
        if self._engine is not None and (is_another or cell.point is Point.LOAD or self._engine.is_worn(cell)):
            self.retire()
        if self._engine is None:
            is_held_up = (
                cell.point is Point.LOAD and cell.kind is FaultKind.STOP and cell.role.startswith(("rank", "coordinator"))
            )
            startup = {"startup_s": STARTUP_S} if is_held_up and cell.layout is Layout.SINGLE else {}
            self._engine = ChaosEngine(cell.layout, self._model, self._ranks, self._parallel, **startup)
        run = CellRun(self._engine, cell, self._answers, self._chance, slack_s)
        try:
            played = run.play()
        except (KogError, AssertionError) as error:
            played = run.played
            played.false_aborts.append(f"the engine could not be brought to the point of the fault: {error}")
        self._note(played, begin_s)
        if self._engine.launcher.poll() is not None or played.violations or played.false_aborts:
            self._engine.session.close()
            self._engine = None
        return played

    def _note(self, played: Played, begin_s: float) -> None:
        late_s = self.lateness.worst_s(begin_s)
        self.played.append((played, late_s))
        for name, found in (("VIOLATION", played.violations), ("FALSE ABORT", played.false_aborts)):
            for sentence in found:
                print(f"{name} {played.cell} (this process was {1e3 * late_s:.0f} ms late): {sentence}", flush=True)

    def retire(self) -> None:
        """Stop the engine of the moment; that it cannot be stopped well is an end without a fault."""
        if self._engine is not None:
            found = self._engine.retire()
            self._engine = None
            if found and self.played:
                print(f"FALSE ABORT at a stop: {found}", flush=True)
                self.played[-1][0].false_aborts.extend(found)

    def figures(self) -> dict[str, Any]:
        """All that is reported."""
        late = [late_s for _, late_s in self.lateness.samples]
        found = [
            {"cell": str(p.cell), "what": sentence, "late_ms": round(1e3 * late_s), "is_false_abort": sentence in p.false_aborts}
            for p, late_s in self.played
            for sentence in p.violations + p.false_aborts
        ]
        return {
            "faults": len(self.played),
            "violations": sum(len(p.violations) for p, _ in self.played),
            "violations_while_late": sum(len(p.violations) for p, late_s in self.played if late_s > _LATE_S),
            "false_aborts": sum(len(p.false_aborts) for p, _ in self.played),
            "lateness_ms": _summary(late),
            "by_role_and_kind": self._rows(),
            "found": found[:_SHOWN],
            "cells_with_findings": dict(Counter(str(p.cell) for p, _ in self.played if p.violations or p.false_aborts)),
        }

    def _rows(self) -> dict[str, dict[str, object]]:
        groups: dict[str, list[Played]] = defaultdict(list)
        for played, _ in self.played:
            groups[f"{played.cell.role} {played.cell.kind}"].append(played)
        return {
            name: {
                "faults": len(group),
                "error_ms": _summary([s for played in group for s in played.error_s]),
                "clean_ms": _summary([played.clean_s for played in group if played.clean_s is not None]),
                "ready_ms": _summary([played.ready_s for played in group if played.ready_s is not None]),
                "ends": dict(Counter(end for played in group for end in played.ends)),
            }
            for name, group in sorted(groups.items())
        }


def run(seconds: float, ranks: int, seed: int, output: Path, only: str, parallel: int) -> bool:
    """Do faults for so long; prints a table and the JSON object, which it also writes. True: nothing was wrong."""
    before = machine()
    with TemporaryDirectory(prefix="kog-chaos-") as folder:
        model = Path(folder) / "model"
        write_model(model)
        chaos = Chaos(model, ranks, right_answers(model), seed, parallel)
        begin_s = time.monotonic()
        try:
            while time.monotonic() - begin_s < seconds:
                chaos.round(begin_s + seconds, only)
                print(f"{time.monotonic() - begin_s:.0f} s: {_totals(chaos.figures())}", flush=True)
        finally:
            chaos.retire()
            figures = chaos.figures() | {"seconds": round(time.monotonic() - begin_s), "cores_used": _cores(begin_s)}
            configuration = {"seconds": seconds, "ranks": ranks, "parallel": parallel, "seed": seed, "only": only}
            whole = {
                "benchmark": "chaos",
                "commit": commit(),
                "machine": before,
                "configuration": configuration,
                "figures": figures,
            }
            output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            print(table(figures))
            finish("chaos", configuration, before, figures)
    return not figures["violations"] and not figures["false_aborts"]


def table(figures: dict[str, Any]) -> str:
    """Milliseconds by role and kind: p50 / p99 / max."""
    lines = [f"{'':34}{'faults':>6}{'client error':>22}{'nothing left':>22}{'serves again':>22}"]
    for name, row in figures["by_role_and_kind"].items():
        shown = "".join(f"{_shown(row[key]):>22}" for key in ("error_ms", "clean_ms", "ready_ms"))
        lines.append(f"{name:34}{row['faults']:>6}{shown}")
    return "\n".join([*lines, _totals(figures)])


def _totals(figures: dict[str, Any]) -> str:
    late = figures["lateness_ms"]
    return (
        f"{figures['faults']} faults, {figures['violations']} violations ({figures['violations_while_late']} while this process "
        f"was late), {figures['false_aborts']} false aborts; late by {_shown(late)} ms"
    )


def _summary(values: list[float]) -> dict[str, float]:
    """Of seconds, in milliseconds; empty without any."""
    if not values:
        return {}
    shown = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}
    return {name: round(1e3 * value, 1) for name, value in shown.items()}


def _shown(summary: dict[str, float]) -> str:
    return " / ".join(f"{value:.0f}" for value in summary.values()) if summary else "-"


def _cores(begin_s: float) -> float:
    """Cores that this process and its children have used since then, on average."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(usage.ru_utime + usage.ru_stime for usage in used) / (time.monotonic() - begin_s), 2)
