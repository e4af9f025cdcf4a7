"""The HTTP service of the demo model, for tests that look at it through other people's clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from kog_dist.bench.session import running, until


@contextmanager
def openai_service() -> Iterator[str]:
    """The address that such clients call their base URL."""
    with running("--device=cpu", "--ranks=2", "--port=0") as (session, _):
        announced = session.instance_folder / "http.json"
        until(announced.exists, 30.0, lambda: f"no http.json; the launcher says: {session.output()}")
        yield f"{json.loads(announced.read_text(encoding='utf-8'))['url']}/v1"
