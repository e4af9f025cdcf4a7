"""What somebody at a terminal sees of a first start, which compiles."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until
from tests.e2e.launcher_terminal import Terminal

ENDED_S = 60.0  # no promise, only an end of waiting; a loaded machine is slow
_SLOW_COMPILER = """#!/bin/sh
case "$1" in
--version) exec {compiler} --version ;;
*) read line < {folder}/go; exec {compiler} "$@" ;;
esac
"""


def test_a_first_start_says_with_a_bar_that_it_compiles(session: EngineSession, demo_model: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    tools = session.folder / "tools"
    tools.mkdir()
    os.mkfifo(tools / "go")
    (tools / "cc").write_text(_SLOW_COMPILER.format(compiler=compiler, folder=tools))
    (tools / "cc").chmod(0o700)
    session.variables |= {
        "PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(session.folder / "cache"), "NO_COLOR": "", "TERM": "xterm",
    }  # fmt: skip
    terminal = Terminal(session, str(demo_model), "--ranks=1", "--device=cpu")
    try:
        bar = re.compile(r"kog-launch: \[-*#+-*\] +compiling, as at the first start")
        until(lambda: bar.search(terminal.shown()), ENDED_S, lambda: repr(terminal.shown()))
        (tools / "go").write_text("go\n")
        until(lambda: "ready after" in terminal.shown(), ENDED_S, terminal.shown)
        os.kill(terminal.pid, signal.SIGTERM)
        until(terminal.has_ended, ENDED_S, terminal.shown)
    finally:
        code = terminal.close()
    assert code == 0, terminal.shown()
