"""Advice on what to install names packages that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kog_dist.errors import PACKAGES, install

ROOT = Path(__file__).parents[2]


def test_advice_is_what_the_extras_bring() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in PACKAGES.items():
        asked = [re.split("[><=;]", needed)[0] for needed in project["optional-dependencies"][extra]]
        assert packages.replace("'", "").split() == asked
        assert install(extra) == f"pip install {packages}, or '.[{extra}]' in a clone"


@pytest.mark.parametrize("folder", ["kog_dist", "launch", "workers", "collectives", "docs", "README.md", "Makefile"])
def test_nothing_names_this_package_on_an_index(folder: str) -> None:
    start = ROOT / folder
    texts = [
        path for path in (start.rglob("*") if start.is_dir() else [start]) if path.suffix in (".py", ".md", ".html", ".js", "")
    ]
    assert texts
    found = [str(path) for path in texts if path.is_file() and "kog-dist[" in path.read_text(errors="replace")]
    assert not found
