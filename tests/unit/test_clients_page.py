"""docs/clients.md shows the versions that `make clients` tries."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.pinned import NODE, PYTHON

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_the_table_has_every_client_and_the_version_that_was_tried() -> None:
    shown = re.findall(r"^\| (\S+) \| ([0-9.]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert dict(shown) == {name.partition("[")[0]: version for name, version in PYTHON.items()} | NODE
