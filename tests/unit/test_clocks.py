"""A clock that is set must not end anything: waits and limits use the monotonic clock, wall time is for display."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kog_dist", "workers", "collectives", "launch")
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
SHOWN = {
    "kog_dist/bench/service/serve.py", "kog_dist/gateway/logs.py", "kog_dist/gateway/ollama/reply.py",
    "kog_dist/gateway/openai/planning.py", "kog_dist/gateway/service.py", "kog_dist/model/template_sandbox.py",
    "kog_dist/model/formats/rounded_cache.py",  # the age of files that nobody finished, by the clock that dated them
}  # fmt: skip


def wall_clocks(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {
        (node.module or "", alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return bool((names | imported) & WALL)


def test_only_what_is_shown_reads_the_wall_clock() -> None:
    paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {str(path.relative_to(ROOT)) for path in paths if wall_clocks(path)} == SHOWN
