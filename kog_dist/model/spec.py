"""The shape of a model. `published_config.py` reads it from a `config.json`."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from functools import lru_cache
from typing import Any

from kog_dist import model_limits
from kog_dist.errors import ConfigError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn, FfnKind, LayerSpec, MixerKind, Norm
from kog_dist.model.rope_scaling import RopeScaling, YarnScaling
from kog_dist.quoting import short
from kog_dist.records import dataclass

MODEL_TYPES = ("laneformer_tp", "laneformer")


class Sublayer(enum.IntEnum):
    """The two modules of a layer, in the order in which they run. Each has its own partial sums and mailboxes."""

    ATTENTION = 0
    MLP = 1


class ReduceMode(enum.Enum):
    """How a sublayer's lane-partial outputs reach the residual streams."""

    DELAYED = "delayed"  # h_l += p_l + sum over the other lanes of what they produced `delay` layers ago
    BLOCKING = "blocking"  # h_l += sum over all lanes of this layer's p
    LOCAL = "local"  # h_l += sqrt(L) * p_l: no communication


class HeadType(enum.Enum):
    """How the lanes' residual streams become logits (`lm_head_type`)."""

    REPLICATE = "replicate"  # W @ mean over lanes of rmsnorm(h_l); or W @ rmsnorm(sum of h_l) with pre_norm_lane_agg
    LANE = "lane"  # W @ concatenation over lanes of rmsnorm(h_l)
    VOCAB_PARALLEL = "vocab_parallel"  # lane l computes its own V/L logits from rmsnorm(h_l)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything static about a model. Validated on construction; `ConfigError` names the field that is wrong.

    An ordinary Llama-like model is `num_lanes` lanes with `delay` 0: every reduction is then BLOCKING, and the lanes share one
    residual stream (`has_one_stream`). `own_head_dim`: values per head where they are not hidden_size / num_heads.
    `qkv_bias`: added to queries, keys and values; `out_bias`: to attention's output, of models with one stream. `qk_norm`: an
    RMS norm of every query and key head before it is rotated. `attention_sinks`: one more logit in the softmax of each query
    head. `experts`: of every layer's FFN, each `intermediate_size` wide.
    `mixed_layers`: what each layer is, of models whose layers these fields cannot say; see `of_layers`. Fields of heads then are
    those of the layers with attention, and fields of FFNs those of the first with experts, or of the first.
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
    own_head_dim: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    experts: ExpertsSpec | None = None
    mixed_layers: tuple[LayerSpec, ...] = field(default=(), repr=False)

    @classmethod
    def of_layers(cls, layers: Sequence[LayerSpec], **others: Any) -> ModelSpec:
        """A model with these layers, of whatever kinds, whose lanes share one stream; `others`: fields that layers do not say.

        Raises ConfigError.
        """
        attention = next((layer.mixer for layer in layers if isinstance(layer.mixer, AttentionMixer)), None)
        ffns = [layer.ffn for layer in layers if isinstance(layer.ffn, Ffn | Experts)]
        ffn = next((one for one in ffns if isinstance(one, Experts)), ffns[0] if ffns else None)
        fields = {"num_heads": 1, "num_kv_heads": 1, "intermediate_size": others.get("num_lanes", 1)}
        if attention is not None:
            fields |= {
                name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "qkv_bias", "out_bias", "qk_norm")
            }
            fields |= {"own_head_dim": attention.head_dim, "attention_sinks": attention.sinks}
        if ffn is not None:
            fields |= {"intermediate_size": ffn.width, "experts": ffn.choice if isinstance(ffn, Experts) else None}
        common = {"num_layers": len(layers), "norm_eps": layers[0].norm.eps if layers else 1e-6, "delay": 0}
        return cls(**{**common, **fields, **others}, mixed_layers=tuple(layers))

    def __post_init__(self) -> None:
        if self.own_head_dim is not None and self.own_head_dim * self.num_heads == self.hidden_size:
            object.__setattr__(self, "own_head_dim", None)  # equal models are equal specs
        if self.mixed_layers:
            object.__setattr__(self, "mixed_layers", _one_of_all_equal(self.mixed_layers))
        self._check_sizes()
        self._check_lanes()
        self._check_mixed()
        for layer in self.window_layers:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(f"windowed layer {layer} does not exist: the model has {self.num_layers} layers")
        if tuple(sorted(set(self.window_layers))) != self.window_layers:
            raise ConfigError(f"window_layers must be ascending without repeats, got {short(self.window_layers)}")
        if self.window_layers and self.sliding_window is None:
            raise ConfigError(f"layers {short(self.window_layers)} are windowed but sliding_window is not set")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")

    def __hash__(self) -> int:
        """Of sizes alone: what is kept of a model is asked for at every step of a plan, and layers are hundreds of records."""
        return hash((self.hidden_size, self.num_layers, self.num_heads, self.num_kv_heads, self.intermediate_size,
                     self.vocab_size, self.max_context, self.num_lanes, self.delay))  # fmt: skip

    def _check_sizes(self) -> None:
        for key, size, most in (
            ("hidden_size", self.hidden_size, model_limits.MAX_HIDDEN_SIZE),
            ("num_hidden_layers", self.num_layers, model_limits.MAX_LAYERS),
            ("num_attention_heads", self.num_heads, model_limits.MAX_HEADS),
            ("num_key_value_heads", self.num_kv_heads, model_limits.MAX_HEADS),
            ("intermediate_size", self.intermediate_size, model_limits.MAX_INTERMEDIATE_SIZE),
            ("vocab_size", self.vocab_size, model_limits.MAX_VOCAB_SIZE),
            ("max_position_embeddings", self.max_context, model_limits.MAX_CONTEXT),
            ("num_lanes", self.num_lanes, model_limits.MAX_LANES),
            ("broadcast_delay", max(self.delay, 1), model_limits.MAX_LAYERS),
            ("sliding_window", max(self.sliding_window or 1, 1), model_limits.MAX_WINDOW),
            ("head_dim", 1 if self.own_head_dim is None else self.own_head_dim, model_limits.MAX_HEAD_DIM),
        ):
            if size < 1:
                raise ConfigError(f"{key} must be at least 1, got {size}")
            if size > most:
                raise ConfigError(f"{key} must be at most {most}, got {size}")
        if self.num_layers * self.num_lanes > model_limits.MAX_LANES_OF_LAYERS:
            raise ConfigError(
                f"num_hidden_layers {self.num_layers} times num_lanes {self.num_lanes} must be at most "
                f"{model_limits.MAX_LANES_OF_LAYERS}"
            )
        if self.experts is not None and self.num_layers * self.experts.num_experts > model_limits.MAX_EXPERTS_OF_LAYERS:
            raise ConfigError(
                f"num_hidden_layers {self.num_layers} times {self.experts.num_experts} experts must be at most "
                f"{model_limits.MAX_EXPERTS_OF_LAYERS}"
            )
        if self.delay < 0:
            raise ConfigError(f"broadcast_delay must not be negative, got {self.delay}")
        model_limits.check_range("norm_eps", self.norm_eps, model_limits.NORM_EPS)
        model_limits.check_range("rope_theta", self.rope_theta, model_limits.ROPE_THETA)
        if self.own_head_dim is None and self.hidden_size % self.num_heads:
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
        divided = [
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("intermediate_size", self.intermediate_size),
        ]
        if self.mixed_layers:
            divided = [item for part in self.kinds for item in part.divided().items()]
        for key, size in divided:
            if size % lanes:
                raise ConfigError(f"{key} {size} cannot be split over {lanes} lanes")
        if self.head_type is HeadType.VOCAB_PARALLEL and self.vocab_size % lanes:
            raise ConfigError(f"vocab_size {self.vocab_size} cannot be split over {lanes} lanes (lm_head_type vocab_parallel)")
        if self.pre_norm_lane_agg and self.head_type is not HeadType.REPLICATE:
            raise ConfigError(f"pre_norm_lane_agg goes only with lm_head_type replicate, not {self.head_type.value}")
        if (self.out_bias or self.experts is not None) and not self.has_one_stream:
            what = "out_bias goes" if self.out_bias else "experts go"
            raise ConfigError(f"{what} only with one residual stream: broadcast_delay 0, and norms and LM head for all lanes")
        if self.tied_embeddings and self.head_type is not HeadType.REPLICATE:
            raise ConfigError(f"tie_word_embeddings goes only with lm_head_type replicate, not {self.head_type.value}")

    def _check_mixed(self) -> None:
        layers, lanes = self.mixed_layers, self.num_lanes
        if not layers:
            return
        if len(layers) != self.num_layers:
            raise ConfigError(f"num_hidden_layers {self.num_layers} contradicts {len(layers)} layers")
        if not self.has_one_stream:
            raise ConfigError("layers of several kinds go only with one residual stream")
        if len({layer.norm for layer in layers}) > 1 or layers[0].norm.eps != self.norm_eps:
            raise ConfigError("norms of layers must be alike")
        attention = [part for part in self.kinds if isinstance(part, AttentionMixer)]
        if len({(one.num_heads, one.num_kv_heads, one.head_dim, one.rotary_dim) for one in attention}) > 1:
            raise ConfigError("heads of attention must be alike in all layers that have any")
        for one in attention:
            if lanes % one.num_kv_heads and one.num_kv_heads % lanes:
                raise ConfigError(
                    f"num_key_value_heads {one.num_kv_heads} cannot be split over {lanes} lanes, nor they over these"
                )
            if one.rotary_dim % 2 or not 0 <= one.rotary_dim <= one.head_dim:
                raise ConfigError(
                    f"{one.rotary_dim} values of a head cannot be rotated: they are an even number up to {one.head_dim}"
                )
        for net in (part for part in self.kinds if isinstance(part, DeltaNet)):
            if net.num_value_heads % net.num_key_heads:
                raise ConfigError(
                    f"linear_num_value_heads {net.num_value_heads} is not a multiple of linear_num_key_heads {net.num_key_heads}"
                )

    # ---- sizes ----
    @property
    def kinds(self) -> tuple[MixerKind | FfnKind, ...]:
        """The mixers and FFNs of all layers, each kind once."""
        return _kinds(self)

    @property
    def rotary_dim(self) -> int:
        """Values of a head that positions rotate."""
        return next(
            (part.rotary_dim for part in self.kinds if isinstance(part, AttentionMixer) and part.rotary_dim), self.head_dim
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state that every token changes: positions cannot be taken back."""
        return any(isinstance(part, DeltaNet) for part in self.kinds)

    @property
    def head_dim(self) -> int:
        """Values per attention head."""
        return self.own_head_dim or self.hidden_size // self.num_heads

    @property
    def lane_heads(self) -> int:
        """Query heads that one lane owns."""
        return self.num_heads // self.num_lanes

    @property
    def lane_kv_heads(self) -> int:
        """KV heads that one lane owns; neighbouring lanes the same one where there are fewer."""
        return max(self.num_kv_heads // self.num_lanes, 1)

    @property
    def lane_qkv_rows(self) -> int:
        """Query, key and value rows that one lane owns, and gate rows if it has any; of a layer with attention."""
        return next((part.lane_rows(self.num_lanes) for part in self.kinds if isinstance(part, AttentionMixer)), 0)

    @property
    def lane_ffn(self) -> int:
        """FFN columns that one lane owns."""
        return self.intermediate_size // self.num_lanes

    @property
    def num_ffns(self) -> int:
        """FFNs of a layer: one, or its experts."""
        return 1 if self.experts is None else self.experts.num_experts

    @property
    def num_ffns_read(self) -> int:
        """Those of them that a token reads."""
        return 1 if self.experts is None else self.experts.per_token

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is. Without `mixed_layers` all are of one kind but for the window of their attention."""
        return self.mixed_layers or _layers(self)

    @property
    def num_parameters(self) -> int:
        """All parameters of the checkpoint; tied embeddings count once."""
        return self._num_values(sum(layer.ffn.num_values(self.hidden_size) for layer in self.layers))

    def _num_values(self, of_ffns: int) -> int:
        """All parameters, with so many in FFNs."""
        d, v, lanes = self.hidden_size, self.vocab_size, self.num_lanes
        norm_rows = 1 if self.shared_norm_scale else lanes
        final_norm_rows = 1 if self.pre_norm_lane_agg else norm_rows
        layers = sum(layer.mixer.num_values(d) + 2 * norm_rows * d for layer in self.layers) + of_ffns
        head = 0 if self.tied_embeddings else v * d * (lanes if self.head_type is HeadType.LANE else 1)
        return v * d + layers + final_norm_rows * d + head

    def bytes_per_token(self, weight_bytes: int = 2) -> int:
        """Weight bytes that one decode step must read: all but the embedding table and the experts that are not chosen.

        The KV cache is not counted.
        """
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        of_ffns = sum(layer.ffn.num_read(self.hidden_size) for layer in self.layers)
        return (self._num_values(of_ffns) - embedding) * weight_bytes

    # ---- behaviour per layer ----
    def reduce_mode(self, layer_idx: int, sublayer: Sublayer) -> ReduceMode:
        """How the output of `sublayer` of layer `layer_idx` is added to the residual streams."""
        comm = self.attention_comm if sublayer is Sublayer.ATTENTION else self.mlp_comm
        if not comm:
            return ReduceMode.LOCAL
        if self.delay == 0:
            return ReduceMode.BLOCKING
        if layer_idx >= self.delay:
            return ReduceMode.DELAYED
        return ReduceMode.BLOCKING if self.early_comm else ReduceMode.LOCAL

    @property
    def has_one_stream(self) -> bool:
        """Whether all lanes share one residual stream: every sum over lanes is awaited, norms and LM head are alike in all."""
        blocking = self.delay == 0 and self.attention_comm and self.mlp_comm
        return blocking and self.shared_norm_scale and self.head_type is HeadType.REPLICATE and not self.pre_norm_lane_agg

    @property
    def gathers_streams(self) -> bool:
        """Whether the LM head needs what the streams of all lanes are."""
        return self.head_type is not HeadType.VOCAB_PARALLEL and not self.has_one_stream

    def feeds_layer(self, layer_idx: int, sublayer: Sublayer) -> int | None:
        """The later layer that consumes this layer's partials with DELAYED reduction, or None."""
        target = layer_idx + self.delay
        if self.delay == 0 or target >= self.num_layers:
            return None
        return target if self.reduce_mode(target, sublayer) is ReduceMode.DELAYED else None

    def window(self, layer_idx: int) -> int | None:
        """Positions that a token of this layer sees, itself included; None = all before it."""
        if self.mixed_layers:
            mixer = self.mixed_layers[layer_idx].mixer
            return mixer.window if isinstance(mixer, AttentionMixer) else None
        return self.sliding_window if layer_idx in self.window_layers else None

    def vocab_slice(self, lane: int) -> tuple[int, int]:
        """First and one-past-last vocabulary row whose logits lane `lane` computes. The same for every world size."""
        rows = -(-self.vocab_size // self.num_lanes)
        return min(lane * rows, self.vocab_size), min((lane + 1) * rows, self.vocab_size)

    def lanes_of_rank(self, rank: int, world_size: int) -> range:
        """The contiguous lanes that `rank` hosts. Raises ConfigError if `world_size` does not divide the lanes."""
        if world_size < 1 or self.num_lanes % world_size:
            fitting = [n for n in range(1, self.num_lanes + 1) if self.num_lanes % n == 0]
            if self.num_lanes == 1:
                raise ConfigError(
                    f"this model cannot be split over {world_size} ranks: its heads and FFN are one lane; use 1 rank"
                )
            raise ConfigError(
                f"{self.num_lanes} lanes cannot be spread over {world_size} ranks; use one of {', '.join(map(str, fitting))}"
            )
        per_rank = self.num_lanes // world_size
        return range(rank * per_rank, (rank + 1) * per_rank)

    def with_context(self, num_tokens: int) -> ModelSpec:
        """The same model for at most so many tokens; 0: as it is. Raises ConfigError if it cannot have as many.

        With YaRN that are as many as it stretches positions for, whatever the model has without being asked.
        """
        stretched = self.rope_scaling.stretched_context if isinstance(self.rope_scaling, YarnScaling) else 0
        most = max(self.max_context, min(stretched, model_limits.MAX_CONTEXT))
        if num_tokens > most:
            raise ConfigError(f"context {num_tokens} exceeds the {most} tokens of the model; give at most these")
        return replace(self, max_context=num_tokens) if num_tokens else self

    def digest(self) -> str:
        """SHA-256 over all fields: equal exactly when two specs describe the same model."""
        return hashlib.sha256(json.dumps(self.to_config(), sort_keys=True).encode()).hexdigest()

    # ---- config.json ----
    def to_config(self) -> dict[str, object]:
        """The `config.json` of this spec in the later field revision; `read_config` of it gives an equal spec."""
        config: dict[str, object] = {
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
            config["rope_scaling"] = {"rope_type": self.rope_scaling.rope_type, **asdict(self.rope_scaling)}
        if self.own_head_dim is not None:
            config["head_dim"] = self.own_head_dim
        if self.qkv_bias:
            config["qkv_bias"] = True
        if self.out_bias:
            config["out_bias"] = True
        if self.qk_norm:
            config["qk_norm"] = True
        if self.attention_sinks:
            config["attention_sinks"] = True
        if self.experts is not None:
            config["experts"] = self.experts.to_config()
        if self.mixed_layers:  # for digests: no file has them so
            kinds = list(dict.fromkeys(self.mixed_layers))
            config["layer_kinds"] = [kind.described() for kind in kinds]
            config["layers"] = [kinds.index(layer) for layer in self.mixed_layers]
        return config


@lru_cache(maxsize=64)
def _one_of_all_equal(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """So that equal specs, which are compared often, are compared at once."""
    return layers


@lru_cache(maxsize=64)
def _kinds(spec: ModelSpec) -> tuple[MixerKind | FfnKind, ...]:
    return tuple(dict.fromkeys(part for layer in spec.layers for part in (layer.mixer, layer.ffn)))


@lru_cache(maxsize=64)
def _layers(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    ffn = Ffn(spec.intermediate_size) if spec.experts is None else Experts(spec.intermediate_size, spec.experts)
    norm = Norm(spec.norm_eps, by_lane=not spec.shared_norm_scale)
    windows = (spec.window(layer_idx) for layer_idx in range(spec.num_layers))
    of_window = {
        window: LayerSpec(
            AttentionMixer(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                window,
                spec.qkv_bias,
                spec.out_bias,
                spec.qk_norm,
                spec.attention_sinks,
            ),
            ffn,
            norm,
        )
        for window in {None, spec.sliding_window}
    }
    return tuple(of_window[window] for window in windows)


def laneformer_2b() -> ModelSpec:
    """The published 2B shape: 2,320,069,632 parameters, 4,443,531,264 bytes read per token in 16 bit."""
    return ModelSpec(
        hidden_size=3072, num_layers=15, num_heads=32, num_kv_heads=16, intermediate_size=12288, vocab_size=32000,
        max_context=4096, num_lanes=8, delay=2, sliding_window=512, window_layers=tuple(range(10)),
    )  # fmt: skip
