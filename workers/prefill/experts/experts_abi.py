"""What experts.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from dataclasses import dataclass

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.decode.tape_packing import OpShape
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.expert_shape import ExpertShape
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_format import FORMATS
from kog_dist.workers.prefill.dense.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.experts.rows import padded_columns
from kog_dist.workers.prefill.hopper_abi import SHARED_BYTES, product
from kog_dist.workers.prefill.model.buffers import UNIT

SORT_THREADS = 1024
TILE_THREADS = 256
COLUMNS = 128  # of a tile: rows of a matrix
_OTHER_BYTES = 2304  # of shared memory: alignment, static memory, and what the system takes
_MOST_PARTS = 6
EXPERTS_PARAMS = Struct(
    "ExpertsParams",
    "Parameters of one launch; passed by value. Pointers are device addresses, of what `ExpertRows` has.",
    (
        Field("place_ptr", "u64", "int32: position of the chunk's first row"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("x_ptr", "u64", "binary16 (size, hidden)"),
        Field("operands_ptr", "u64", "binary16 (size, hidden): x in the order of products, here and below"),
        Field("logits_ptr", "u64", "float32 (2, size, experts)"),
        Field("router_bias_ptr", "u64", "float32 (experts); read where the model has it"),
        Field("chosen_ptr", "u64", "int32 (size, chosen)"),
        Field("weights_ptr", "u64", "float32 (size, chosen)"),
        Field("places_ptr", "u64", "int32 (size, chosen)"),
        Field("pair_rows_ptr", "u64", "int32 (size * chosen)"),
        Field("offsets_ptr", "u64", "int32 (experts + 1)"),
        Field("experts_ptr", "u64", "the layer's, as the monokernel has them"),
        Field("gate_up_bias_ptr", "u64", "16-bit (experts, gate and up rows of the hosted lanes in turn), of the weights' type"),
        Field("down_bias_ptr", "u64", "16-bit (experts, hidden); 0 where the first lane is not hosted"),
        Field("activation_ptr", "u64", "binary16 (size * chosen, lanes, kPadded)"),
        Field("result_ptr", "u64", "binary16 (size * chosen, lanes, hidden)"),
        Field("partial_ptr", "u64", "binary16 (lanes, size, hidden)"),
        Field("size", "u32", "rows of the chunk"),
        Field("first_lane", "u32", "the first hosted lane"),
    ),
)


@dataclass(frozen=True)
class GroupedTile:
    """A size of tiles: up to so many pairs of an expert, and COLUMNS rows of its matrix."""

    rows: int

    def part_bytes(self, is_coded: bool) -> int:
        """Of one part of pairs and matrix: 64 columns of 16 bit, or 128 of codes and their scales."""
        used = self.rows * 256 + COLUMNS * 68 if is_coded else (self.rows + COLUMNS) * 128
        return -(-used // 1024) * 1024

    def parts(self, is_coded: bool) -> int:
        """In shared memory at once; two thread blocks share a multiprocessor."""
        return min((SHARED_BYTES // 2 - _OTHER_BYTES) // self.part_bytes(is_coded), _MOST_PARTS)

    def shared_bytes(self, is_coded: bool) -> int:
        """Of a thread block, what alignment takes included."""
        return 1024 + self.parts(is_coded) * self.part_bytes(is_coded)


def tiles(is_coded: bool) -> tuple[GroupedTile, ...]:
    """Those that kernels are made for: as large as shared memory holds three parts of."""
    return tuple(map(GroupedTile, (32, 64, 96) if is_coded else (32, 64, 128)))


def tile_for(num_pairs: int, num_experts: int, is_coded: bool) -> GroupedTile:
    """The one whose rows an expert's pairs fill best, were they divided evenly. It does not decide about bits."""
    average, found = num_pairs / num_experts, tiles(is_coded)
    return next((tile for tile in found if average <= 0.75 * tile.rows), found[-1])


def experts_header(shape: KernelShape) -> str:
    """`experts_shape.cuh`."""
    is_coded = shape.experts is not None and shape.experts.coding is not None
    products = (product("multiply_weights", tile.rows, of_rows=True, in_registers=True) for tile in tiles(is_coded))
    return "\n".join([constants(shape), "namespace kog {", *products, "}  // namespace kog", ""])


def constants(shape: KernelShape) -> str:
    """The header without products."""
    spec, own = shape.spec, shape.experts
    assert spec.experts is not None
    assert own is not None
    experts, clamp, is_coded = spec.experts, spec.experts.clamp, own.coding is not None
    numbers = {
        "kNumExperts": experts.num_experts, "kChosen": experts.per_token, "kLanes": shape.num_lanes, "kHidden": spec.hidden_size,
        "kFfn": spec.lane_ffn, "kPadded": padded_columns(spec),
        "kExpertSkew": own.skew(1 % spec.num_lanes), "kUnit": UNIT, "kSortThreads": SORT_THREADS,
        "kTileThreads": TILE_THREADS, "kGateUpBytes": 2 * own.gate_up_values, "kDownBytes": 2 * own.down_values,
        "kColumns": COLUMNS, "kStage": 128 if is_coded else 64,
    }  # fmt: skip
    flags = {
        "kIsCoded": is_coded, "kIsHalf": shape.weight_dtype == "float16", "kRouterBias": experts.router_bias,
        "kExpertBias": experts.bias, "kChoiceIsNormalised": experts.is_normalised, "kClamps": clamp is not None,
    }  # fmt: skip
    floats = {
        "kActivationScale": ACTIVATION_SCALE, "kClampAlpha": clamp.alpha if clamp else 1.0,
        "kClampLimit": clamp.limit if clamp else 1.0,
    }  # fmt: skip
    lines = [device_header("kog_dist.workers.prefill.experts.experts_abi", (EXPERTS_PARAMS,)), '#include "ptx.cuh"']
    lines += ["namespace kog {", *(f"constexpr u32 {name} = {value};" for name, value in numbers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    lines += [f"constexpr u64 kExpertBytes = {2 * own.num_values}ull;", f"using WeightFormat = {FORMATS[shape.weight_dtype]};"]
    lines += _forms(own)
    for tile in tiles(is_coded):
        of_tile = {"kRows": tile.rows, "kStages": tile.parts(is_coded), "kStageBytes": tile.part_bytes(is_coded), "kCtas": 2}
        lines.append(_struct(f"Tile{tile.rows}", of_tile))
    kernels = " ".join(f"KOG_TILE({tile.rows})" for tile in tiles(is_coded))
    return "\n".join([*lines, "}  // namespace kog", f"#define KOG_TILES {kernels}", ""])


def _forms(own: ExpertShape) -> list[str]:
    return [
        _form("GateUp", own.gate_up, own.ctas, 2 * own.num_lanes * own.spec.lane_ffn),
        _form("Down", own.down_of_one, own.num_ctas, own.spec.hidden_size),
    ]


def _form(name: str, op: OpShape, num_ctas: int, num_rows: int) -> str:
    """Where the rows of a matrix lie (weights.cuh); a step has what `OpShape.step_columns` says."""
    numbers = {
        "kCtas": num_ctas, "kCtaRows": op.cta_rows, "kRows": op.rows, "kLastRows": op.rows_of(op.blocks - 1),
        "kBlocks": op.blocks, "kPer": op.per, "kSteps": op.steps, "kTiles": op.tiles, "kWarps": op.warps_of(0),
        "kLongTiles": op.num_long_tiles, "kMatrixRows": num_rows,
    }  # fmt: skip
    return _struct(name, numbers)


def _struct(name: str, numbers: dict[str, int]) -> str:
    return f"struct {name} {{ static constexpr u32 {', '.join(f'{key} = {value}' for key, value in numbers.items())}; }};"
