"""The blocks of docs/clients.md, which the tests run as they are, but for the address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "clients.md"
ADDRESS: Final = "http://127.0.0.1:8000"


def block(heading: str, language: str, url: str) -> str:
    """The one block of this language below a heading, with the address of a service instead of the usual one."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None, f"{PAGE.name} has no section {heading}"
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", section[1], re.M | re.S)
    text: str = found
    return text.replace(ADDRESS, url)
