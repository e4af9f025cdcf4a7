"""What experts.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.decode.coding import CODED_COLUMNS
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.expert_shape import ExpertShape
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_format import FORMATS
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.base.shared_abi import UNIT
from kog_dist.workers.prefill.buffers.experts import padded_columns
from kog_dist.workers.prefill.tape.tile_abi import (
    PANEL,
    TapeTile,
    code_lines,
    constant_lines,
    form,
    product_lines,
    stage_bytes,
    weight_constants,
)

SORT_THREADS = 1024
# By rows, pairs here: thread blocks of a multiprocessor, what widths are multiples of, columns of codes of 8 bit at a time,
# groups of warps that multiply, and whether these expand ahead.
_TILES = {64: (2, 16, 128, 2, False), 96: (2, 16, 64, 2, False), 192: (1, 16, 64, 3, False), 256: (1, 32, 64, 2, True)}
_TILES_OF_BITS = {4: (96, 192), 8: (64, 96, 256), 16: (96, 256)}
_FILLED = 0.75  # of a tile's rows, by an expert's pairs on average: with more of them the next larger tile is faster
# Of 4 bit that one is faster with far fewer, since experts are not chosen evenly, where a chunk has so many pairs.
_FILLED_OF_4_BIT, _MANY_PAIRS = 0.2, 2048
EXPERTS_PARAMS = Struct(
    "ExpertsParams",
    "Parameters of one launch; passed by value. Pointers are device addresses, of what `ExpertRows` has.",
    (
        Field("rows_map", "u64", "CUtensorMap of what is multiplied, in the order of products: columns, pairs, lanes", count=16),
        Field("place_ptr", "u64", "int32: position of the chunk's first row"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("x_ptr", "u64", "binary16 (size, hidden)"),
        Field("operands_ptr", "u64", "binary16 (size * chosen, hidden): x of each pair"),
        Field("logits_ptr", "u64", "float32 (2, size, experts)"),
        Field("router_bias_ptr", "u64", "float32 (experts); read where the model has it"),
        Field("chosen_ptr", "u64", "int32 (size, chosen)"),
        Field("weights_ptr", "u64", "float32 (size, chosen)"),
        Field("places_ptr", "u64", "int32 (size, chosen)"),
        Field("offsets_ptr", "u64", "int32 (experts + 1)"),
        Field("tiles_ptr", "u64", "a number, and as many tiles of pairs: PairsTile"),
        Field("experts_ptr", "u64", "the layer's, as the monokernel has them"),
        Field("gate_up_bias_ptr", "u64", "16-bit (experts, gate and up rows of the hosted lanes in turn), of the weights' type"),
        Field("down_bias_ptr", "u64", "16-bit (experts, hidden); 0 where the first lane is not hosted"),
        Field("activation_ptr", "u64", "binary16 (size * chosen, lanes, kPadded)"),
        Field("result_ptr", "u64", "binary16 (size * chosen, lanes, hidden)"),
        Field("partial_ptr", "u64", "binary16 (lanes, size, hidden)"),
        Field("size", "u32", "rows of the chunk"),
        Field("first_lane", "u32", "the first hosted lane"),
        Field("tile_rows", "u32", "pairs of a tile, at most"),
        Field("least", "u32", "of which those that are multiplied are a multiple"),
    ),
    size_multiple=64,
)


def tiles(own: ExpertShape) -> tuple[TapeTile, ...]:
    """Those that kernels are made for."""
    coding, ops, found = own.coding, (own.gate_up, own.down_of_one), []
    bits = 16 if coding is None else coding.bits
    for rows in _TILES_OF_BITS[bits]:
        ctas, least, columns_of_8_bit, groups, is_ahead = _TILES[rows]
        columns = {4: CODED_COLUMNS, 8: columns_of_8_bit, 16: PANEL}[bits]
        found.append(TapeTile(rows, stage_bytes(coding, rows, columns, ops, groups), columns, ctas, least, is_ahead, groups))
    return tuple(found)


def tile_for(num_pairs: int, num_experts: int, found: Sequence[TapeTile]) -> TapeTile:
    """The one of `found` that is fastest for so many pairs of all experts. It does not decide about bits."""
    average = num_pairs / num_experts
    is_early = found[-1].rows == _TILES_OF_BITS[4][-1] and num_pairs >= _MANY_PAIRS
    filled = _FILLED_OF_4_BIT if is_early else _FILLED
    return next((tile for tile in found if average <= filled * tile.rows), found[-1])


def experts_header(shape: KernelShape) -> str:
    """`experts_shape.cuh`."""
    assert shape.experts is not None
    products = product_lines(tiles(shape.experts))
    return "\n".join([constants(shape), "namespace kog {", *products, "}  // namespace kog", ""])


def constants(shape: KernelShape) -> str:
    """The header without products."""
    spec, own = shape.spec, shape.experts
    assert spec.experts is not None
    assert own is not None
    experts, clamp, coding = spec.experts, spec.experts.clamp, own.coding
    numbers, flags, floats = weight_constants(coding, shape.weight_dtype)
    numbers |= {
        "kNumExperts": experts.num_experts, "kChosen": experts.per_token, "kLanes": shape.num_lanes, "kHidden": spec.hidden_size,
        "kFfn": spec.lane_ffn, "kPadded": padded_columns(spec),
        "kDownColumns": spec.lane_ffn + max(map(own.skew, range(spec.num_lanes))),
        "kExpertSkew": own.skew(1 % spec.num_lanes), "kUnit": UNIT, "kSortThreads": SORT_THREADS,
        "kGateUpBytes": 2 * own.gate_up_values, "kDownBytes": 2 * own.down_values,
    }  # fmt: skip
    flags |= {
        "kRouterBias": experts.router_bias,
        "kExpertBias": experts.bias,
        "kChoiceIsNormalised": experts.is_normalised,
        "kClamps": clamp is not None,
    }
    floats |= {
        "kActivationScale": ACTIVATION_SCALE,
        "kClampAlpha": clamp.alpha if clamp else 1.0,
        "kClampLimit": clamp.limit if clamp else 1.0,
    }
    lines = [device_header("kog_dist.workers.prefill.experts.experts_abi", (EXPERTS_PARAMS,)), '#include "ptx.cuh"']
    lines += ["namespace kog {", *constant_lines(numbers, flags, floats)]
    lines += [f"constexpr u64 kExpertBytes = {2 * own.num_values}ull;", f"using WeightFormat = {FORMATS[shape.weight_dtype]};"]
    lines += [*_forms(own), *(line for tile in tiles(own) for line in tile.header())]
    kernels = " ".join(f"KOG_TILE({tile.rows})" for tile in tiles(own))
    return "\n".join([*lines, "}  // namespace kog", f"#define KOG_TILES {kernels}", *code_lines(coding), ""])


def _forms(own: ExpertShape) -> list[str]:
    return [
        form("GateUp", own.gate_up, own.ctas, 2 * own.num_lanes * own.spec.lane_ffn),
        form("Down", own.down_of_one, own.num_ctas, own.spec.hidden_size),
    ]
