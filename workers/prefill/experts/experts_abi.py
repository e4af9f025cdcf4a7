"""What experts.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.decode.coding import CODED_COLUMNS
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape
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
LEAST_WIDTH = 32  # of what is multiplied of a tile: pairs, of which it may have fewer than it has room for
STAGE_COLUMNS = 64  # of 16 bit that are multiplied at a time
COLUMNS = 128  # of a tile: rows of a matrix, at most
_ALIGNMENT, _BARRIER_BYTES = 1024, 64
_OTHER_BYTES = 1088 + _ALIGNMENT + _BARRIER_BYTES  # of shared memory: static memory and what the system takes, too
_MOST_STAGES, _FEWEST_STAGES = 6, 3
_TILE_ROWS = (32, 64, 96, 128)
_CTAS_OF_FEW = 3
_MOST_TILES = 3
_SCALES = {"F32": "Float32Scale", "BF16": "Bf16Scale", "F16": "Fp16Scale", "E8M0": "E8m0Scale"}
_CODES = {"E4M3": "E4m3", "E2M1": "E2m1", "INT4": "Int4"}  # as weights.cuh calls them
_WEIGHT_SCALES = {"E4M3": 2.0**8, "E2M1": 1.0, "INT4": 2.0**4}  # scales of some 1e-4 become normal numbers of binary16
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
    """A size of tiles: up to so many pairs of an expert, and COLUMNS rows of its matrix.

    `stage_bytes`: of shared memory for the part of both that is multiplied at a time, `stage_columns` of each. `ctas`: thread
    blocks that share a multiprocessor.
    """

    rows: int
    stage_bytes: int
    ctas: int

    @property
    def stages(self) -> int:
        """In shared memory at once."""
        return min((SHARED_BYTES // self.ctas - _OTHER_BYTES) // self.stage_bytes, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return _ALIGNMENT + self.stages * self.stage_bytes + _BARRIER_BYTES


def stage_columns(own: ExpertShape) -> int:
    """Columns that are multiplied at a time: whole steps."""
    return STAGE_COLUMNS if own.coding is None else CODED_COLUMNS


def tiles(own: ExpertShape) -> tuple[GroupedTile, ...]:
    """Those that kernels are made for: few rows, and as many as shared memory holds three stages of."""
    of_weights = max(COLUMNS // op.rows * _part_bytes(own, op.rows) for op in (own.gate_up, own.down_of_one))
    steps = 1 if own.coding is not None else STAGE_COLUMNS // STEP_COLUMNS
    used = {rows: 2 * rows * stage_columns(own) + steps * of_weights for rows in _TILE_ROWS}
    has_few_bits = own.coding is not None and own.coding.bits == 4  # threads do more for each byte that memory gives
    found = [
        GroupedTile(rows, -(-num_bytes // 1024) * 1024, _CTAS_OF_FEW if has_few_bits and rows == min(_TILE_ROWS) else 2)
        for rows, num_bytes in used.items()
    ]
    fitting = [tile for tile in found if tile.stages >= _FEWEST_STAGES]
    return (*fitting[: _MOST_TILES - 1], *fitting[_MOST_TILES - 1 :][-1:])


def tile_for(num_pairs: int, num_experts: int, found: Sequence[GroupedTile]) -> GroupedTile:
    """The one of `found` whose rows an expert's pairs fill best, were they divided evenly. It does not decide about bits."""
    average = num_pairs / num_experts
    return next((tile for tile in found if average <= 0.75 * tile.rows), found[-1])


def num_across(op: OpShape, num_rows: int) -> int:
    """Tiles that the rows of a matrix take (`Blocks` in weights.cuh)."""
    return -(-(-(-num_rows // op.cta_rows) * op.blocks) // (COLUMNS // op.rows))


def experts_header(shape: KernelShape) -> str:
    """`experts_shape.cuh`."""
    assert shape.experts is not None
    largest = tiles(shape.experts)[-1].rows
    widths = range(LEAST_WIDTH, largest + 1, LEAST_WIDTH)
    products = (product("multiply_rows", width, of_rows=True, in_registers=True) for width in widths)
    return "\n".join([constants(shape), "namespace kog {", *products, "}  // namespace kog", ""])


def constants(shape: KernelShape) -> str:
    """The header without products."""
    spec, own = shape.spec, shape.experts
    assert spec.experts is not None
    assert own is not None
    experts, clamp, coding = spec.experts, spec.experts.clamp, own.coding
    numbers = {
        "kNumExperts": experts.num_experts, "kChosen": experts.per_token, "kLanes": shape.num_lanes, "kHidden": spec.hidden_size,
        "kFfn": spec.lane_ffn, "kPadded": padded_columns(spec),
        "kDownColumns": spec.lane_ffn + max(map(own.skew, range(spec.num_lanes))),
        "kExpertSkew": own.skew(1 % spec.num_lanes), "kUnit": UNIT, "kSortThreads": SORT_THREADS,
        "kTileThreads": TILE_THREADS, "kGateUpBytes": 2 * own.gate_up_values, "kDownBytes": 2 * own.down_values,
        "kColumns": COLUMNS, "kLeastWidth": LEAST_WIDTH, "kFirstWideTile": 96, "kStage": stage_columns(own),
        "kRowBytes": coding.row_bytes if coding else 2 * STEP_COLUMNS,
        "kScales": coding.scales if coding else 1, "kScaleBytes": coding.scale_bytes if coding else 0,
        "kZeroBytes": coding.zero_bytes if coding else 0,
    }  # fmt: skip
    flags = {
        "kIsCoded": coding is not None, "kIsHalf": shape.weight_dtype == "float16", "kRouterBias": experts.router_bias,
        "kExpertBias": experts.bias, "kChoiceIsNormalised": experts.is_normalised, "kClamps": clamp is not None,
    }  # fmt: skip
    floats = {
        "kActivationScale": ACTIVATION_SCALE, "kClampAlpha": clamp.alpha if clamp else 1.0,
        "kClampLimit": clamp.limit if clamp else 1.0, "kWeightScale": _WEIGHT_SCALES[coding.number] if coding else 1.0,
    }  # fmt: skip
    lines = [device_header("kog_dist.workers.prefill.experts.experts_abi", (EXPERTS_PARAMS,)), '#include "ptx.cuh"']
    lines += ["namespace kog {", *(f"constexpr u32 {name} = {value};" for name, value in numbers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    lines += [f"constexpr u64 kExpertBytes = {2 * own.num_values}ull;", f"using WeightFormat = {FORMATS[shape.weight_dtype]};"]
    lines += _forms(own)
    for tile in tiles(own):
        of_tile = {
            "kRows": tile.rows, "kStages": tile.stages, "kStageBytes": tile.stage_bytes, "kCtas": tile.ctas,
        }  # fmt: skip
        lines.append(_struct(f"Tile{tile.rows}", of_tile))
    kernels = " ".join(f"KOG_TILE({tile.rows})" for tile in tiles(own))
    lines += ["}  // namespace kog", f"#define KOG_TILES {kernels}"]
    lines += [f"#define KOG_CODE {_CODES[coding.number] if coding else 'Plain'}"]
    return "\n".join([*lines, f"#define KOG_SCALE {_SCALES[coding.scale] if coding else 'Float32Scale'}", ""])


def _part_bytes(own: ExpertShape, rows: int) -> int:
    """Of a step of a block of rows."""
    return 2 * rows * STEP_COLUMNS if own.coding is None else own.coding.part_bytes(rows)


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
