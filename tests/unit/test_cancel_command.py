"""Which request `kog-client cancel` means when it is given none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.errors import RequestError
from kog_dist.rpc import commands


def client(*running: str) -> Any:
    return cast(Any, SimpleNamespace(status=lambda: SimpleNamespace(all_running=running)))


def test_the_only_one_that_runs() -> None:
    assert commands._only_running(client("r1")) == "r1"
    with pytest.raises(RequestError, match="no request is running"):
        commands._only_running(client())
    with pytest.raises(RequestError, match="2 requests are running: r1, r2; name one"):
        commands._only_running(client("r1", "r2"))
