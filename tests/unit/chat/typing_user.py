"""Somebody who types at the prompt of `kog-chat`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kog_dist.chat import history, session


def types(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """These lines, and then the end; a history of nobody's."""
    left = iter(lines)

    def typed() -> str:
        if (line := next(left, None)) is None:
            raise EOFError
        return line

    def begin(_completions: Callable[[str], object]) -> None:
        """Nothing is kept."""

    monkeypatch.setattr(history, "begin", begin)
    monkeypatch.setattr(session, "_read_line", typed)
