"""Rotary position tables: one definition for the oracle, the interpreter and the kernels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.spec import ModelSpec


def rope_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """Radians per position of each adjacent pair, (head_dim / 2,) float32, after Llama-3 scaling if the spec has it."""
    half = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies = (1.0 / spec.rope_theta**half).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    scaled = np.empty_like(frequencies)
    for pair, frequency in enumerate(frequencies.astype(np.float64)):
        wavelength = 2.0 * math.pi / frequency
        if wavelength < context / high:
            scaled[pair] = frequency
        elif wavelength > context / low:
            scaled[pair] = frequency / scaling.factor
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled[pair] = (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
    return scaled


def rope_table(spec: ModelSpec, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each (num_positions, head_dim / 2) float32, for turning pairs (x0, x1), (x2, x3), ...

    The angle is rounded to float32 before the cosine, as the published model does: at position 2000 that rounding is 1e-4
    radians, so two engines agree to 1e-5 only if both take their tables from here.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * rope_frequencies(spec)[None, :]
    exact = angles.astype(np.float64)
    return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
