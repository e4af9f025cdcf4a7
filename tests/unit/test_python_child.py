"""The command line of Python children."""

from __future__ import annotations

import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist import python_child


@pytest.fixture(autouse=True)
def _unknown() -> Iterator[None]:
    python_child._has_user_packages.cache_clear()
    yield
    python_child._has_user_packages.cache_clear()


@pytest.mark.parametrize(
    ("is_enabled", "has_ours", "options"),
    [(True, True, ["-P"]), (True, False, ["-P", "-s"]), (False, True, ["-P", "-s"]), (None, True, ["-P", "-s"])],
)
def test_children_see_the_users_packages_only_where_their_parent_needs_them(
    monkeypatch: pytest.MonkeyPatch, is_enabled: bool | None, has_ours: bool, options: list[str]
) -> None:
    folder = str(Path(pytest.__file__).parent) if has_ours else "/nowhere"
    monkeypatch.setattr(site, "ENABLE_USER_SITE", is_enabled)
    monkeypatch.setattr(site, "getusersitepackages", lambda: folder)
    assert python_child.command("module", "{}") == [sys.executable, *options, "-m", "module", "{}"]
