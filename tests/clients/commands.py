"""Other people's commands and scripts, each run in a folder with a home beside it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.clients.installed import python_client
from tests.clients.page import block

CLIENT_S: Final = 240.0
_OWN_FOLDERS: Final = ("PYTHONPATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
_QUIET: Final = {"NO_COLOR": "1", "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """What a client prints."""
    home = folder.parent / f"home of {folder.name}"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, **_QUIET, "HOME": str(home), "PWD": str(folder), **variables}
    for name in _OWN_FOLDERS:
        environment.pop(name, None)
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CLIENT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_shell(text: str, programs: Path, folder: Path, **variables: str) -> str:
    """What the lines of a shell print, with these programs before others."""
    return run(["sh", "-e", "-c", text], folder, PATH=f"{programs}:{os.environ['PATH']}", **variables)


def run_python(text: str, client: str, folder: Path) -> list[str]:
    """The lines that a script prints, run with a client's interpreter."""
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return run([python_client(client) / "python", script], folder).splitlines()


def run_script(client: str, name: str, address: str, folder: Path) -> Any:
    """The JSON that a script of `scripts` prints last."""
    script = Path(__file__).parent / "scripts" / f"{name}.py"
    return json.loads(run([python_client(client) / "python", script, address], folder).splitlines()[-1])


def run_page(client: str, heading: str, url: str, folder: Path) -> list[str]:
    """The lines that the block of Python below a heading of the page prints."""
    return run_python(block(heading, "python", url), client, folder)
