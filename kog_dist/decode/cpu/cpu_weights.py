"""What CPU ranks keep of a checkpoint's weights, and read of them for a token: for plans, pages and metrics alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kog_dist.decode.cpu import host_library
from kog_dist.decode.plan.recipes import recipes
from kog_dist.model.checkpoint import Checkpoint
from kog_dist.model.layers import Experts, Ffn
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weight_bytes import num_kept_coded, num_quantised, quantised

SINGLE_BYTES: Final = 4  # of a float32
_HALF_BYTES: Final = 2


def matrix_bytes(checkpoint: Checkpoint) -> int:
    """Of a value of a matrix: as it is stored if it is 16 bit and can be multiplied so, else float32.

    Quantised matrices are float32 whatever the others are, or codes; see `dequantised_bytes`.
    """
    is_whole = checkpoint.dtype == "float32" or host_library.library() is None
    return SINGLE_BYTES if is_whole else _HALF_BYTES


def dequantised_bytes(checkpoint: Checkpoint, *, of_token: bool = False) -> int:
    """What quantised matrices take in addition to `matrix_bytes` of each of their values; less than 0 if less.

    `of_token`: of those alone that a token reads.
    """
    width, coded, coded_bytes = matrix_bytes(checkpoint), 0, 0
    if _keeps_codes(checkpoint):
        coded, coded_bytes = num_kept_coded(checkpoint, of_token=of_token)
    dequantised = num_quantised(checkpoint, of_token=of_token) - coded
    return (SINGLE_BYTES - width) * dequantised + coded_bytes - width * coded


def kept_as(checkpoint: Checkpoint) -> str:
    """In what most weights are kept, for people."""
    if _keeps_codes(checkpoint):
        return "MXFP4"
    return "16 bit" if matrix_bytes(checkpoint) == _HALF_BYTES and not quantised(checkpoint) else "float32"


def _keeps_codes(checkpoint: Checkpoint) -> bool:
    """Whether experts are kept in MXFP4: those that are published so, where products of them can be had."""
    return checkpoint.spec.experts is not None and host_library.library() is not None and num_kept_coded(checkpoint)[0] > 0


def kept_and_read_bytes(checkpoint: Checkpoint, lanes: Sequence[int]) -> tuple[int, int]:
    """Weights that a rank with these lanes keeps, and those that it reads for a token."""
    spec = checkpoint.spec
    share = len(lanes) / spec.num_lanes
    embedding, norms = spec.vocab_size * spec.hidden_size, (2 * spec.num_layers + 1) * spec.hidden_size
    head_rows = sum(last - first for first, last in map(spec.vocab_slice, lanes))
    head_width = spec.hidden_size * (spec.num_lanes if spec.head_type.value == "lane" else 1)
    norm_bytes = SINGLE_BYTES * norms * (1 if spec.shared_norm_scale else spec.num_lanes)
    width = matrix_bytes(checkpoint)

    stages = [stage for layer in recipes(spec) for recipe in layer for stage in recipe.stages]
    router = sum(stage.num_rows * stage.num_columns for stage in stages if not stage.is_by_lane)

    def num_bytes(ffns: int, dequantised: int) -> int:
        layers = int((mixers + ffns) * share)
        matrices = layers + router + head_rows * head_width
        return width * matrices + norm_bytes + int(dequantised * share)

    mixers = spec.num_lanes * sum(
        stage.num_rows * stage.num_columns for mixer, _ in recipes(spec) for stage in mixer.stages if stage.is_by_lane
    )
    ffns = [_matrices_of(spec, layer.ffn) for layer in spec.layers]
    kept = num_bytes(sum(whole for whole, _ in ffns), dequantised_bytes(checkpoint)) + width * embedding
    if spec.tied_embeddings and checkpoint.head_rounding is None:
        kept -= width * head_rows * head_width  # rows of the table
    return kept, num_bytes(sum(read for _, read in ffns), dequantised_bytes(checkpoint, of_token=True))


def _matrices_of(spec: ModelSpec, ffn: object) -> tuple[int, int]:
    """Values of the matrices of an FFN without its router, and those that a token reads."""
    if isinstance(ffn, Experts):
        counts = (ffn.choice.num_experts * ffn.width, ffn.choice.per_token * ffn.width)
        return tuple(3 * spec.hidden_size * (count + ffn.shared_width) for count in counts)  # type: ignore[return-value]
    count = 3 * spec.hidden_size * ffn.width if isinstance(ffn, Ffn) else 0
    return count, count


def bytes_per_token(checkpoint: Checkpoint, world_size: int) -> int:
    """Weights that all ranks together read for a token. Raises ConfigError if there cannot be so many."""
    return sum(kept_and_read_bytes(checkpoint, checkpoint.spec.lanes_of_rank(rank, world_size))[1] for rank in range(world_size))
