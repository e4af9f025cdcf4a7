"""What a model must be so that the monokernel can run it, whatever the build."""

from __future__ import annotations

from kog_dist.decode.coding import Coding
from kog_dist.errors import ConfigError
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.spec import ModelSpec

MAX_GROUP = 8  # query heads that share a KV head: two sets of the matrix unit's columns
MAX_LAYERS = 128  # bits of two words
MAX_EXPERTS = 512  # sixteen of each thread of the warp that chooses
MAX_LANES = 32  # of the model: a warp has a thread for the scale of each lane's last stream
_TRIED = (1, 2, 4, 8, 10)  # experts of a token that GPUs have run in codes, and whose prompts they have read by chunks
_SEVERAL, _GATED, _NETS, _SHARED = "several kinds", "gated attention", "gated delta nets", "shared experts"
_ON_DEVICES = {_SEVERAL, _GATED, _NETS, _SHARED}  # of `_of_mixed`


def unsupported(spec: ModelSpec) -> list[str]:
    """What the model has and no build of the kernel can run, in words with the limit; empty: it can."""
    if findings := _not_on_devices(spec):  # none of what follows is asked of these
        return findings
    if spec.num_lanes > MAX_LANES:
        findings.append(f"{spec.num_lanes} lanes (at most {MAX_LANES})")
    if spec.experts is not None and spec.experts.num_experts > MAX_EXPERTS:
        findings.append(f"{spec.experts.num_experts} experts (at most {MAX_EXPERTS})")
    if spec.head_dim % 16:
        findings.append(f"head_dim {spec.head_dim} (a multiple of 16)")
    if spec.lane_heads // spec.lane_kv_heads > MAX_GROUP:
        findings.append(f"{spec.lane_heads // spec.lane_kv_heads} query heads per KV head (at most {MAX_GROUP})")
    if spec.lane_ffn % 4:
        findings.append(f"{spec.lane_ffn} FFN columns in a lane (a multiple of 4)")
    if spec.num_layers > MAX_LAYERS:
        findings.append(f"{spec.num_layers} layers (at most {MAX_LAYERS})")
    return findings


def untried(spec: ModelSpec, coding: Coding | None) -> str:
    """What of a model device code has and no GPU has run yet, so that engines refuse it; empty where all has.

    Shapes have it, for tests and benchmarks. A line goes when its test under tests/gpu has passed on a GPU.
    """
    per_token = 1 if spec.experts is None else spec.experts.per_token
    if coding is None or per_token in _TRIED:
        return ""
    return f"{per_token} quantised experts for each token (1, 2, 4, 8 or 10)"


def refuse_untried(spec: ModelSpec, coding: Coding | None) -> None:
    """Raises ConfigError for what engines refuse, see `untried`."""
    if what := untried(spec, coding):
        raise ConfigError(f"the CUDA kernel cannot run this model: it has {what}, which no GPU has run yet; use --device cpu")


def untried_in_prefill(spec: ModelSpec) -> str:
    """The same of prompts by chunks, which engines then take token by token."""
    experts = spec.experts
    if experts is None or experts.per_token in _TRIED:
        return ""
    return f"{experts.per_token} experts of {experts.num_experts}"


def untried_in_company(spec: ModelSpec, num_ranks: int) -> str:
    """The same of passes that several requests share; these then take turns."""
    return "delta nets on several ranks" if spec.is_recurrent and num_ranks > 1 else ""


def _not_on_devices(spec: ModelSpec) -> list[str]:
    """What stored layers have that device code has not: it has one kind of attention, of delta nets and of FFNs."""
    if not spec.mixed_layers:
        return []
    attention = [part for part in spec.kinds if isinstance(part, AttentionMixer)]
    nets = [part for part in spec.kinds if isinstance(part, DeltaNet)]
    against = {
        f"layers of {' and '.join(sorted(_of_mixed(spec) - _ON_DEVICES))}": not _of_mixed(spec) <= _ON_DEVICES,
        f"attention of {len(attention)} kinds (1)": len(attention) != 1,
        "delta nets of several kinds (1)": len(nets) > 1,
        "biases or sinks beside delta nets": bool(nets) and any(one.qkv_bias or one.out_bias or one.sinks for one in attention),
        "FFNs of several kinds (1)": len({layer.ffn for layer in spec.layers}) > 1,
        "windows of stored layers": any(one.window is not None for one in attention),
    }
    return [name for name, is_so in against.items() if is_so]


def _of_mixed(spec: ModelSpec) -> set[str]:
    """What a model with layers of several kinds has that the kernel does not know, in words."""
    found = set()
    for part in spec.kinds:
        if isinstance(part, DeltaNet):
            found.add(_NETS)
        elif isinstance(part, AttentionMixer):
            found |= {_GATED} if part.gated else set()
        elif isinstance(part, Experts):
            found |= {_SHARED} if part.shared_width else set()
        elif not isinstance(part, Ffn):
            found.add(type(part).__name__)
    return found or {_SEVERAL}
