"""GGUF files: the tensors, config, tokenizer and template that they stand for, and headers that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError
from kog_dist.launch.inspection import check, dry_run
from kog_dist.launch.target import model_folder
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.generation_config import read_eos_ids, read_sampling_defaults
from kog_dist.model.gguf.config import ROPE_FACTORS, _vocab_size
from kog_dist.model.gguf.folder import open_weights, published_file
from kog_dist.model.gguf.header import FORMATS, PLAIN, Format, GgufHeader, read_header
from kog_dist.model.gguf.pre_tokenizers import CUTS
from kog_dist.model.gguf.tensors import GgufFile, dequantised, read_plain
from kog_dist.model.gguf.vocabulary import read_tokenizer
from kog_dist.model.published_config import spec_of_folder
from kog_dist.model.safetensors_file import narrow, widen, write_safetensors
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.model_limits import MAX_GGUF_ITEMS, MAX_GGUF_KEYS
from tests.unit.gguf_files import HEAD_DIM, HEADS, SIZES, VOCAB, alphabet, random_tensors, raw_text, vocabulary, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def weights(path: Path) -> GgufFile:
    (opened,) = open_weights(path)
    return opened


def read(file: GgufFile, name: str, first: int = 0, last: int | None = None) -> NDArray[np.float32]:
    shape = file.tensors[name].shape
    out = np.empty(((shape[0] if last is None else last) - first, *shape[1:]), np.float32)
    file.read(name, first, first + len(out), out, verify=True)
    return out


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    out = np.empty(values.size, np.float32)
    widen(narrow(values, dtype).reshape(-1).view(np.uint8), dtype, out)
    return out.reshape(values.shape)


# ---- weights ----
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back_under_their_published_names_and_rows(path: Path, architecture: str, tied: bool) -> None:
    tensors = random_tensors(architecture, tied=tied)
    write_gguf(path, architecture, tensors)
    file = weights(path)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        assert np.array_equal(read(file, name), rounded(values, "F16") if values.ndim == 2 else values), name
    spec = spec_of_folder(path)
    assert (spec.head_dim, spec.num_heads, spec.vocab_size, spec.tied_embeddings) == (HEAD_DIM, HEADS, VOCAB, tied)
    assert (spec.norm_eps, spec.rope_theta, spec.max_context) == (1e-5, 5e5, 256)
    assert (spec.qkv_bias, spec.qk_norm) == (architecture == "qwen2", architecture == "qwen3")


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_format_is_what_llama_cpp_has_rounded_to_16_bit(path: Path, form: str) -> None:
    tensors = random_tensors("qwen3")
    write_gguf(path, "qwen3", tensors, form=form)
    checkpoint, file = open_checkpoint(path), weights(path)
    assert checkpoint.dtype == {"F32": "float32", "BF16": "bfloat16"}.get(form, "float16")
    for name, values in tensors.items():
        if values.ndim == 1:
            continue
        kind = gguf.GGMLQuantizationType[form]
        exact = values if form == "F32" else gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert np.array_equal(read(file, name), rounded(exact, file.tensors[name].dtype))


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 20), (15, 17), (17, 64)])
def test_any_rows_can_be_read_also_of_heads_that_lie_otherwise(path: Path, first: int, last: int) -> None:
    tensors = random_tensors("llama")
    write_gguf(path, "llama", tensors, form="Q8_0")
    name = "model.layers.1.self_attn.q_proj.weight"
    file = weights(path)
    assert np.array_equal(read(file, name, first, last), read(file, name)[first:last])
    pieces = list(file.stored_chunks(name, first, last, lambda: memoryview(bytearray(100))))
    assert all(len(piece) == 100 for piece in pieces[:-1]), "as full as the caller's buffers"
    assert sum(map(len, pieces)) == (last - first) * 64 * 2


def test_the_same_weights_in_a_gguf_file_and_in_a_folder_are_the_same_model(path: Path, tmp_path: Path) -> None:
    write_gguf(path, "llama", random_tensors("llama"), form="Q4_1")
    file, folder = weights(path), tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_bytes(published_file(path, "config.json") or b"")
    stored = {name: (tensor.dtype, tensor.shape, narrow(read(file, name), tensor.dtype)) for name, tensor in file.tensors.items()}
    write_safetensors(folder / "model.safetensors", stored)
    one, other = open_checkpoint(path), open_checkpoint(folder)
    assert one.spec == other.spec
    for name in one.layouts:
        assert np.array_equal(one.tensor(name), other.tensor(name)), name


QUANTISED = [form for form in FORMATS.values() if form.name not in PLAIN]


@pytest.mark.parametrize("form", QUANTISED, ids=lambda form: form.name)
def test_every_format_of_the_package_is_read_and_rounded_once(path: Path, form: Format) -> None:
    """Any bytes but those of scales that are no numbers are blocks."""
    kind, rows, columns = gguf.GGMLQuantizationType[form.name], 8, 512
    assert gguf.GGML_QUANT_SIZES[kind] == (form.block_values, form.block_bytes)
    raw = np.random.default_rng(3).integers(0, 256, (rows, columns // form.block_values * form.block_bytes), np.uint8)
    raw[:, 1::2] &= 0x3F  # halves below 2: none is infinite
    if form.name == "MXFP4":
        raw[:, :: form.block_bytes] %= 140  # exponents
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in SIZES.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact = gguf.quants.dequantize(raw, kind)
    read_rows = read(weights(path), "model.embed_tokens.weight")
    assert read_rows.shape == (rows, columns)
    assert np.array_equal(read_rows, rounded(exact, "F16"))


def test_tensors_of_both_16_bit_types_stay_what_they_are(path: Path) -> None:
    tensors = random_tensors("qwen3")
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    write_gguf(path, "qwen3", tensors, forms={name: "BF16", other: "Q5_0"})
    file, checkpoint = weights(path), open_checkpoint(path)
    assert np.array_equal(read(file, name), rounded(tensors[name], "BF16"))
    assert file.tensors[other].dtype == "F16"
    assert checkpoint.dtype == "float16"
    assert checkpoint.note == "some weights are bfloat16 and float32: CPU ranks take them as they are, GPUs round them to float16"


# ---- parts ----
def split(path: Path, count: int, **changes: Any) -> list[Path]:
    """What `llama-gguf-split` makes of the model of `write_gguf`: metadata in the first part, tensors in all."""
    tensors = random_tensors("llama")
    names = sorted(tensors)
    parts = [path.with_name(f"big-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    for number, part in enumerate(parts):
        mine = {name: tensors[name] for name in names[number::count]}
        said = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)} | changes
        sizes, metadata = (dict.fromkeys(SIZES), dict.fromkeys(vocabulary())) if number else ({}, {})
        write_gguf(part, "llama", mine, form="Q8_0", sizes=sizes, metadata={**metadata, **said})
    write_gguf(path, "llama", tensors, form="Q8_0")
    return parts


def test_parts_are_one_model_whichever_is_given(path: Path, tmp_path: Path) -> None:
    parts = split(path, 3)
    whole = open_checkpoint(path)
    folder = tmp_path / "folder"
    folder.mkdir()
    for part in parts:
        (folder / part.name).symlink_to(folder / f"{part.name}.kept")
        (folder / f"{part.name}.kept").write_bytes(part.read_bytes())
    for model in (*parts, folder):
        other = open_checkpoint(model)
        assert other.spec == whole.spec
        for name in whole.layouts:
            assert np.array_equal(other.tensor(name), whole.tensor(name)), name
        assert Tokenizer.from_folder(model) is not None
    assert model_folder(LaunchConfig(model=str(parts[1])))[1] == "big"
    assert "Q8_0 (read as float16), 3 files" in check(LaunchConfig(model=str(parts[2]), device="cpu", ranks=1), deep=True)


def test_parts_that_are_missing_or_of_another_file_are_refused(path: Path) -> None:
    parts = split(path, 3)
    kept = parts[1].read_bytes()
    parts[1].unlink()
    for model in (parts[0], parts[2]):
        assert f"{parts[1]} is missing, one of 3 parts" in refusal(partial(open_checkpoint, model))
    parts[1].write_bytes(parts[2].read_bytes())
    assert f"{parts[1]} says that it is part 2 (counted from 0) of 3, here it is 1 of 3" in refusal(
        lambda: open_checkpoint(parts[0])
    )
    parts[1].write_bytes(kept)
    open_checkpoint(parts[0])
    split(path, 3, **{"split.tensors.count": 99})
    assert "have 20 tensors, but the first says 99" in refusal(lambda: open_checkpoint(parts[0]))
    parts[0].rename(parts[0].with_name("first.gguf"))
    assert "here it is 0 of 1" in refusal(lambda: open_checkpoint(parts[0].with_name("first.gguf")))


def nibbles(block: bytes) -> list[int]:
    return [byte & 15 for byte in block] + [byte >> 4 for byte in block]


def q4_k(block: bytes) -> list[float]:
    """One block by the definition of block_q4_K: two scales, 8 six-bit pairs of factors, 256 nibbles."""
    scale, least = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, values = block[4:16], []
    for part in range(8):
        if part < 4:
            factor, offset = packed[part] & 63, packed[part + 4] & 63
        else:
            factor = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            offset = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        raw = block[16 + part // 2 * 32 : 48 + part // 2 * 32]
        values += [scale * factor * (byte >> 4 if part % 2 else byte & 15) - least * offset for byte in raw]
    return values


def q6_k(block: bytes) -> list[float]:
    """One block by the definition of block_q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 factors, one scale."""
    low, high, factors = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    scale = float(np.frombuffer(block[208:], np.float16)[0])
    values = np.empty(256)
    for half in range(2):
        for i in range(32):
            top = high[half * 32 + i]
            for quarter in range(4):
                byte = low[half * 64 + i + 32 * (quarter % 2)]
                value = (byte >> 4 if quarter > 1 else byte & 15) | (top >> 2 * quarter & 3) << 4
                place = half * 128 + quarter * 32 + i
                values[place] = scale * float(factors[place // 16]) * (value - 32)
    return list(values)


@pytest.mark.parametrize(("form", "num_bytes", "twin", "scales"), [("Q4_K", 144, q4_k, (0, 2)), ("Q6_K", 210, q6_k, (208,))])
def test_k_quants_follow_their_definition(
    form: str, num_bytes: int, twin: Callable[[bytes], Any], scales: tuple[int, ...]
) -> None:
    raw = bytearray(np.random.default_rng(1).integers(0, 256, 8 * num_bytes, np.uint8).tobytes())
    for block in range(8):
        for place in scales:
            raw[block * num_bytes + place : block * num_bytes + place + 2] = np.float16(0.01 * (block + 1)).tobytes()
    expected = [value for block in range(8) for value in twin(bytes(raw[block * num_bytes : (block + 1) * num_bytes]))]
    assert np.allclose(dequantised(raw, form), expected, rtol=1e-5, atol=1e-5)


def test_a_value_that_is_not_finite_is_named(path: Path) -> None:
    tensors = random_tensors("llama")
    write_gguf(path, "llama", tensors, form="Q4_0")
    file = weights(path)
    raw = bytearray(path.read_bytes())
    tensor = file.sources["model.layers.0.mlp.up_proj.weight"].tensor
    raw[tensor.begin : tensor.begin + 2] = b"\x00\x7c"
    path.write_bytes(raw)
    said = refusal(lambda: read(weights(path), "model.layers.0.mlp.up_proj.weight"))
    assert "model.layers.0.mlp.up_proj.weight has a value that is not finite (element 0 of it)" in said
    assert "was changed or replaced" in refusal(lambda: read(file, "model.norm.weight"))


# ---- config ----
def llama3_factors(factor: float) -> NDArray[np.float32]:
    """As llama.cpp's converter computes them."""
    found = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 5e5 ** (2 * pair / HEAD_DIM)
        smooth = (8192 / wavelength - 1) / 3
        found.append(1 if wavelength < 2048 else factor if wavelength > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_rotary_factors_are_llama_3_s_scaling(path: Path) -> None:
    write_gguf(path, "llama", random_tensors("llama"), extra={"rope_freqs.weight": llama3_factors(32)})
    config = json.loads(published_file(path, "config.json") or b"")
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    open_checkpoint(path)
    for factors in (llama3_factors(32) * 2, np.ones(3, np.float32), np.full(HEAD_DIM // 2, np.nan, np.float32)):
        write_gguf(path, "llama", random_tensors("llama"), extra={"rope_freqs.weight": factors})
        assert "rope_freqs.weight is not how Llama 3" in refusal(lambda: spec_of_folder(path))


@pytest.mark.parametrize(
    ("sizes", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.attn_factor": 0.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attn_factor": 0.5,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scaling_of_rotary_positions(path: Path, sizes: dict[str, Any], scaling: object) -> None:
    write_gguf(path, "qwen2", random_tensors("qwen2"), sizes=sizes)
    assert json.loads(published_file(path, "config.json") or b"").get("rope_scaling") == scaling
    open_checkpoint(path)


@pytest.mark.parametrize(
    ("sizes", "cause"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": "2"}, "llama.block_count must be an integer, got '2'"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv must be an integer, or the same one for each layer, got"),
        ({"attention.head_count_kv": [2]}, "or the same one for each layer, got [2]"),
        ({"attention.head_count_kv": [2, 2, 2]}, "or the same one for each layer, got [2, 2, 2]"),
        ({"feed_forward_length": [48]}, "or the same one for each layer, got [48]"),
        ({"attention.head_count": [True, True]}, "attention.head_count must be an integer, got True"),
        ({"block_count": [2]}, "llama.block_count must be an integer, got [2]"),
        ({"block_count": [2, 2]}, "llama.block_count must be an integer, got [2, 2]"),
        ({"embedding_length": [64]}, "llama.embedding_length must be an integer, got [64]"),
        ({"rope.freq_base": [1e4]}, "llama.rope.freq_base must be a number, got [10000.0]"),
        ({"attention.layer_norm_rms_epsilon": [1e-5, 1e-5]}, "must be a number, got ["),
        ({"rope.freq_base": 1e-45}, "rope_theta must be between 10 and 1e+12, got 1"),
        ({"rope.freq_base": 0.0}, "rope_theta must be between 10 and 1e+12, got 0"),
        ({"rope.freq_base": -1e4}, "rope_theta must be between 10 and 1e+12, got -10000"),
        ({"rope.freq_base": 3e38}, "rope_theta must be"),
        ({"attention.layer_norm_rms_epsilon": 4e9}, "norm_eps must be between 1e-12 and 0.1, got 4e+09"),
        ({"attention.layer_norm_rms_epsilon": 1e-45}, "norm_eps must be between 1e-12 and 0.1, got 1"),
        ({"attention.layer_norm_rms_epsilon": -1e-5}, "norm_eps must be between 1e-12 and 0.1, got -1e-05"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1e-45}, "factor of a rope scaling must be between 1 and 16384"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1e9}, "factor of a rope scaling must be between 1 and 16384"),
        ({"rope.scale_linear": 4e9}, "factor of a rope scaling must be between 1 and 16384"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2**30},
            "original_max_position_embeddings must be between 1 and 1.04858e+06",
        ),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be a number, got nan"),
        ({"attention.value_length": 8}, "attention.value_length 8 is not the head size 16"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8 is not the head size 16"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.original_context_length is missing"),
        ({"expert_count": 8}, "'llama.expert_count' 8 is not supported"),
        ({"attention.sliding_window": 64}, "'llama.attention.sliding_window' 64 is not supported"),
        ({"logit_scale": 0.5}, "'llama.logit_scale' 0.5 is not supported"),
        ({"attention.scale": 0.5}, "'llama.attention.scale' 0.5 is not supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"vocab_size": 301}, "it has 301 tokens, but only 300 rows"),
        ({"attention.key_length": 12}, "are no heads of 12"),
        ({"block_count": 3}, "lacks tensor model.layers.2."),
        ({"block_count": 1}, "model.layers.1."),
    ],
)
def test_what_the_metadata_cannot_mean_is_refused_by_name(path: Path, sizes: dict[str, Any], cause: str) -> None:
    if "attention.key_length" in sizes:
        sizes = sizes | {"rope.dimension_count": sizes["attention.key_length"]}
    write_gguf(path, "llama", random_tensors("llama"), sizes=sizes)
    said = refusal(lambda: open_checkpoint(path))
    assert cause in said
    assert str(path) in said


def test_other_architectures_and_parts_are_refused(path: Path) -> None:
    write_gguf(path, "gemma3", {})
    assert "general.architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3" in refusal(
        lambda: spec_of_folder(path)
    )
    write_gguf(path, "llama", random_tensors("llama"), metadata={"split.count": 3, "split.no": 0})
    assert "says that it is part 0 (counted from 0) of 3, here it is 0 of 1" in refusal(lambda: spec_of_folder(path))


def test_keys_that_nothing_knows_are_left_out_and_named(path: Path) -> None:
    more = {"tensor_data_layout": "Meta AI original pth", "expert_count": 0, "key.of.next.year": 3}
    write_gguf(path, "llama", random_tensors("llama"), sizes=more)
    assert open_checkpoint(path).note == "model.gguf: 'llama.key.of.next.year', 'llama.tensor_data_layout' left out"


def test_small_lists_of_one_number_are_that_number(path: Path) -> None:
    write_gguf(path, "llama", random_tensors("llama"), sizes={"attention.head_count_kv": [2, 2]})
    assert spec_of_folder(path).num_kv_heads == 2


# ---- the folder it stands for ----
def test_a_file_or_a_folder_with_one_is_a_model(path: Path, tmp_path: Path) -> None:
    write_gguf(path, "llama", random_tensors("llama"))
    assert model_folder(LaunchConfig(model=str(path))) == (path, "model")
    for model in (path, tmp_path):
        config = LaunchConfig(model=str(model), device="cpu", ranks=1)
        assert "float16, 1 file" in check(config, deep=True)
        assert "parameters, float16 on disk" in dry_run(config)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    assert "has 2 GGUF files ('model.gguf', 'other.gguf')" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / "other.gguf").unlink()
    path.rename(tmp_path.parent / "outside.gguf")
    path.symlink_to(tmp_path.parent / "outside.gguf")
    assert "leads out of the model folder" in refusal(lambda: open_checkpoint(tmp_path))


def test_tokens_template_and_sampling_come_from_the_file_unless_files_lie_beside_it(path: Path, tmp_path: Path) -> None:
    own = {"tokenizer.ggml.eot_token_id": 1, "general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    write_gguf(path, "llama", random_tensors("llama"), metadata=own)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    assert tokenizer.eos_ids == read_eos_ids(path) == (0, 1)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.encode("the<tool><|end|>") == [260, 2, 0]
    sampling = read_sampling_defaults(path)
    assert (sampling.temperature, sampling.top_k) == (0.5, 20)
    template = ChatTemplate.from_folder(path, tokenizer)
    assert template is not None
    assert template.source == vocabulary()["tokenizer.chat_template"]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_eos_ids(tmp_path) == (5,)
    assert read_eos_ids(path) == (0, 1), "the file itself was given"


def test_without_a_vocabulary_it_takes_token_ids(path: Path) -> None:
    keys = {key: None for key in vocabulary() if key != "tokenizer.ggml.eos_token_id"}
    write_gguf(path, "llama", random_tensors("llama"), metadata=keys)
    assert Tokenizer.from_folder(path) is None
    assert spec_of_folder(path).vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "token 'a' stands twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no tokenizer.ggml.tokens, a list of texts"),
        ({"tokenizer.ggml.token_type": [1]}, "has 1 entries for 300 tokens"),
        ({"tokenizer.ggml.merges": ["t x"]}, "merge 't x' is no pair of tokens that make a token"),
        ({"tokenizer.ggml.merges": ["th"]}, "merge 'th' is no pair"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.bos_token_id": 300}, "bos_token_id 300 is no id of its 300 tokens"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token must be true or false"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template must be a text"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id 'x' is no id"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(path: Path, changes: dict[str, Any], cause: str) -> None:
    write_gguf(path, "llama", random_tensors("llama"), metadata=changes)
    said = refusal(lambda: Tokenizer.from_folder(path))
    assert cause in said
    assert str(path) in said


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "the 1234", ["the", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "the\n\n x", ["<|begin|>", "the", "Ċ", "Ċ", "Ġ", "x"]),
        ("smollm", "12the", ["1", "2", "the"]),
        ("tekken", "the/\n x", ["<|begin|>", "the", "/", "Ċ", "Ġ", "x"]),
        ("deepseek-coder", "the 12", ["the", "Ġ", "1", "2"]),
        ("smaug-bpe", "the\n\n x", ["the", "Ċ", "Ċ", "Ġ", "x"]),
    ],
)
def test_texts_are_cut_as_the_named_rule_says(path: Path, pre: str, text: str, pieces: list[str]) -> None:
    write_gguf(path, "llama", random_tensors("llama"), metadata={"tokenizer.ggml.pre": pre})
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    tokens = vocabulary()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode(text)
    assert [tokens[token_id] for token_id in ids] == pieces
    assert tokenizer.decode(ids) == text


# By llama.cpp's name: the expressions that it cuts with, one after the other, each what the one before has left.
_ENGLISH = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPRESSIONS = {
    "gpt-2": [_GPT2], "mpt": [_GPT2], "smollm": [r"\p{N}", _GPT2], "starcoder": [r"\p{N}", _GPT2], "qwen2": [_WORDS % ""],
    "stablelm2": [_WORDS % ""], "llama-bpe": [_WORDS % "{1,3}"], "smaug-bpe": [_WORDS % "{1,3}"], "glm4": [_WORDS % "{1,3}"],
    "tekken": [_CASED % ("", "", "")], "gpt-4o": [_CASED % (_ENGLISH + "?", _ENGLISH + "?", "{1,3}")],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
    "seed-coder": [
        _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}  # fmt: skip
TEXTS = [
    "Hello, World! It's 12345 o'clock.",
    "we'LL  see\n\n\ndef f(x):\n    return x**2  # 中文 かな",
    "a/b//\n c\t\td   ",
    "ÄÖÜ École naïve DŽ McDonald USA's 3.14159 ½ \uff12\uff13",
    "  \n \r\n x",
    '<|im_start|>{"a": [1, 22, 333, 4444]}',
    "🙂 ok_then -- A1b2 가나다",
]


def cut_as_llama_cpp_does(text: str, expressions: list[str]) -> list[str]:
    """What each expression matches, and what lies between."""
    pieces = [text]
    for expression in expressions:
        cut = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, piece):
                if match.end() > match.start():
                    cut += [piece[at : match.start()], match[0]]
                    at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("pre", EXPRESSIONS)
def test_texts_are_cut_as_llama_cpp_cuts_them(pre: str) -> None:
    vocab = {letter: number for number, letter in enumerate(alphabet())}
    parts = {"type": "Sequence", "pretokenizers": CUTS[pre].pre_tokenizers}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": parts, "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    library = tokenizers.Tokenizer.from_str(json.dumps(whole))
    for text in TEXTS:
        found = [text[first:last] for _, (first, last) in library.pre_tokenizer.pre_tokenize_str(text)]
        assert found == cut_as_llama_cpp_does(text, EXPRESSIONS[pre])


# ---- SentencePiece ----
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc"]
PIECES += ["ab", "bc", "abc", "\u2581a", "\u2581ab", "ca", "cab"]
SCORES = {"ab": -1.0, "bc": -0.5, "abc": -3.0, "\u2581a": -2.0, "\u2581ab": -4.0, "ca": -2.5, "cab": -2.6}


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a piece the one with the best score, the leftmost of equals."""
    pieces = ["\u2581" if letter == " " else letter for letter in " " + text]
    while True:
        best = max(
            (i for i in range(len(pieces) - 1) if pieces[i] + pieces[i + 1] in SCORES),
            key=lambda i: (SCORES[pieces[i] + pieces[i + 1]], -i), default=None,
        )  # fmt: skip
        if best is None:
            return pieces
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]


def sentence_piece() -> Tokenizer:
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [SCORES.get(piece, 0.0) for piece in PIECES], "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    return Tokenizer(json.dumps(read_tokenizer(metadata)))


SENTENCE_PIECE = sentence_piece()


@given(st.text("abc ", min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_sentence_piece_merges_by_score(text: str) -> None:
    ids = SENTENCE_PIECE.encode(text)
    assert ids[0] == PIECES.index("<s>")
    assert [PIECES[token_id] for token_id in ids[1:]] == merged_by_score(text)
    assert SENTENCE_PIECE.decode(ids) == text


def test_characters_that_no_piece_has_become_bytes() -> None:
    assert [PIECES[token_id] for token_id in SENTENCE_PIECE.encode("é")] == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert SENTENCE_PIECE.decode(SENTENCE_PIECE.encode("aé")) == "aé"


# ---- headers that lie ----
def header(*, version: int = 3, num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def entry(name: str = "x", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return raw_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "does not begin as a GGUF file"),
        (b"GGUF", "does not begin as a GGUF file"),
        (b"GGML" + bytes(60), "does not begin as a GGUF file"),
        (header(version=1), "of version 1; supported"),
        (header(version=3 << 24), "big-endian"),
        (header(num_tensors=2**40), f"announces {2**40} tensors"),
        (header(num_keys=MAX_GGUF_KEYS + 1), f"{MAX_GGUF_KEYS + 1} keys"),
        (header(num_keys=1, rest=struct.pack("<Q", 2**50)), "the name of a key has 1125899906842624 bytes"),
        (header(num_keys=1, rest=struct.pack("<Q", 200)), "beyond the end of the file"),
        (header(num_keys=1, rest=raw_text("\xff") + struct.pack("<I", 99)), "is of type 99"),
        (header(num_keys=1, rest=struct.pack("<Q", 1) + b"\xff"), "the name of a key is not UTF-8"),
        (header(num_keys=1, rest=raw_text("a") + struct.pack("<IB", 7, 2)), "'a' must be true or false, got 2"),
        (header(num_keys=2, rest=2 * (raw_text("a") + struct.pack("<IB", 0, 2))), "key 'a' stands twice"),
        (header(num_keys=1, rest=raw_text("a") + struct.pack("<IIQ", 9, 4, MAX_GGUF_ITEMS + 1)), "at most"),
        (header(num_keys=1, rest=raw_text("a") + struct.pack("<IIQ", 9, 4, 1000)), "beyond the end of the file"),
        (header(num_keys=1, rest=raw_text("a") + struct.pack("<IIQ", 9, 9, 1)), "array of type 9"),
        (header(num_tensors=1, rest=raw_text("x") + struct.pack("<I", 2**31)), "has 2147483648 dimensions"),
        (header(num_tensors=1, rest=entry(sizes=(0,))), "has the shape [0]"),
        (header(num_tensors=1, rest=entry(sizes=(2**40, 2**40))), "has the shape"),
        (header(num_tensors=1, rest=entry(kind=40)), "is of type NVFP4, which is not supported; supported: F32"),
        (header(num_tensors=1, rest=entry(kind=999)), "is of type 999"),
        (header(num_tensors=1, rest=entry(sizes=(33,), kind=2)), "no whole blocks of 32 (Q4_0)"),
        (header(num_tensors=1, rest=entry(offset=32)), "begins at byte 32 of the data, expected 0"),
        (header(num_tensors=1, rest=entry()), "truncated"),
        (header(num_tensors=2, rest=entry() + entry()), "tensor 'x' stands twice"),
        (header(num_tensors=2, rest=entry("a") + entry("b")), "begins at byte 0 of the data, expected 128"),
        (header(num_tensors=1, rest=entry(sizes=(8,)) + bytes(4096)), "belong to nothing"),
        (header(num_keys=1, rest=raw_text("general.alignment") + struct.pack("<II", 4, 3)), "must be a power of two"),
        (header(num_keys=1, rest=raw_text("general.alignment") + struct.pack("<II", 4, 0)), "must be a power of two"),
    ],
)  # fmt: skip
def test_headers_that_lie_are_refused_in_a_sentence(path: Path, raw: bytes, cause: str) -> None:
    path.write_bytes(raw)
    said = refusal(lambda: open_checkpoint(path))
    assert cause in said
    assert said.startswith(str(path))


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    write_gguf(path, "llama", random_tensors("llama"))
    whole = path.read_bytes()
    for end in (*range(0, 9000, 611), len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:end])
        refusal(lambda: open_checkpoint(path))


@pytest.mark.parametrize("kind", [3, 4])  # control, user-defined
@pytest.mark.parametrize(("eos", "end"), [("<|end_of_text|>", "<|eot_id|>"), ("<|endoftext|>", "<|im_end|>")])
def test_a_turn_ends_with_the_usual_names_whatever_the_file_says(path: Path, kind: int, eos: str, end: str) -> None:
    """llama.cpp 6772: files whose end of texts is given, and not that of turns, which some converters call user-defined."""
    tokens, kinds = list(vocabulary()["tokenizer.ggml.tokens"]), list(vocabulary()["tokenizer.ggml.token_type"])
    tokens[:3], kinds[:3] = [eos, "<|begin|>", end], [3, 3, kind]
    own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": 0}
    write_gguf(path, "llama", random_tensors("llama"), metadata=own)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.decode(tokenizer.encode(f"the{end}", add_special_tokens=False)) == "the"


@pytest.mark.parametrize(("named", "rows"), [(299, 300), (300, 300), (301, 300)])
def test_a_file_names_at_most_as_many_tokens_as_it_has_rows(named: int, rows: int) -> None:
    header = SimpleNamespace(
        tensors={"token_embd.weight": SimpleNamespace(shape=(rows, 8))}, metadata={"tokenizer.ggml.tokens": ["a"] * named}
    )
    if named <= rows:
        assert _vocab_size(cast(GgufHeader, header), {}) == rows
        return
    with pytest.raises(ValueError, match=f"it has {named} tokens, but only {rows} rows of token_embd.weight"):
        _vocab_size(cast(GgufHeader, header), {})


@pytest.mark.parametrize(("kind", "is_read"), [("F16", True), ("F32", True), ("Q8_0", False)])
def test_without_its_package_files_of_plain_weights_are_read_alone(
    kind: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    tensor = SimpleNamespace(format=SimpleNamespace(name=kind))
    header = SimpleNamespace(path=Path("a.gguf"), tensors={ROPE_FACTORS: tensor}, sha256=None, identity=(0, 0, 0))
    if is_read:
        assert not GgufFile.from_header(cast(GgufHeader, header), "llama", 16).tensors
        return
    with pytest.raises(CheckpointError, match=r"a\.gguf has quantised weights; to read them, pip install gguf"):
        GgufFile.from_header(cast(GgufHeader, header), "llama", 16)


def test_a_short_vector_is_one(tmp_path: Path) -> None:
    """Rotary factors: neither a matrix, nor codes, nor more than a megabyte."""
    extra = {"rope_freqs.weight": np.arange(8, dtype=np.float32)}
    extra |= {"long": np.zeros(2**18 + 1, np.float32), "as_long": np.ones(2**18, np.float32)}
    path = tmp_path / "a.gguf"
    write_gguf(path, "llama", random_tensors("llama"), extra=extra)
    header = read_header(path)
    assert read_plain(header, "rope_freqs.weight").tolist() == list(range(8))
    assert read_plain(header, "as_long").sum() == 2**18
    for name in ("long", "token_embd.weight"):
        with pytest.raises(ValueError, match=f"tensor {name} has the shape .* expected a short vector"):
            read_plain(header, name)
