"""How the tokens of an answer are chosen: each parameter with its type, default, limits and one line of help.

This is the one definition. The flags of `kog-launch` and `kog-client`, RPC's `Generate`, the OpenAI fields and the kernel's
parameters derive from it. What each parameter does, and in which order, is in docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, Final

from kog_dist.records import dataclass

MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024  # ids in one request
MAX_SEED: Final = 2**64 - 1
LEAST_TEMPERATURE: Final = 0.001  # of a lower one the limit is taken: greedy
_MOST_TOKENS: Final = 2**31 - 1


def _param(default: Any, low: float, high: float, help_text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"limits": (low, high), "help": help_text, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one request; the defaults take the most likely token. Raises ValueError, a sentence that begins with
    the parameter's name, for a wrong type or a value out of its limits.

    logit_bias: (id, bias) pairs, or a mapping of them; each id once. logprobs: None = not even those of the tokens themselves.
    """

    temperature: float = _param(0.0, 0.0, 100.0, f"Below {LEAST_TEMPERATURE:g}: greedy.")
    seed: int = _param(0, 0, MAX_SEED, "Seed of the sampling.")
    top_k: int = _param(0, 0, _MOST_TOKENS, "Draw from the K best tokens only. 0: all.")
    top_p: float = _param(1.0, 1e-6, 1.0, "Draw from the best tokens that have this probability together. 1: all.")
    min_p: float = _param(0.0, 0.0, 1.0, "Leave out tokens with less than this share of the best one's probability.")
    repetition_penalty: float = _param(1.0, 0.01, 100.0, "Divide logits of tokens in prompt or answer. 1: do not.")
    presence_penalty: float = _param(0.0, -2.0, 2.0, "Lower logits of tokens in the answer by this.")
    frequency_penalty: float = _param(0.0, -2.0, 2.0, "Lower them by this for each time.")
    logit_bias: tuple[tuple[int, float], ...] = _param(
        (), -100.0, 100.0, "Add BIAS to the logit of a token; may be given several times.", "ID=BIAS"
    )
    min_tokens: int = _param(0, 0, _MOST_TOKENS, "Tokens before the answer may end by itself.")
    logprobs: int | None = _param(
        None, 0, MAX_TOP_LOGPROBS, "Log-probabilities of the tokens and of so many alternatives, up to 20."
    )

    def __post_init__(self) -> None:
        for name, default in DEFAULTS.items():
            value = getattr(self, name)
            if value is default:
                continue
            kept = _checked(name, value)
            if kept is not value:
                object.__setattr__(self, name, kept)

    def given(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        return {name: value for name, default in DEFAULTS.items() if (value := getattr(self, name)) != default}

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on what was said."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p leave anything out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_processors(self) -> bool:
        """Whether the choice can differ from that of temperature and seed alone.

        Filters keep the best token, so greedy decoding ignores them.
        """
        drawn_from_few = self.temperature > 0 and self.has_filters
        return drawn_from_few or self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def needs_all_logits(self) -> bool:
        """Whether one rank must see the logits of the whole vocabulary."""
        return self.logprobs is not None or self.has_processors


LIMITS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {item.name: item.metadata["limits"] for item in fields(SamplingParams)}
)
DEFAULTS: Final[Mapping[str, object]] = MappingProxyType({item.name: item.default for item in fields(SamplingParams)})
HELP: Final[Mapping[str, str]] = MappingProxyType({item.name: item.metadata["help"] for item in fields(SamplingParams)})
_INTEGERS: Final = frozenset({"seed", "top_k", "min_tokens", "logprobs"})
GREEDY: Final = SamplingParams()


def check_limits(name: str, value: float) -> None:
    """Raises ValueError, a sentence that begins with `name`, unless a number is within the limits of that parameter."""
    low, high = LIMITS[name]
    if not low <= value <= high:  # true for NaN
        raise ValueError(f"{name} must be between {_limit(low)} and {_limit(high)}, got {value}")


def _limit(value: float) -> str:
    return "2**64 - 1" if value == MAX_SEED else str(value) if isinstance(value, int) else f"{value:g}"


def _checked(name: str, value: object) -> object:
    if name == "logit_bias":
        return _checked_bias(value)
    if value is None and name == "logprobs":
        return None
    if type(value) is not int and (name in _INTEGERS or type(value) is not float):
        raise ValueError(f"{name} must be {'an integer' if name in _INTEGERS else 'a number'}, got {_shown(value)}")
    check_limits(name, value)
    if name == "temperature" and value < LEAST_TEMPERATURE:
        return 0.0
    return value if name in _INTEGERS else float(value) + 0.0  # minus zero becomes zero


def _checked_bias(pairs: object) -> tuple[tuple[int, float], ...]:
    if isinstance(pairs, Mapping):
        pairs = tuple(pairs.items())
    if not isinstance(pairs, tuple):
        raise ValueError(f"logit_bias must be pairs of an id and a number, got {_shown(pairs)}")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} ids, got {len(pairs)}")
    for token_id, bias in pairs:
        if type(token_id) is not int or type(bias) not in (int, float):
            raise ValueError(f"logit_bias must be pairs of an id and a number, got {_shown(token_id)} and {_shown(bias)}")
        check_limits("logit_bias", bias)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise ValueError("logit_bias names an id twice")
    return tuple((token_id, float(bias) + 0.0) for token_id, bias in pairs)


def _shown(value: object) -> str:
    """A short form of a hostile value; a container's content is not looked at."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {ascii(value[:40] if isinstance(value, (str, bytes)) else value)[:60]}"
