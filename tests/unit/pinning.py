"""Long outputs that are pinned as text: nobody can say of each of their numbers what is right, but all may change only if wanted.

Who wants that runs the test with `TESTS_PIN=1`, which writes the text anew: its difference belongs to the change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

PINNED = Path(__file__).with_name("pinned")
LONGEST = 160  # characters of a line; of longer ones there is a digest


def compare(name: str, lines: Sequence[str], *, may_grow: bool = False) -> None:
    """Assert that they are those of the file of this name; with `may_grow` there may be others, too."""
    path = PINNED / f"{name}.txt"
    found = [short(line) for line in lines]
    if os.environ.get("TESTS_PIN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in found))
    wanted = path.read_text().splitlines()
    old, new = set(wanted), set(found)
    differ = [f"- {line}" for line in wanted if line not in new] + [f"+ {line}" for line in found if line not in old]
    assert old <= new if may_grow else found == wanted, "\n".join(
        [f"not as in {path.name}; if that is wanted, run the test with TESTS_PIN=1", *differ[:20]]
    )


def digest(text: str) -> str:
    """A few letters that tell texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def short(line: str) -> str:
    """A line, or its beginning and a digest of all of it."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 20]}... {digest(line)}"
