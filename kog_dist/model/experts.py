"""The experts of a mixture: how many, how a token's are chosen and weighted, and what each of them computes (docs/moe.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from kog_dist import model_limits
from kog_dist.errors import ConfigError
from kog_dist.model_limits import MAX_EXPERTS
from kog_dist.quoting import short
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(u + 1) * g / (1 + exp(-alpha * g)), with g at most `limit` and u within -limit .. limit."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        model_limits.check_range("swiglu_alpha", self.alpha, model_limits.SWIGLU_ALPHA)
        model_limits.check_range("swiglu_limit", self.limit, model_limits.SWIGLU_LIMIT)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Of every layer. `is_normalised`: a token's weights sum to 1, else they are those of a softmax over all experts.

    `router_bias` is added to the router's logits, `bias` to gate, up and down of each expert. `clamp`: None is silu(g) * u.
    """

    num_experts: int
    per_token: int
    is_normalised: bool = True
    router_bias: bool = False
    bias: bool = False
    clamp: ClampedSwiglu | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ConfigError(f"the number of experts must be between 1 and {MAX_EXPERTS}, got {self.num_experts}")
        if not 1 <= self.per_token <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok must be between 1 and the {self.num_experts} experts, got {self.per_token}")

    def to_config(self) -> dict[str, object]:
        """As an object of a `config.json`; see `from_config`."""
        return asdict(self)

    @classmethod
    def from_config(cls, raw: object) -> ExpertsSpec | None:
        """What `to_config` gives, None for null. Raises ConfigError."""
        if raw is None:
            return None
        if not isinstance(raw, Mapping) or set(raw) != {item.name for item in fields(cls)}:
            raise ConfigError(f"experts must be an object with {', '.join(item.name for item in fields(cls))}, got {short(raw)}")
        kinds: dict[str, tuple[type, ...]] = dict.fromkeys(("num_experts", "per_token"), (int,))
        kinds |= dict.fromkeys(("is_normalised", "router_bias", "bias"), (bool,))
        for name, allowed in kinds.items():
            if type(raw[name]) not in allowed:
                raise ConfigError(f"experts.{name} must be {allowed[0].__name__}, got {short(raw[name])}")
        clamp = raw["clamp"]
        if clamp is not None:
            if not isinstance(clamp, Mapping) or set(clamp) != {"alpha", "limit"}:
                raise ConfigError(f"experts.clamp must be null or an object with alpha and limit, got {short(clamp)}")
            if any(type(value) not in (int, float) for value in clamp.values()):
                raise ConfigError(f"experts.clamp must have two numbers, got {short(clamp)}")
            clamp = ClampedSwiglu(float(clamp["alpha"]), float(clamp["limit"]))
        return cls(**{**raw, "clamp": clamp})
