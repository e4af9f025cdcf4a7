"""What a model would need and reach on the GPUs that the kernel is built for, from its config.json alone."""

from __future__ import annotations

from typing import Final, NamedTuple

from kog_dist.decode.plan.recipes import state_bytes
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kv_format import position_bytes

_BYTES: Final = 2  # of a value of the embedding table
_GIB: Final = 2**30
# The least that a token's chain takes, from traces: six times a layer all thread blocks wait for what others write, 0.7 us and
# more each, with what is computed between (docs/history/geometry.md); and the end of a token.
LAYER_S: Final = 6e-6
_TOKEN_S: Final = 2e-6


class GpuModel(NamedTuple):
    """A GPU as measured with this project's own loader: docs/machine.md."""

    name: str
    bytes_s: float
    free_bytes: int


GPUS: Final = (GpuModel("H100", 3.12e12, 78 * _GIB), GpuModel("H200", 4.57e12, 139 * _GIB))


def architecture(spec: ModelSpec) -> str:
    """One line about a model's shape."""
    experts, nets = spec.experts, [layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNet)]
    ffn = "FFN" if experts is None else f"{experts.num_experts} experts, {experts.per_token} of them chosen, of"
    parts = [
        f"{spec.num_layers} layers of {spec.hidden_size}",
        f"{spec.num_heads} query and {spec.num_kv_heads} KV heads of {spec.head_dim}",
        f"{ffn} {spec.intermediate_size}",
        f"vocabulary {spec.vocab_size}{' (tied)' if spec.tied_embeddings else ''}",
        f"context {spec.max_context}",
        f"{spec.num_lanes} lane{'s' if spec.num_lanes > 1 else ''} with delay {spec.delay}",
    ]
    if nets:
        parts[1] = (
            f"{len(nets)} of them gated delta nets of {nets[0].num_key_heads} key heads of {nets[0].key_dim} and "
            f"{nets[0].num_value_heads} value heads of {nets[0].value_dim}, the others attention of {parts[1]}"
        )
    shared = {layer.ffn.shared_width for layer in spec.layers if isinstance(layer.ffn, Experts)} - {0}
    if shared:
        parts[2] += f" and a shared one of {max(shared)}"
    if spec.window_layers:
        parts.append(f"window {spec.sliding_window} in {len(spec.window_layers)} layers")
    if spec.rope_scaling is not None:
        parts.append(f"{spec.rope_scaling.rope_type} rope")
    parts += [
        text
        for text, is_so in (
            ("attention sinks", spec.attention_sinks),
            ("QKV bias", spec.qkv_bias),
            ("bias of attention's output", spec.out_bias),
            ("QK norm", spec.qk_norm),
        )
        if is_so
    ]
    return ", ".join(parts)


def kv_bytes(spec: ModelSpec, num_positions: int, kv_dtype: str = "auto") -> int:
    """Keys and values of so many positions, of all lanes; layers with a window keep the window.

    In 16 bit, but where `--kv-dtype` asks for a format that GPUs have in codes.
    """
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionMixer)]
    kept = sum(min(num_positions, mixer.window or num_positions) for mixer in mixers)
    return kept * spec.num_kv_heads * position_bytes(spec.head_dim, kv_dtype)


def most_tokens_per_s(spec: ModelSpec, read_bytes: float, bytes_s: float) -> float:
    """What a GPU reaches at most that reads so many bytes for each token: by memory, or by waits in a row if that is little."""
    return 1.0 / max(read_bytes / bytes_s, spec.num_layers * LAYER_S + _TOKEN_S)


def predictions(spec: ModelSpec, read: int, kept: int, kv_dtype: str = "auto") -> list[str]:
    """For each number of GPUs that the model's lanes can be split over: memory of each GPU, and what it reaches at most.

    Each keeps its share of the weights, `kept` bytes in all, and reads for each token its share of `read` of them; the embedding
    table lies whole on every GPU. Communication is not counted, nor what prefill and windowed layers with all positions take: the
    lines of the ranks say that. A state of recurrent layers is kept, too, and read and written for each token.
    """
    table = spec.vocab_size * spec.hidden_size * _BYTES
    cache, state = kv_bytes(spec, spec.max_context, kv_dtype), state_bytes(spec)
    kept, read = kept + state, read + 2 * state
    lines = []
    for count in (n for n in (1, 2, 4, 8) if spec.num_lanes % n == 0):
        needed = kept // count + table + cache // count
        reached = ", ".join(_reached(spec, gpu, needed, read / count, cache / count) for gpu in GPUS)
        lines.append(f"{count} GPU{'s' if count > 1 else ' '} at least {needed / _GIB:5.1f} GiB each: {reached}")
    return lines


def _reached(spec: ModelSpec, gpu: GpuModel, needed: int, read: float, cache: float) -> str:
    if needed > gpu.free_bytes:
        return f"{gpu.name} too small"
    empty, full = (most_tokens_per_s(spec, num_bytes, gpu.bytes_s) for num_bytes in (read, read + cache))
    return f"{gpu.name} at most {empty:,.0f} tokens/s, {full:,.0f} with a full context"
