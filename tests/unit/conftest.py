"""Fixtures that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.hand_turned import HandTurned


@pytest.fixture
def engine() -> Iterator[HandTurned]:
    """One that is moved by hand, and ready."""
    from tests.unit.hand_turned import HandTurned

    made = HandTurned()
    made.ranks.become_ready()
    yield made
    made.close()
