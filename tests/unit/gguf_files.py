"""GGUF files for tests: small random models written with llama.cpp's own package, as its converter would."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 2, 4, 2, 16, 128, 300
SIZES: dict[str, Any] = {
    "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": FFN, "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS, "context_length": 256, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5, "rope.dimension_count": HEAD_DIM,
}  # fmt: skip


def alphabet() -> list[str]:
    """The characters that stand for bytes in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def vocabulary(pre: str = "qwen2") -> dict[str, Any]:
    """256 bytes, two merges, control tokens and fillers up to VOCAB."""
    tokens = ["<|end|>", "<|begin|>", "<tool>", *alphabet(), "th", "the"]
    kinds = [3, 3, 4, *[1] * (len(tokens) - 3)]
    fillers = VOCAB - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(fillers)],
        "tokenizer.ggml.token_type": kinds + [5] * fillers, "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip


def random_tensors(architecture: str, seed: int = 1, *, tied: bool = True) -> Tensors:
    """Under Hugging Face's names and in its order of rows."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (HIDDEN,), prefix + "post_attention_layernorm.weight": (HIDDEN,)}
        for kind, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{kind}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{prefix}self_attn.{kind}_proj.bias"] = (heads * HEAD_DIM,)
        if architecture == "qwen3":
            shapes |= {f"{prefix}self_attn.{kind}_norm.weight": (HEAD_DIM,) for kind in "qk"}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {f"{prefix}mlp.{kind}_proj.weight": (FFN, HIDDEN) for kind in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, FFN)
    return {name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.125) for name, shape in shapes.items()}


_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def llama_name(name: str) -> str:
    """Of a tensor in a GGUF file."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if "layers" in parts else ""
    return f"{layer}{_NAMES[parts[-2]]}.{parts[-1]}"


def llama_rows(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the converter of the llama architecture does to queries and keys, one row after the other."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    moved = np.empty_like(values)
    for row in range(len(values)):
        head, place = divmod(row, HEAD_DIM)
        half, pair = divmod(place, HEAD_DIM // 2)
        moved[head * HEAD_DIM + 2 * pair + half] = values[row]
    return moved


def write_gguf(
    path: Path, architecture: str, tensors: Mapping[str, NDArray[Any]], *, form: str = "F16",
    sizes: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None, forms: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """A file with matrices in `form`, or what `forms` says (norms, biases and `extra` in F32). None as a size or metadata leaves
    the key out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    given = {f"{architecture}.{key}": value for key, value in {**SIZES, **(sizes or {})}.items()}
    for key, value in {**given, **vocabulary(), **(metadata or {})}.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        stored = llama_rows(name, values) if architecture == "llama" else values
        kind = gguf.GGMLQuantizationType[(forms or {}).get(name, form) if values.ndim == 2 else "F32"]
        raw = gguf.quants.quantize(stored, kind) if kind.name not in ("F32", "F16") else stored.astype(_DTYPES[kind.name])
        writer.add_tensor(llama_name(name), raw, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_DTYPES = {"F32": np.float32, "F16": np.float16}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
    getattr(writer, f"add_{kind}")(key, value)


def raw_text(text: str) -> bytes:
    """As a header has it."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
