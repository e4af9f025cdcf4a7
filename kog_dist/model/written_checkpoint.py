"""Checkpoints on their way to a folder: `config.json`, `model*.safetensors`, a manifest; and random weights for them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.layout import EMBEDDING, TensorLayout, tensor_layouts
from kog_dist.model.manifest import MANIFEST_NAME, Manifest, read_small_file, write_small_file
from kog_dist.model.safetensors_file import DTYPES, narrow, stored_dtype_of, widen, write_safetensors
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from kog_dist.model.spec import ModelSpec

_HEADER_BYTES_PER_TENSOR = 256  # more than any entry of a header needs


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Array],
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 4 * 2**30,
    manifest: bool = True,
) -> None:
    """Write config.json and safetensors files of at most `max_shard_bytes` each, with an index if there are several.

    A checkpoint that is already in the folder is replaced; its other files stay. config.json comes last: a folder whose writing
    was interrupted has none. Raises CheckpointError if tensors are missing, unexpected, misshapen, not finite in `dtype`, or
    larger than a shard, or if a file cannot be written.
    """
    stored_dtype = stored_dtype_of(dtype)
    _check_written(tensor_layouts(spec), tensors)
    write_stored_checkpoint(
        folder,
        spec,
        lambda name: narrow_finite(name, tensors[name], stored_dtype),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        manifest=manifest,
    )


def write_stored_checkpoint(
    folder: Path,
    spec: ModelSpec,
    stored: Callable[[str], Array],
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 4 * 2**30,
    manifest: bool = True,
) -> None:
    """`write_checkpoint` for values that are already what a file holds (see `narrow`): `stored(name)` is asked for once each.

    Only one shard is in memory at a time.
    """
    layouts, stored_dtype = tensor_layouts(spec), stored_dtype_of(dtype)
    shards = _shards(layouts, DTYPES[stored_dtype][1], max_shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / "config.json", folder / MANIFEST_NAME, folder / INDEX_NAME, *folder.glob("model*.safetensors")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be prepared for writing: {error.strerror}") from None
    weight_map = {}
    for shard_idx, names in enumerate(shards):
        file_name = SINGLE_NAME if len(shards) == 1 else f"model-{shard_idx + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file_name, {name: (stored_dtype, layouts[name].shape, stored(name)) for name in names})
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        total = sum(layout.num_values for layout in layouts.values()) * DTYPES[stored_dtype][1]
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_small_file(folder / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
    write_small_file(folder / "config.json", json.dumps({**spec.to_config(), "dtype": dtype}, indent=2).encode() + b"\n")
    if manifest:
        write_manifest(folder)


def write_manifest(folder: Path) -> None:
    """Write (anew) `manifest.json` over the checkpoint as it is now, with the folder's JSON and template files.

    Call it again after files were added. Raises CheckpointError if the checkpoint is not in order.
    """
    checkpoint = open_checkpoint(folder, verify=False)
    names = sorted(path.name for path in folder.glob("*") if path.suffix in (".json", ".jinja") and path.name != MANIFEST_NAME)
    files = {name: hashlib.sha256(read_small_file(folder, name, None) or b"").hexdigest() for name in names}
    headers = {file.path.name: file.header_sha256 for file in checkpoint.files}
    with ThreadPoolExecutor() as pool:  # reading and hashing leave the interpreter's lock
        tensors = dict(zip(checkpoint.layouts, map(tuple, pool.map(checkpoint.part_digests, checkpoint.layouts)), strict=True))
    Manifest(files, headers, tensors).write(folder)


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights under their published names: equal for equal spec and seed, and exact in bfloat16.

    Matrices have standard deviation 1/sqrt(fan-in), norm weights lie around 1, all different enough that a mix-up shows.
    """
    return {name: _random_tensor(spec, name, layout, seed) for name, layout in tensor_layouts(spec).items()}


def _random_tensor(spec: ModelSpec, name: str, layout: TensorLayout, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values: NDArray[np.float32] = layout.of_all_lanes(rng.standard_normal(layout.drawn_shape, dtype=np.float32))
    if "norm." in name:
        values = np.float32(1.0) + np.float32(0.2) * np.clip(values, -3, 3)
    elif name != EMBEDDING:
        # Those are summed over lanes.
        fan_in = layout.shape[-1] * (spec.num_lanes if name.endswith(("wo.weight", "w2.weight")) else 1)
        values *= np.float32(fan_in**-0.5)
    out = np.empty_like(values)
    widen(narrow(values, "BF16").reshape(-1), "BF16", out.reshape(-1))
    return out


def _check_written(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, Array]) -> None:
    missing, unexpected = sorted(set(layouts) - set(tensors)), sorted(set(tensors) - set(layouts))
    if missing or unexpected:
        raise CheckpointError(
            f"the tensors to write are not those of the model: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name, layout in layouts.items():
        if tensors[name].shape != layout.shape:
            raise CheckpointError(f"tensor {name} to write has shape {tensors[name].shape}, the model asks for {layout.shape}")


def narrow_finite(name: str, values: Array, stored_dtype: str) -> Array:
    """`narrow`, which raises CheckpointError if a value is not finite in `stored_dtype` (a key of DTYPES)."""
    narrowed = narrow(values, stored_dtype)
    back = np.empty(narrowed.size, np.float32)
    widen(narrowed.reshape(-1), stored_dtype, back)
    if not np.isfinite(back).all():
        raise CheckpointError(f"tensor {name} to write has values that are not finite in {DTYPES[stored_dtype][0]}")
    return narrowed


def _shards(layouts: Mapping[str, TensorLayout], value_bytes: int, max_shard_bytes: int) -> list[list[str]]:
    """Tensor names per file, in the order of use, each file with its header within `max_shard_bytes`."""
    shards: list[list[str]] = []
    room = 0
    for name, layout in layouts.items():
        needed = layout.num_values * value_bytes + _HEADER_BYTES_PER_TENSOR
        if needed + _HEADER_BYTES_PER_TENSOR > max_shard_bytes:
            raise CheckpointError(f"tensor {name} needs {needed} bytes, more than a shard of {max_shard_bytes} bytes can hold")
        if needed > room:
            shards.append([])
            room = max_shard_bytes - _HEADER_BYTES_PER_TENSOR
        shards[-1].append(name)
        room -= needed
    return shards
