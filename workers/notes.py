"""What a process of the engine tells its log beside the reason for its end."""

from __future__ import annotations

import sys

NOTE = "note: "  # how such a line begins; the launcher takes the last other one for the reason


def note(text: str) -> None:
    """One line."""
    print(f"{NOTE}{' '.join(text.split())}", file=sys.stderr, flush=True)
