"""One engine with HTTP for all tests of this folder: requests of one client are no business of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.e2e.http_engine import http_engine


@pytest.fixture(scope="package")
def base_url() -> Iterator[str]:
    """Where the demo model answers as OpenAI's service does."""
    with engine_session() as session, http_engine(session, "--ranks=2", "--device=cpu") as engine:
        yield f"{engine.url}/v1"
