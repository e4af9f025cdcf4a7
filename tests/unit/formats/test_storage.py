"""Every format as files hold it: the values of a matrix, and of any part of it, are those that its own library finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kog_dist.errors import CheckpointError
from kog_dist.model.formats.mxfp4 import expert
from kog_dist.model.formats.quantisation import Quantisation, read_quantisation
from kog_dist.model.formats.quantised_file import QuantisedFile, with_matrices
from kog_dist.model.formats.source import Box
from kog_dist.model.safetensors_file import SafetensorsFile, narrow, widen
from tests.unit.formats.writers import METHODS, Method, Written, compressed, fp8_blocks

ROWS, COLUMNS = 48, 128
NAME = "model.layers.0.self_attn.q_proj.weight"
MODULE = NAME.removesuffix(".weight")


def weight(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    """Values of many sizes, with a block of zeros."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randint(-6, 3, (rows, 1), generator=generator))
    values[:16, :16] = 0
    return values


def opened(folder: Path, method: Method, written: Written, shape: tuple[int, int] = (ROWS, COLUMNS)) -> QuantisedFile:
    path = folder / "model.safetensors"
    save_file({f"{MODULE}.{end}": tensor.contiguous() for end, tensor in written.tensors.items()}, path)
    file = SafetensorsFile.open(path)
    quantised = with_matrices(folder, quantisation(method), dict.fromkeys(file.tensors, file), {NAME: shape})[NAME]
    assert isinstance(quantised, QuantisedFile)
    return quantised


def quantisation(method: Method) -> Quantisation:
    found = read_quantisation({"quantization_config": method.config})
    assert found is not None
    return found


def read(file: SafetensorsFile, shape: tuple[int, int] = (ROWS, COLUMNS)) -> NDArray[np.float32]:
    out = np.empty(shape, np.float32)
    file.read(NAME, 0, shape[0], out, verify=True)
    return out


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    written = method.write(weight())
    file = opened(tmp_path, method, written)
    assert np.array_equal(read(file), written.values.numpy())
    alike = np.corrcoef(read(file).reshape(-1), weight().numpy().reshape(-1))[0, 1]
    assert alike > (0.7 if "zero points" in str(file.matrices[NAME].form) else 0.98), "with random zero points values are cut off"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "box",
    [Box(0, 48, 0, 128), Box(0, 1, 0, 128), Box(16, 32, 64, 96), Box(5, 23, 0, 128), Box(0, 48, 32, 64), Box(7, 41, 24, 90)],
)
def test_any_part_of_a_matrix_is_the_same_part_of_its_values(tmp_path: Path, name: str, box: Box) -> None:
    method = METHODS[name]
    written = method.write(weight())
    file = opened(tmp_path, method, written)
    coded = file.matrices[NAME].read(box)
    expected = written.values.numpy()[box.first : box.last, box.left : box.right]
    assert np.array_equal(coded.values(), expected)
    assert coded.codes.shape == expected.shape
    by_rows = np.concatenate(list(file.box_rows(NAME, box, 3))).view(np.float32)
    assert np.array_equal(by_rows, expected)
    order = np.arange(len(expected))[::-1]
    assert np.array_equal(coded.with_rows(order).values(), expected[::-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float-quantized", "pack-quantized"])
def test_the_library_rounds_the_same_values_to_16_bit(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    """Which it multiplies in the type of its scales: ours are exact in float32, so that rounding them is the same."""
    bits: dict[str, Any] = {
        "float-quantized": {"num_bits": 8, "type": "float"},
        "pack-quantized": {"num_bits": 4, "type": "int"},
    }[kind]
    method = compressed(kind, dtype, **bits, strategy="channel")
    written = method.write(weight())
    ours = read(opened(tmp_path, method, written))
    scales = written.tensors["weight_scale"]
    codes = torch.from_numpy(
        np.rint(ours / scales.float().numpy()) if kind == "pack-quantized" else ours / scales.float().numpy()
    )
    theirs = (codes.to(dtype) * scales).float().numpy()
    name = "BF16" if dtype is torch.bfloat16 else "F16"
    rounded = np.empty(ours.size, np.float32)
    widen(narrow(ours, name).reshape(-1), name, rounded)
    assert np.array_equal(rounded.reshape(ours.shape), theirs)


@pytest.mark.parametrize("shape", [(50, 70), (16, 128), (1, 1)])
def test_blocks_of_fp8_may_be_cut_off_at_the_ends(tmp_path: Path, shape: tuple[int, int]) -> None:
    method = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32])
    written = method.write(weight(*shape))
    file = opened(tmp_path, method, written, shape)
    assert np.array_equal(read(file, shape), written.values.numpy())
    assert file.matrices[NAME].form.num_blocks(*shape) == tuple(written.tensors["weight_scale"].shape)


def test_experts_of_gpt_oss_are_those_of_transformers() -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (2, 24, 5, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (2, 24, 5)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()
    for index in range(2):
        ours = expert(blocks[index], scales[index], Box(0, 24, 0, 160))
        assert np.array_equal(ours.values(), theirs[index].T), "transformers has inputs first"
        part = expert(blocks[index], scales[index], Box(3, 9, 64, 128))
        assert np.array_equal(part.values(), theirs[index].T[3:9, 64:128])
        assert part.is_regular


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith(("fp8", "float", "modelopt", "fbgemm"))])
def test_packed_codes_have_the_even_column_in_the_lower_half(tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    coded = opened(tmp_path, method, method.write(weight())).matrices[NAME].read(Box(0, ROWS, 0, COLUMNS))
    assert np.array_equal(coded.packed() & 15, coded.codes[:, 0::2])
    assert np.array_equal(coded.packed() >> 4, coded.codes[:, 1::2])


def test_the_files_scales_count_for_the_format(tmp_path: Path) -> None:
    method = fp8_blocks(16, 16, scales=torch.bfloat16)
    form = opened(tmp_path, method, method.write(weight())).matrices[NAME].form
    assert (form.scale, str(form)) == ("BF16", "FP8 (E4M3) in blocks of 16 x 16, BF16 scales")
    assert form.num_bytes(ROWS, COLUMNS) == ROWS * COLUMNS + 2 * (ROWS // 16) * (COLUMNS // 16)


# ---- what is wrong is named ----
def without(end: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != end}


def changed(end: str, change: Any) -> Any:
    return lambda tensors: tensors | {end: change(tensors[end])}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("fp8", without("weight_scale_inv"), rf"tensor {MODULE}.weight is quantised, but no file has {MODULE}.weight_scale_inv"),
        ("fp8", changed("weight_scale_inv", lambda t: t[:-1]), r"weight_scale_inv has shape \(2, 8\), but .* for \(3, 8\)"),
        ("fp8", changed("weight", lambda t: t[:, :-16]), r"q_proj.weight has shape \(48, 112\), but .* asks for \(48, 128\)"),
        ("fp8", changed("weight_scale_inv", lambda t: t.to(torch.int32)), r"inv is I32, but FP8 [^,]* has F32 or BF16"),
        ("fp8", changed("weight", lambda t: t.view(torch.uint8)), r"q_proj.weight is U8, but FP8 .* has F8_E4M3"),
        ("awq", without("qzeros"), rf"tensor {MODULE}.qweight is quantised, but no file has {MODULE}.qzeros"),
        ("awq", changed("qweight", lambda t: t.T), r"q_proj.qweight has shape \(6, 128\), but INT4 .* asks for \(128, 6\)"),
        ("awq", changed("scales", lambda t: t.T), r"q_proj.scales has shape \(48, 8\)"),
        ("gptq", changed("qweight", lambda t: t.T), r"q_proj.qweight has shape \(48, 16\), but INT4 .* asks for \(16, 48\)"),
        ("gptq", changed("g_idx", lambda t: t[1:]), r"q_proj.g_idx has shape \(127,\)"),
        ("gptq, act-order", without("g_idx"), rf"tensor {MODULE}.qweight is quantised, but no file has {MODULE}.g_idx"),
        ("pack-quantized", without("weight_shape"), "weight_shape"),
        ("pack-quantized, zero points", without("weight_zero_point"), f"no file has {MODULE}.weight_zero_point"),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda t: t[:, :-1]), r"weight_scale has shape \(48, 3\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    method = METHODS[name]
    written = method.write(weight())
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path, method, Written(damage(written.tensors), written.values))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gptq", changed("g_idx", lambda t: t + 1), "g_idx names group 8, and there are 8"),
        ("gptq", changed("g_idx", lambda t: t - 1), "g_idx names group"),
        ("pack-quantized", changed("weight_shape", lambda t: t + 8), r"weight_shape says \[56, 136\]"),
        ("fp8", changed("weight_scale_inv", lambda t: t * torch.inf), "q_proj.weight has a value that is not finite"),
        ("fp8", changed("weight", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype)), "has a value that is not finite"),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda t: t | 255), "q_proj.weight has a value that is not finite"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_named_when_they_are_read(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    method = METHODS[name]
    written = method.write(weight())
    file = opened(tmp_path, method, Written(damage(written.tensors), written.values))
    with pytest.raises(CheckpointError, match=message):
        read(file)


def test_a_matrix_of_no_whole_words_or_groups_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{MODULE}.qweight": torch.zeros(1, dtype=torch.int32)}, path)
    file = SafetensorsFile.open(path)
    for name, shape in (("awq", (44, 128)), ("awq", (48, 120)), ("gptq", (48, 132)), ("gptq", (50, 128))):
        with pytest.raises(
            CheckpointError, match=rf"{MODULE} in {name}: it has {shape[0]} rows and {shape[1]} columns, which are no"
        ):
            with_matrices(tmp_path, quantisation(METHODS[name]), {f"{MODULE}.qweight": file}, {NAME: shape})


def test_files_without_quantised_tensors_contradict_the_config(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({NAME: torch.zeros(ROWS, COLUMNS)}, path)
    file = SafetensorsFile.open(path)
    for name in ("fp8", "awq"):
        with pytest.raises(CheckpointError, match=r"config.json says .* but no file has a tensor \.q?weight"):
            with_matrices(tmp_path, quantisation(METHODS[name]), {NAME: file}, {NAME: (ROWS, COLUMNS)})


def test_a_file_that_has_changed_is_noticed(tmp_path: Path) -> None:
    method = METHODS["fp8"]
    file = opened(tmp_path, method, method.write(weight()))
    opened(tmp_path, method, method.write(weight() * 2))
    with pytest.raises(CheckpointError, match="was changed or replaced"):
        read(file)


def test_zero_points_of_the_old_gptq_wrap_round(tmp_path: Path) -> None:
    """A stored 15 is 16 less 1, that is 0: what AutoGPTQ's kernels and their successors make of it."""
    method = METHODS["gptq"]
    written = method.write(weight())
    file = opened(
        tmp_path, method, Written(written.tensors | {"qzeros": torch.full_like(written.tensors["qzeros"], -1)}, written.values)
    )
    coded = file.matrices[NAME].read(Box(0, ROWS, 0, COLUMNS))
    assert coded.zeros is not None
    assert not coded.zeros.any()
    assert replace(coded.form, has_zeros=True) == coded.form
