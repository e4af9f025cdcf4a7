"""Tests that need GPUs are skipped, with a reason, where there are too few."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = [(item, mark.args[0]) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if not needed:
        return
    import torch

    present = torch.cuda.device_count()
    for item, count in needed:
        if present < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device{'s' if count > 1 else ''}, found {present}"))
