"""The shape of a model, read from a published `config.json` (both field revisions of the Laneformer family)."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError, ConfigError

MODEL_TYPES = ("laneformer_tp", "laneformer")
MAX_LAYERS = 4096  # far above any model; keeps a hostile config.json from making us build endless lists

# Keys that transformers writes into every config.json and that change nothing here.
_IGNORED_KEYS = frozenset(
    """_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version
    use_cache initializer_range attention_dropout hidden_dropout return_dict output_attentions output_hidden_states
    output_router_logits is_encoder_decoder pad_head_dim_to_multiple_of""".split()
)
_FIXED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
_LARGEST_NUMBER = 2**53
_ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the second is the name in transformers 5
_SPEC_KEYS = frozenset(
    """model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    max_position_embeddings rope_theta rope_scaling rope_parameters norm_eps rms_norm_eps num_lanes broadcast_delay use_comm
    use_attention_comm use_mlp_comm use_early_comm lm_head_type pre_norm_lane_agg replicated_rmsn_scale tie_word_embeddings
    sliding_window sliding_window_n_layers unclamped_layers swa_layers head_dim""".split()
)


class Block(enum.IntEnum):
    """The two modules of a layer, in the order in which they run. Each has its own partial sums and mailboxes."""

    ATTENTION = 0
    MLP = 1


class ReduceMode(enum.Enum):
    """How a block's lane-partial outputs reach the residual streams."""

    DELAYED = "delayed"  # h_l += p_l + sum over the other lanes of what they produced `delay` layers ago
    BLOCKING = "blocking"  # h_l += sum over all lanes of this layer's p
    LOCAL = "local"  # h_l += sqrt(L) * p_l: no communication


class HeadType(enum.Enum):
    """How the lanes' residual streams become logits (`lm_head_type`)."""

    REPLICATE = "replicate"  # W @ mean over lanes of rmsnorm(h_l); or W @ rmsnorm(sum of h_l) with pre_norm_lane_agg
    LANE = "lane"  # W @ concatenation over lanes of rmsnorm(h_l)
    VOCAB_PARALLEL = "vocab_parallel"  # lane l computes its own V/L logits from rmsnorm(h_l)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3-style scaling of the rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything static about a model. Validated on construction; `ConfigError` names the field that is wrong.

    An ordinary Llama-like model is `num_lanes` lanes with `delay` 0: every reduction is then BLOCKING.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_context: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    num_lanes: int = 1
    delay: int = 1
    attention_comm: bool = True
    mlp_comm: bool = True
    early_comm: bool = True
    head_type: HeadType = HeadType.REPLICATE
    pre_norm_lane_agg: bool = False
    shared_norm_scale: bool = True
    tied_embeddings: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_lanes()
        for layer in self.window_layers:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(f"windowed layer {layer} does not exist: the model has {self.num_layers} layers")
        if tuple(sorted(set(self.window_layers))) != self.window_layers:
            raise ConfigError(f"window_layers must be ascending without repeats, got {self.window_layers}")
        if self.window_layers and self.sliding_window is None:
            raise ConfigError(f"layers {self.window_layers} are windowed but sliding_window is not set")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size",
                     "max_context", "num_lanes"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_layers must be at most {MAX_LAYERS}")
        if self.delay < 0:
            raise ConfigError(f"broadcast_delay must not be negative, got {self.delay}")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be positive, got {self.norm_eps}")
        if not self.rope_theta > 0:
            raise ConfigError(f"rope_theta must be positive, got {self.rope_theta}")
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )

    def _check_lanes(self) -> None:
        lanes = self.num_lanes
        if lanes & (lanes - 1):
            raise ConfigError(f"num_lanes must be a power of two (lane sums are one binary tree), got {lanes}")
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(self, name) % lanes:
                raise ConfigError(f"{name} {getattr(self, name)} cannot be split over {lanes} lanes")
        if self.head_type is HeadType.VOCAB_PARALLEL and self.vocab_size % lanes:
            raise ConfigError(f"vocab_size {self.vocab_size} cannot be split over {lanes} lanes (lm_head_type vocab_parallel)")
        if self.pre_norm_lane_agg and self.head_type is not HeadType.REPLICATE:
            raise ConfigError(f"pre_norm_lane_agg goes only with lm_head_type replicate, not {self.head_type.value}")
        if self.tied_embeddings and self.head_type is not HeadType.REPLICATE:
            raise ConfigError(f"tie_word_embeddings goes only with lm_head_type replicate, not {self.head_type.value}")

    # ---- sizes ----
    @property
    def head_dim(self) -> int:
        """Values per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def lane_heads(self) -> int:
        """Query heads that one lane owns."""
        return self.num_heads // self.num_lanes

    @property
    def lane_kv_heads(self) -> int:
        """KV heads that one lane owns."""
        return self.num_kv_heads // self.num_lanes

    @property
    def lane_ffn(self) -> int:
        """FFN columns that one lane owns."""
        return self.intermediate_size // self.num_lanes

    @property
    def num_parameters(self) -> int:
        """All parameters of the checkpoint; tied embeddings count once."""
        d, v, lanes = self.hidden_size, self.vocab_size, self.num_lanes
        norm_rows = 1 if self.shared_norm_scale else lanes
        final_norm_rows = 1 if self.pre_norm_lane_agg else norm_rows
        attention = 2 * d * self.num_heads * self.head_dim + 2 * d * self.num_kv_heads * self.head_dim
        layer = attention + 3 * d * self.intermediate_size + 2 * norm_rows * d
        head = 0 if self.tied_embeddings else v * d * (lanes if self.head_type is HeadType.LANE else 1)
        return v * d + self.num_layers * layer + final_norm_rows * d + head

    def bytes_per_token(self, weight_bytes: int = 2) -> int:
        """Weight bytes that one decode step must read: everything but the embedding table (KV cache not counted)."""
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return (self.num_parameters - embedding) * weight_bytes

    # ---- behaviour per layer ----
    def reduce_mode(self, layer_idx: int, block: Block) -> ReduceMode:
        """How the output of `block` of layer `layer_idx` is added to the residual streams."""
        comm = self.attention_comm if block is Block.ATTENTION else self.mlp_comm
        if not comm:
            return ReduceMode.LOCAL
        if self.delay == 0:
            return ReduceMode.BLOCKING
        if layer_idx >= self.delay:
            return ReduceMode.DELAYED
        return ReduceMode.BLOCKING if self.early_comm else ReduceMode.LOCAL

    def feeds_layer(self, layer_idx: int, block: Block) -> int | None:
        """The later layer that consumes this layer's partials with DELAYED reduction, or None."""
        target = layer_idx + self.delay
        if self.delay == 0 or target >= self.num_layers:
            return None
        return target if self.reduce_mode(target, block) is ReduceMode.DELAYED else None

    def window(self, layer_idx: int) -> int | None:
        """Positions that a token of this layer sees, itself included; None = all before it."""
        return self.sliding_window if layer_idx in self.window_layers else None

    def vocab_slice(self, lane: int) -> tuple[int, int]:
        """First and one-past-last vocabulary row whose logits lane `lane` computes. The same for every world size."""
        rows = -(-self.vocab_size // self.num_lanes)
        return min(lane * rows, self.vocab_size), min((lane + 1) * rows, self.vocab_size)

    def lanes_of_rank(self, rank: int, world_size: int) -> range:
        """The contiguous lanes that `rank` hosts. Raises ConfigError if `world_size` does not divide the lanes."""
        if world_size < 1 or self.num_lanes % world_size:
            fitting = [n for n in range(1, self.num_lanes + 1) if self.num_lanes % n == 0]
            raise ConfigError(
                f"{self.num_lanes} lanes cannot be spread over {world_size} ranks; use one of {', '.join(map(str, fitting))}"
            )
        per_rank = self.num_lanes // world_size
        return range(rank * per_rank, (rank + 1) * per_rank)

    def digest(self) -> str:
        """SHA-256 over all fields: equal exactly when two specs describe the same model."""
        return hashlib.sha256(json.dumps(self.to_config(), sort_keys=True).encode()).hexdigest()

    # ---- config.json ----
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed `config.json`. Raises ConfigError naming the key that is unknown, missing or contradictory."""
        return _spec_from_config(config)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read `config.json` of a model folder. Raises CheckpointError if it is missing, no JSON, or not a model we run."""
        path = folder / "config.json"
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_without_duplicates)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no config.json; MODEL must be a folder with a published checkpoint") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise CheckpointError(f"{path} holds a {type(parsed).__name__}, expected an object")
        try:
            return _spec_from_config(parsed)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def to_config(self) -> dict[str, Any]:
        """The `config.json` of this spec in the later field revision; `from_config` of it gives an equal spec."""
        config: dict[str, Any] = {
            "architectures": ["LaneformerForCausalLM"],
            "model_type": MODEL_TYPES[0],
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_context,
            "rope_theta": self.rope_theta,
            "norm_eps": self.norm_eps,
            "num_lanes": self.num_lanes,
            "broadcast_delay": self.delay,
            "use_attention_comm": self.attention_comm,
            "use_mlp_comm": self.mlp_comm,
            "use_early_comm": self.early_comm,
            "lm_head_type": self.head_type.value,
            "pre_norm_lane_agg": self.pre_norm_lane_agg,
            "replicated_rmsn_scale": self.shared_norm_scale,
            "tie_word_embeddings": self.tied_embeddings,
            "sliding_window": self.sliding_window,
            "swa_layers": list(self.window_layers),
        }
        if self.rope_scaling is not None:
            config["rope_scaling"] = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        return config


def laneformer_2b() -> ModelSpec:
    """The published 2B shape: 2,320,069,632 parameters, 4,443,531,264 bytes read per token in 16 bit."""
    return ModelSpec(
        hidden_size=3072, num_layers=15, num_heads=32, num_kv_heads=16, intermediate_size=12288, vocab_size=32000,
        max_context=4096, num_lanes=8, delay=2, sliding_window=512, window_layers=tuple(range(10)),
    )  # fmt: skip


# ---- reading config.json ----
def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in names if names.count(key) > 1)!r} stands twice")
    return parsed


def _number(config: Mapping[str, Any], key: str, default: Any, kind: type) -> Any:
    value: Any = default if config.get(key) is None else config[key]  # published files write null for "as by default"
    accepted = (int, float) if kind is float else (kind,)
    if value is None:
        raise ConfigError(f"config key {key} is missing")
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise ConfigError(f"config key {key} must be {kind.__name__}, got {value!r}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ConfigError(f"config key {key} must be a finite number of ordinary size, got {value!r:.40}")
    return kind(value)


def _spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(f"model_type {config.get('model_type')!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    unknown = sorted(set(config) - _SPEC_KEYS - _IGNORED_KEYS - set(_FIXED_VALUES))
    if unknown:
        raise ConfigError(f"unknown config keys: {', '.join(map(ascii, unknown))}")
    for key, allowed in _FIXED_VALUES.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"config key {key} is {config[key]!r}, only {allowed[0]!r} is supported")
    num_heads = _number(config, "num_attention_heads", None, int)
    num_layers = min(_number(config, "num_hidden_layers", None, int), MAX_LAYERS + 1)  # ModelSpec refuses the excess
    attention_comm, mlp_comm = _comm(config)
    sliding_window, window_layers = _windows(config, num_layers)
    theta, scaling = _rope(config)
    spec = ModelSpec(
        hidden_size=_number(config, "hidden_size", None, int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_number(config, "num_key_value_heads", num_heads, int),
        intermediate_size=_number(config, "intermediate_size", None, int),
        vocab_size=_number(config, "vocab_size", None, int),
        max_context=_number(config, "max_position_embeddings", None, int),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_norm_eps(config),
        num_lanes=_number(config, "num_lanes", 1, int),
        delay=_number(config, "broadcast_delay", 1, int),
        attention_comm=attention_comm,
        mlp_comm=mlp_comm,
        early_comm=_number(config, "use_early_comm", True, bool),
        head_type=_head_type(config),
        pre_norm_lane_agg=_number(config, "pre_norm_lane_agg", False, bool),
        shared_norm_scale=_number(config, "replicated_rmsn_scale", True, bool),
        tied_embeddings=_number(config, "tie_word_embeddings", False, bool),
        sliding_window=sliding_window,
        window_layers=window_layers,
    )
    if _number(config, "head_dim", spec.head_dim, int) != spec.head_dim:
        raise ConfigError(f"head_dim {config['head_dim']} contradicts hidden_size / num_attention_heads = {spec.head_dim}")
    return spec


def _head_type(config: Mapping[str, Any]) -> HeadType:
    try:
        return HeadType(config.get("lm_head_type", "replicate"))
    except ValueError:
        names = ", ".join(kind.value for kind in HeadType)
        raise ConfigError(f"lm_head_type {config['lm_head_type']!r} is not supported; supported: {names}") from None


def _norm_eps(config: Mapping[str, Any]) -> float:
    if "norm_eps" in config and "rms_norm_eps" in config and config["norm_eps"] != config["rms_norm_eps"]:
        raise ConfigError(f"norm_eps {config['norm_eps']} contradicts rms_norm_eps {config['rms_norm_eps']}")
    key = "rms_norm_eps" if "rms_norm_eps" in config else "norm_eps"
    return float(_number(config, key, 1e-5, float))


def _comm(config: Mapping[str, Any]) -> tuple[bool, bool]:
    both = _number(config, "use_comm", True, bool)
    flags = []
    for key in ("use_attention_comm", "use_mlp_comm"):
        flag = _number(config, key, both, bool)
        if "use_comm" in config and flag != both:
            raise ConfigError(f"{key} {flag} contradicts use_comm {both}")
        flags.append(flag)
    return flags[0], flags[1]


def _layer_list(config: Mapping[str, Any], key: str, num_layers: int) -> tuple[int, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ConfigError(f"config key {key} must be a list of layer numbers, got {value!r}")
    for layer in value:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"config key {key} names layer {layer}; the model has {num_layers} layers")
    return tuple(sorted(set(value)))


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = None if config.get("sliding_window") is None else int(_number(config, "sliding_window", None, int))
    first = int(_number(config, "sliding_window_n_layers", 0, int))
    if abs(first) > num_layers:
        raise ConfigError(f"sliding_window_n_layers {first} exceeds the {num_layers} layers of the model")
    unclamped = set(_layer_list(config, "unclamped_layers", num_layers))
    counted = range(first) if first >= 0 else range(num_layers + first, num_layers)
    from_count = tuple(i for i in counted if i not in unclamped)
    listed = _layer_list(config, "swa_layers", num_layers)
    if config.get("swa_layers") is not None and "sliding_window_n_layers" in config and listed != from_count:
        raise ConfigError(f"swa_layers {list(listed)} contradicts sliding_window_n_layers {first}: {list(from_count)}")
    if unclamped & set(listed):
        raise ConfigError(f"layers {sorted(unclamped & set(listed))} stand in both swa_layers and unclamped_layers")
    return window, listed or from_count


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    theta = float(_number(config, "rope_theta", 1e4, float))
    given = {key: dict(config[key]) for key in _ROPE_KEYS if _is_object(config, key)}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError(f"rope_scaling {given['rope_scaling']} contradicts rope_parameters {given['rope_parameters']}")
    for key, raw in given.items():
        nested = float(_number(raw, "rope_theta", theta, float))
        if config.get("rope_theta") is not None and nested != theta:
            raise ConfigError(f"{key}.rope_theta {nested} contradicts rope_theta {theta}")
        raw.pop("rope_theta", None)
        return nested, _rope_scaling(key, raw)
    return theta, None


def _is_object(config: Mapping[str, Any], key: str) -> bool:
    if config.get(key) is not None and not isinstance(config[key], Mapping):
        raise ConfigError(f"config key {key} must be an object, got {config[key]!r}")
    return config.get(key) is not None


def _rope_scaling(key: str, raw: dict[str, Any]) -> RopeScaling | None:
    old_name = raw.pop("type", None)
    kind = raw.pop("rope_type", old_name)
    if old_name not in (None, kind):
        raise ConfigError(f"{key}.type {old_name!r} contradicts {key}.rope_type {kind!r}")
    names = {} if kind in (None, "default") else {field.name: field for field in fields(RopeScaling)}
    if kind not in (None, "default", "llama3"):
        raise ConfigError(f"{key} type {kind!r} is not supported; supported: default, llama3")
    if set(raw) != set(names):
        wanted = ", ".join(["rope_type", *sorted(names)])
        raise ConfigError(f"{key} of type {kind} must have exactly the keys {wanted}; got also or only {sorted(raw)}")
    if not names:
        return None
    return RopeScaling(
        factor=_number(raw, "factor", None, float),
        low_freq_factor=_number(raw, "low_freq_factor", None, float),
        high_freq_factor=_number(raw, "high_freq_factor", None, float),
        original_max_position_embeddings=_number(raw, "original_max_position_embeddings", None, int),
    )
