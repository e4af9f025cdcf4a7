"""What was typed before, kept for the next time, and commands that complete with Tab; where Python has readline."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kog_dist.system.files import state_folder

MOST_LINES: Final = 1000


def file() -> Path:
    """Where lines are kept: `chat_history` in the user's folder for state. Raises OSError: there is none."""
    return state_folder() / "chat_history"


def begin(completions: Callable[[str], Sequence[str]]) -> None:
    """Let `input` edit lines, recall earlier ones and complete commands; keep them when the process ends. Never fails.

    `completions`: the commands that begin with a text, which begins with a slash.
    """
    try:
        import readline
    except ImportError:
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file())
    readline.set_history_length(MOST_LINES)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")

    def complete(text: str, place: int) -> str | None:
        found = completions(text) if text.startswith("/") else ()
        return found[place] if place < len(found) else None

    def keep() -> None:
        with contextlib.suppress(OSError):
            path = file()
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # prompts: for this user alone
            readline.write_history_file(path)

    readline.set_completer(complete)
    atexit.register(keep)
