"""Marks of tests of kernels that are made for Hopper's matrix units."""

from __future__ import annotations

import pytest
import torch

from kog_dist.workers.prefill.base.hopper_abi import HOPPER


def on_hopper(source: str) -> list[pytest.MarkDecorator]:
    """Of a file of tests that need one GPU, for which `source` is made."""
    is_other = torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER
    return [pytest.mark.gpu(1), pytest.mark.timeout(120), pytest.mark.skipif(is_other, reason=f"{source} is made for Hopper")]
