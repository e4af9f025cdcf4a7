"""The client in docs/rpc.md that needs no kog_dist, run as it is printed; and the tables against the code."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kog_dist.rpc.messages import EVENTS, REQUESTS, ErrorCode, StatusReport

StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
TEXT = (Path(__file__).parents[3] / "docs" / "rpc.md").read_text(encoding="utf-8")


def test_the_printed_client_works(start_engine: StartEngine, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    assert "kog_dist" not in program
    assert len(program.splitlines()) <= 43
    engine = start_engine("    return a + b\n")
    (tmp_path / "kog").mkdir(mode=0o700)
    (tmp_path / "kog" / "readme").symlink_to(engine.folder)
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("    return a + b\n" * 2)[:32] + "\n[length, 32 tokens]\n"


def test_the_tables_name_every_message_field_and_code() -> None:
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \|(.*)$", TEXT, re.M)}
    for tag, cls in [*REQUESTS.items(), *EVENTS.items()]:
        named = re.findall(r"`(\w+)`", rows[tag])
        for item in dataclasses.fields(cls):
            assert cls is StatusReport or item.name in named, f"docs/rpc.md does not explain {tag}.{item.name}"
    for code in ErrorCode:
        assert f"`{code.value}`" in TEXT
