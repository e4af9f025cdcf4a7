"""A model folder as Hugging Face publishes them, of any shape that runs here: transformers and other engines read it, too.

Its weights are random, so that answers are sense-less but sane; or those of a chain, which writes known texts: attention and MLP
add almost nothing to the embedding of a token, and the head's row of what follows it is that embedding. Either way every weight
is there and is read, as those of the real model are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.fakes.published_gpt_oss import Ends, write_gpt_oss
from kog_dist.bench.made_models.chain import TextChain
from kog_dist.errors import ConfigError
from kog_dist.late_numpy import Array
from kog_dist.model.families import FAMILIES
from kog_dist.model.layout import EMBEDDING, head_name, tensor_layouts
from kog_dist.model.published_config import read_config
from kog_dist.model.safetensors_file import narrow, write_safetensors
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message.content }}{% endfor %}"
)
BRANCH_EXPONENT: Final = -20  # of two: of what attention and MLP of a chain's model add
TOP_LOGIT: Final = 90.0  # of the token that follows; others have half as much at most, whatever the temperature
_BIAS: Final = 0.02
_LEAST_HIDDEN: Final = 64
_SHARD_BYTES: Final = 2 << 30
_DRAWN: Final = (1 << 22) + 15  # values that are drawn, a prime number; tensors repeat them, each from another place on
_SUMMED: Final = ("wo.weight", "w2.weight", "wo.bias", "w2.bias")

Stored = tuple[str, tuple[int, ...], Array]


@dataclass(frozen=True, slots=True)
class MadeModel:
    """What was written. `num_tokens`: of each text of a chain, the end included."""

    spec: ModelSpec
    num_bytes: int
    num_tokens: tuple[int, ...]


def write_published(folder: Path, config: Mapping[str, Any], *, seed: int = 1, chain: TextChain | None = None) -> MadeModel:
    """Write config, weights, tokenizer and chat template into a new folder.

    `config`: of a family with an entry in ARCHITECTURES, of 16-bit weights or of gpt-oss. Takes the memory of some layers and
    of the embedding. Raises ConfigError where the shape has no room for the chain, CheckpointError where a file cannot be
    written.
    """
    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        raise ConfigError(f"models of {model_type} cannot be made; those of {', '.join(ARCHITECTURES)} can")
    end_id = config["vocab_size"] - 1
    given = {**config, "architectures": [ARCHITECTURES[model_type]], "bos_token_id": None, "eos_token_id": end_id}
    if chain is not None:
        given["tie_word_embeddings"] = False  # its head has other rows than its embedding
    spec = read_config(given)
    write_tokenizer(folder, spec.vocab_size, chain.names if chain else ())
    ends = _random_ends(spec, seed) if chain is None else _chain_ends(spec, chain, end_id, seed)
    exponent = 0 if chain is None else BRANCH_EXPONENT
    if model_type == "gpt_oss":
        write_gpt_oss(folder, given, seed=seed, branch_exponent=exponent, ends=ends)
    else:
        _write(folder, spec, model_type, _Values(spec, seed, ends, exponent))
        (folder / "config.json").write_text(json.dumps({**given, "torch_dtype": "bfloat16"}, indent=2))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return MadeModel(spec, num_bytes, () if chain is None else tuple(1 + len(pieces) for pieces in chain.texts))


def _random_ends(spec: ModelSpec, seed: int) -> Ends:
    """Of a model that never says a token again and again: the last norm turns the stream around, so that the token which was read
    is the last one to follow itself. Embedding and head have the same values, so that it is so of models that tie them, too.
    """
    table = narrow(np.random.default_rng(seed).standard_normal((spec.vocab_size, spec.hidden_size), np.float32), "BF16")
    return Ends(table, table, _norm_weights(spec, -1, (spec.hidden_size,)))


def _chain_ends(spec: ModelSpec, chain: TextChain, end_id: int, seed: int) -> Ends:
    """Codes of plus and minus one: a token is embedded as that of what follows it, which the head then finds."""
    if spec.hidden_size < _LEAST_HIDDEN:
        raise ConfigError(f"a chain needs a hidden size of at least {_LEAST_HIDDEN} to tell tokens apart, not {spec.hidden_size}")
    codes = np.random.default_rng(seed).integers(0, 2, (spec.vocab_size, spec.hidden_size), np.int8) * 2 - 1
    following = np.full(spec.vocab_size, chain.begin_id)
    for token_id, next_id in chain.following(end_id).items():
        following[token_id] = next_id
    head = codes * np.float32(TOP_LOGIT / spec.hidden_size)
    return Ends(narrow(codes[following], "BF16"), narrow(head, "BF16"), _norm_weights(spec, 1, (spec.hidden_size,)))


def _norm_weights(spec: ModelSpec, factor: int, shape: tuple[int, ...]) -> Array:
    """As files have them, of a norm that multiplies with `factor`."""
    return narrow(np.full(shape, factor - spec.layers[0].norm.adds_one, np.float32), "BF16")


class _Values:
    """Values of tensors, by the engine's names. `exponent`: of what attention and MLP add."""

    def __init__(self, spec: ModelSpec, seed: int, ends: Ends, exponent: int) -> None:
        self._spec, self._ends, self._exponent = spec, ends, exponent
        self._head_name = head_name(spec)
        self._drawn = np.random.default_rng(seed).standard_normal(_DRAWN, np.float32)
        self._rounded: dict[float, Array] = {}  # by deviation; there are few
        self._place = 0

    def of(self, name: str, shape: tuple[int, ...]) -> Array:
        """Those of one tensor."""
        ends = {self._head_name: self._ends.head, EMBEDDING: self._ends.embedding, "model.norm.weight": self._ends.norm}
        if name in ends:
            return ends[name]
        if ".delta.norm." in name:  # which multiplies with its weights as they are
            return narrow(np.ones(shape, np.float32), "BF16")
        if "norm" in name:
            return _norm_weights(self._spec, 1, shape)
        deviation = _BIAS if name.endswith(".bias") else shape[-1] ** -0.5
        if name.endswith(_SUMMED):
            deviation *= 2.0**self._exponent
        return self._drawn_from(deviation, int(np.prod(shape))).reshape(shape)

    def _drawn_from(self, deviation: float, count: int) -> Array:
        if deviation not in self._rounded:
            self._rounded[deviation] = narrow(self._drawn * np.float32(deviation), "BF16")
        source, values, done = self._rounded[deviation], np.empty(count, "<u2"), 0
        while done < count:
            taken = source[self._place : self._place + count - done]
            values[done : done + len(taken)] = taken
            done += len(taken)
            self._place = (self._place + len(taken)) % _DRAWN
        return values


def _stored_tensors(spec: ModelSpec, model_type: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names and shapes of what files have, with the engine's name of it, or of the first that it has in it."""
    family, layouts = FAMILIES[model_type], tensor_layouts(spec)
    names, parts = family.stored_names(spec, layouts), {} if family.parts is None else family.parts(spec)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, layout in layouts.items():
        stored = names[name]
        part = parts.get(stored.name)
        tensor, shape = (stored.name, stored.shape(layout)) if part is None else (part.tensor, part.whole)
        found.setdefault(tensor, (name, shape))
    return found


def _write(folder: Path, spec: ModelSpec, model_type: str, values: _Values) -> None:
    """Files of at most _SHARD_BYTES, or of one tensor, and their index."""
    tensors = _stored_tensors(spec, model_type)
    shards: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for tensor, (_, shape) in tensors.items():
        room -= 2 * prod(shape)
        if room < 0 and shards[-1]:
            shards.append([])
            room = _SHARD_BYTES - 2 * prod(shape)
        shards[-1].append(tensor)
    place: dict[str, str] = {}
    for shard_idx, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{shard_idx + 1:05}-of-{len(shards):05}.safetensors"
        stored: dict[str, Stored] = {}
        for tensor in shard:
            name, shape = tensors[tensor]
            stored[tensor] = "BF16", shape, values.of(name, shape)
        write_safetensors(folder / file, stored)
        place |= dict.fromkeys(stored, file)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
