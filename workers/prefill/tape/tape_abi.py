"""What tape.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.decode.coding import CODED_COLUMNS
from kog_dist.decode.plan.recipes import matrix_stages, share_stream
from kog_dist.decode.plan.steps import Phase
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_format import FORMATS
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.tape.tile_abi import (
    TapeTile,
    code_lines,
    constant_lines,
    form,
    pairs_across,
    product_lines,
    stage_bytes,
    weight_constants,
)

PHASES = {
    Phase.QKV: ("qkv", "Qkv"),
    Phase.OUT: ("out", "Out"),
    Phase.GATE_UP: ("gate_up", "GateUp"),
    Phase.DOWN: ("down", "Down"),
}
ORDERED_COLUMNS = 32  # that the order of products rearranges
# By rows: thread blocks of a multiprocessor, rows that widths are multiples of, columns of codes of 8 bit at a time.
_TILES = {64: (2, 32, 128), 256: (1, 128, 64)}
TAPE_PARAMS = Struct(
    "TapeParams",
    "Parameters of one launch; passed by value. Pointers are device addresses.",
    (
        Field("rows_map", "u64", "CUtensorMap of what is multiplied, in the order of products: columns, rows, lanes", count=16),
        Field("tape_ptr", "u64", "the monokernel's weights"),
        Field("scales_ptr", "u64", "float32 (products, thread blocks, kScaleRows): of rows, where each has one"),
        Field("places_ptr", "u64", "uint64 (products of the matrix, 2): first byte on the tape, number among all products"),
        Field("place_ptr", "u64", "int32: position of the chunk's first row"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("out_ptr", "u64", "float32 qkv, binary16 partial, or activation, of `DenseRows`"),
        Field("size", "u32", "rows of the chunk"),
        Field("num_pairs", "u32", "pairs of tiles"),
        Field("products", "u32", "of the matrix"),
        Field("tile_rows", "u32", "rows of a tile but the last ones: a width of the kernel's tiles"),
    ),
    size_multiple=64,
)


def tiles(shape: KernelShape) -> tuple[TapeTile, ...]:
    """Those that kernels are made for."""
    coding, ops = shape.attention_coding, [shape.ops[phase] for phase in PHASES]
    assert coding is not None
    found = []
    for rows, (ctas, least, columns) in _TILES.items():
        of_stage = columns if coding.bits == 8 else CODED_COLUMNS
        found.append(TapeTile(rows, stage_bytes(coding, rows, of_stage, ops), of_stage, ctas, least))
    return tuple(found)


def pairs_of(shape: KernelShape, phase: Phase) -> int:
    """Pairs of tiles that the rows of a product take: tiles of all sizes have as many rows of a matrix."""
    return pairs_across(shape.ops[phase], matrix_rows(shape, phase), tiles(shape)[0])


def matrix_rows(shape: KernelShape, phase: Phase) -> int:
    """Of a product."""
    return shape.lanes_of(phase) * matrix_stages(shape.spec)[phase].num_rows


def is_multiplied_on_tape(shape: KernelShape) -> bool:
    """Whether tape.cu is made for a model: the matrices of all its layers are quantised, it has one stream and no experts, and
    columns come in whole groups of ORDERED_COLUMNS. Not where layers are of several kinds.
    """
    spec = shape.spec
    if shape.attention_coding is None or shape.experts is not None or not share_stream(spec) or spec.mixed_layers:
        return False
    is_by_lane = shape.lanes_of(Phase.OUT) == shape.lanes_of(Phase.DOWN) == 1
    return is_by_lane and not any(count % ORDERED_COLUMNS for count in (spec.hidden_size, spec.lane_ffn, spec.head_dim))


def tape_header(shape: KernelShape) -> str:
    """`tape_shape.cuh`."""
    products = product_lines(tiles(shape))
    return "\n".join([constants(shape), "namespace kog {", *products, "}  // namespace kog", ""])


def constants(shape: KernelShape) -> str:
    """The header without products."""
    spec, coding = shape.spec, shape.attention_coding
    assert coding is not None
    numbers, flags, floats = weight_constants(coding, shape.weight_dtype)
    numbers |= {
        "kLanes": shape.num_lanes,
        "kHidden": spec.hidden_size,
        "kFfn": spec.lane_ffn,
        "kMixedColumns": spec.lane_heads * spec.head_dim,
        "kQkvRows": shape.num_lanes * spec.lane_qkv_rows,
        "kScaleRows": shape.tape.scale_rows,
    }
    floats |= {"kActivationScale": ACTIVATION_SCALE}
    lines = [device_header("kog_dist.workers.prefill.tape.tape_abi", (TAPE_PARAMS,)), '#include "ptx.cuh"', "namespace kog {"]
    lines += [*constant_lines(numbers, flags, floats), f"using WeightFormat = {FORMATS[shape.weight_dtype]};"]
    lines += [form(name, shape.ops[phase], shape.num_ctas, matrix_rows(shape, phase)) for phase, (_, name) in PHASES.items()]
    lines += [line for tile in tiles(shape) for line in tile.header()]
    kernels = " ".join(f"KOG_TILE({tile.rows})" for tile in tiles(shape))
    return "\n".join([*lines, "}  // namespace kog", f"#define KOG_TILES {kernels}", *code_lines(coding), ""])
