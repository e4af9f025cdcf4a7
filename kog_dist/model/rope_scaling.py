"""How a model stretches its rotary positions beyond what it was first trained on: one class per `rope_type` of a config.json.

Each says what becomes of the plain frequencies, and by how much cosines and sines are multiplied. Sources: transformers'
`modeling_rope_utils`; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from typing import ClassVar

from kog_dist import model_limits
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import NDArray, np
from kog_dist.model_limits import check_range
from kog_dist.records import dataclass

Frequencies = NDArray["np.float32"]  # radians per position of each pair, (head_dim / 2,)


def _check_stretch(factor: float, original_context: int) -> None:
    check_range("factor of a rope scaling", factor, model_limits.ROPE_FACTOR)
    check_range("original_max_position_embeddings", original_context, (1, model_limits.MAX_CONTEXT))


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """`linear`: positions are divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        check_range("factor of a rope scaling", self.factor, model_limits.ROPE_FACTOR)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The frequencies of a model with this scaling; `theta` is their base."""
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """`llama3`: long waves are divided by `factor`, short ones kept, those between mixed."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_stretch(self.factor, self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(f"rope scaling needs 0 < low_freq_factor < high_freq_factor, got {self}")
        check_range("low_freq_factor", self.low_freq_factor, model_limits.ROPE_TURNS)
        check_range("high_freq_factor", self.high_freq_factor, model_limits.ROPE_TURNS)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def scaled(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The frequencies of a model with this scaling; `theta` is their base."""
        context = self.original_max_position_embeddings
        low, high = self.low_freq_factor, self.high_freq_factor
        scaled = np.empty_like(frequencies)
        for pair, frequency in enumerate(frequencies.astype(np.float64)):
            wavelength = 2.0 * math.pi / frequency
            if wavelength < context / high:
                scaled[pair] = frequency
            elif wavelength > context / low:
                scaled[pair] = frequency / self.factor
            else:
                smooth = (context / wavelength - low) / (high - low)
                scaled[pair] = (1.0 - smooth) * frequency / self.factor + smooth * frequency
        return scaled


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`yarn`: pairs that turn more than `beta_fast` times in the original context are kept, those below `beta_slow` divided.

    `attention_factor`: what cosines and sines are multiplied by. `truncate`: the two limits are whole pairs.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_stretch(self.factor, self.original_max_position_embeddings)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(f"rope scaling needs 0 < beta_slow <= beta_fast, got {self}")
        check_range("beta_slow", self.beta_slow, model_limits.ROPE_TURNS)
        check_range("beta_fast", self.beta_fast, model_limits.ROPE_TURNS)
        check_range("attention_factor", self.attention_factor, model_limits.ROPE_MAGNITUDE)

    @staticmethod
    def usual_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
        """The `attention_factor` of a config that gives none."""

        def of(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.attention_factor

    @property
    def stretched_context(self) -> int:
        """How many positions a model is made for."""
        return int(self.factor * self.original_max_position_embeddings)

    def scaled(self, frequencies: Frequencies, theta: float) -> Frequencies:
        """The frequencies of a model with this scaling; `theta` is their base."""
        pairs = len(frequencies)

        def pair_that_turns(times: float) -> float:
            return 2 * pairs * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low if high != low else 0.001)
        kept = 1 - np.clip(ramp, 0, 1)
        scaled: Frequencies = frequencies / np.float32(self.factor) * (1 - kept) + frequencies * kept
        return scaled


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS: dict[str, type[RopeScaling]] = {kind.rope_type: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling)}
