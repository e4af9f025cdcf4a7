"""Rotary position tables: one definition for the oracle, the interpreter and the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.spec import ModelSpec


def rope_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """Radians per position of each adjacent pair, (rotary_dim / 2,) float32, after the scaling that the spec has."""
    half = np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim
    frequencies = (1.0 / spec.rope_theta**half).astype(np.float32)
    return frequencies if spec.rope_scaling is None else spec.rope_scaling.scaled(frequencies, spec.rope_theta)


def rope_table(spec: ModelSpec, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each (num_positions, rotary_dim / 2) float32, for turning pairs (x0, x1), (x2, x3), ...

    The angle is rounded to float32 before the cosine, as the published model does: at position 2000 that rounding is 1e-4
    radians, so two engines agree to 1e-5 only if both take their tables from here. Both are multiplied by the
    scaling's magnitude.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * rope_frequencies(spec)[None, :]
    exact = angles.astype(np.float64)
    magnitude = 1.0 if spec.rope_scaling is None else spec.rope_scaling.magnitude
    return (np.cos(exact) * magnitude).astype(np.float32), (np.sin(exact) * magnitude).astype(np.float32)
