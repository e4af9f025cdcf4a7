"""As many connections as there are descriptors for, besides the spare ones."""

from __future__ import annotations

import resource

import pytest

from kog_dist.gateway.limits import LIMITS
from kog_dist.gateway.process import SPARE_FILES, _room_for_connections

WANTED, ANY = LIMITS.connections + SPARE_FILES, resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "room"),
    [
        (WANTED, WANTED, None, LIMITS.connections), (WANTED + 1, ANY, None, LIMITS.connections),
        (ANY, ANY, None, LIMITS.connections), (WANTED - 1, ANY, WANTED, LIMITS.connections),
        (256, 10 * WANTED, WANTED, LIMITS.connections),
        (256, 512, 512, 512 - SPARE_FILES), (64, 64, 64, 16),
    ],
)  # fmt: skip
def test_the_limit_of_open_files_is_raised_as_far_as_needed(
    soft: int, hard: int, raised: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: asked.append(limits))
    assert _room_for_connections() == room
    assert asked == ([] if raised is None else [(raised, hard)])
