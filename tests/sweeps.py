"""Cases that ask of many shapes what `make test` asks of a few: `make sweeps` runs them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import pytest


def cases(everything: Iterable[Any], swept: Collection[Hashable]) -> list[Any]:
    """The values of a parameter, or tuples of several, of which those in `swept` have the mark."""
    listed = list(everything)
    assert set(swept) < set(listed), f"all of {sorted(map(str, listed))} or others are swept"

    def marked(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)

    return [marked(case) if case in swept else case for case in listed]
