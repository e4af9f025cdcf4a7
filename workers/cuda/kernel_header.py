"""What the monokernel is compiled with: a `KernelShape` as generated headers."""

from __future__ import annotations

import math

from kog_dist.collectives.mailbox import place
from kog_dist.decode.coding import Coding
from kog_dist.decode.pass_drafts import MOST_SAVED, PATIENCE, PLACES, SHARE, UNIT
from kog_dist.decode.plan.recipes import all_recipes, op_numbers, share_stream, vectors_of
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.model.spec import HeadType, ReduceMode, Sublayer
from kog_dist.sampling_params import MAX_TOP_LOGPROBS
from kog_dist.workers.cuda.code_names import CODES, SCALES
from kog_dist.workers.cuda.kernel_abi import REPORT_WORDS, abi_header
from kog_dist.workers.cuda.kernel_boxes import by_kind, layer_mask
from kog_dist.workers.cuda.kernel_shape import (
    CHOICE_POSITIONS,
    HASH_TOKENS,
    NUM_HASHES,
    KernelShape,
)
from kog_dist.workers.cuda.kv_format import FORMATS, kv_lines
from kog_dist.workers.cuda.ring_shape import NEAR_CONTEXT
from kog_dist.workers.cuda.shared_memory import NUM_SQUARES, SHARED_BYTES
from kog_dist.workers.cuda.word_shape import SUM_COPIES

_LANE_BIT, _LAYER_BIT = 2, 8  # of a `Place` (phases/layout.cuh); below them is which of its layer's products it is


def headers(shape: KernelShape) -> dict[str, str]:
    """By name, the generated headers that the kernels are compiled with. The same on all ranks that host equally much."""
    placed = place(shape.words.boxes.specs(), shape.num_ranks)
    return {"shape.cuh": shape_header(shape), "abi.cuh": abi_header(), "peers_shape.cuh": shape.words.boxes.header(placed)}


def shape_header(shape: KernelShape) -> str:
    """`shape.cuh`."""
    spec, vectors = shape.spec, vectors_of(shape.spec)
    registers = shape.geometry.registers(shape.num_ranks, tokens=shape.tokens, drafts=shape.looks_up, head_dim=spec.head_dim)
    numbers = {
        "kTokens": shape.tokens,
        "kHidden": spec.hidden_size, "kLayers": spec.num_layers, "kLanes": shape.num_lanes, "kStreams": shape.num_streams,
        "kDelay": spec.delay, "kHeads": spec.lane_heads, "kKvHeads": spec.lane_kv_heads, "kHeadDim": spec.head_dim,
        "kSharingLanes": shape.cache.sharing_lanes,
        "kRotary": spec.rotary_dim,
        "kSetHeads": shape.sets.num_heads, "kWarpSets": shape.sets.of_warp, "kFfn": spec.lane_ffn,
        "kVocabRows": shape.head.vocab_rows[1] - shape.head.vocab_rows[0],
        "kMaxContext": spec.max_context, "kWindow": spec.sliding_window or spec.max_context, "kNumCtas": shape.num_ctas,
        "kReplicas": shape.words.replicas, "kSplits": shape.splits, "kPartitions": shape.cache.num_partitions,
        "kPartitionBatches": shape.cache.batches_of_partition,
        "kFirstFull": min(shape.cache.full_layers, default=0),
        "kNumSlots": shape.ring.num_slots, "kRingBytes": shape.ring.num_bytes,
        "kPieces": shape.ring.num_pieces, "kPiecesInFlight": shape.ring.in_flight, "kFarPiecesInFlight": shape.ring.far_in_flight,
        "kNearContext": NEAR_CONTEXT, "kSquares": NUM_SQUARES, "kSumCopies": SUM_COPIES,
        "kSharedBytes": SHARED_BYTES,
        "kSums": shape.num_sums,
        "kMatrixWarps": shape.geometry.matrix_warps, "kTileRows": shape.geometry.tile_rows,
        "kLaunchRegisters": registers.launch, "kMatrixRegisters": registers.matrix, "kServiceRegisters": registers.service,
        "kAttendRegisters": registers.attend,
        "kWindowBatches": shape.cache.window_batches, "kFullBatches": shape.cache.full_batches,
        "kMaxPer": shape.x_steps,
        "kQkvLanes": shape.lanes_of(Phase.QKV), "kGateUpLanes": shape.lanes_of(Phase.GATE_UP),
        "kGatheredAttended": shape.gathered_lanes(Phase.OUT), "kGatheredActivations": shape.gathered_lanes(Phase.DOWN),
        "kNumProducts": len(shape.layer_products),
        "kNormLanes": 1 if spec.shared_norm_scale else shape.num_lanes,
        "kFinalNormLanes": shape.head.norm_lanes,
        "kHeadProducts": shape.head.num_products, "kHeadCtas": shape.head.num_ctas, "kLaneVocab": shape.head.lane_vocab,
    }  # fmt: skip
    numbers["kLogSumWords"] = shape.words.log_sums
    if shape.delta is not None:
        numbers["kDeltaInLanes"] = shape.lanes_of(Phase.DELTA_IN)
    numbers |= {"kMaxTop": MAX_TOP_LOGPROBS, "kReportEntry": REPORT_WORDS}
    by_mode = {
        mode: [
            layer_mask([i for i in range(spec.num_layers) if spec.reduce_mode(i, sublayer) is mode], spec.num_layers)
            for sublayer in Sublayer
        ]
        for mode in (ReduceMode.BLOCKING, ReduceMode.DELAYED)
    }
    # Binary16 reaches only 65504: its activations are scaled down on the way in, and back on the way out.
    x_scale = 1.0 if shape.weight_dtype == "bfloat16" else 0.0625
    floats = {
        "kNormEps": spec.norm_eps,
        "kXScale": x_scale,
        "kInverseXScale": 1.0 / x_scale,
        "kLocalScale": math.sqrt(spec.num_lanes),
        "kScoreScale": spec.head_dim**-0.5 * math.log2(math.e),
    }
    lines = ["// Generated by kog_dist.workers.cuda.kernel_header; do not edit.", "#pragma once", "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr unsigned int kPlaceLaneBit = {_LANE_BIT}, kPlaceLayerBit = {_LAYER_BIT};"]
    mask_type = "LayerMask<kLayers>"
    windowed = layer_mask(spec.window_layers, spec.num_layers)
    lines += [f"__device__ __forceinline__ {mask_type} window_layers() {{ return {windowed}; }}"]
    if shape.delta is not None:
        nets = layer_mask(shape.delta.layers, spec.num_layers)
        lines += [f"__device__ __forceinline__ {mask_type} delta_layers() {{ return {nets}; }}"]
    lines += [by_kind(mask_type, f"{mode.value}_layers", [mask_type + code for code in codes]) for mode, codes in by_mode.items()]
    if shape.coding is not None:
        coded_x_scale = x_scale if shape.coding.is_integer else shape.coding.x_scale
        floats |= {"kCodedXScale": coded_x_scale, "kCodeFactor": shape.coding.factor * x_scale}
    if shape.head_coding is not None:
        floats |= {"kHeadXScale": shape.head_coding.x_scale, "kHeadFactor": shape.head_coding.factor * x_scale}
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    number = op_numbers(spec)
    codes = [_place(number[p.op], p.first_lane - shape.hosted_lanes[0], p.layer) for p in shape.layer_products]
    heads = [_place(0, index, spec.num_layers) for index in range(shape.head.num_products)]
    end = _place(0, 0, spec.num_layers)  # what comes after the LM head
    inputs = [i for i, p in enumerate(shape.layer_products) if p.op in (Phase.QKV, Phase.DELTA_IN) for _ in p.lanes]
    for name, values in (("kProducts", [*codes, *heads, end]), ("kMixerProducts", inputs)):
        lines += [f"__constant__ const unsigned short {name}[] = {{{', '.join(map(str, values))}}};"]
    flags = {
        "kPreNormSum": spec.pre_norm_lane_agg,
        "kLaneHead": spec.head_type is HeadType.LANE,
        "kVocabParallelHead": spec.head_type is HeadType.VOCAB_PARALLEL,
        "kOneStream": share_stream(spec),
        "kGathersStreams": shape.gathers_streams,
        "kQkvBias": "qkv_bias" in vectors,
        "kQkNorm": "head_norms" in vectors,
        "kGated": any(Kind.GATE in recipe.shapes for recipe in all_recipes(spec)),
        "kNormAddsOne": spec.layers[0].norm.adds_one,
        "kOutBias": "out_bias" in vectors,
        "kSinks": "sinks" in vectors,
        "kExperts": shape.experts is not None,
        "kPacked": shape.ring.is_packed,
        "kHasWindows": bool(spec.window_layers),
        "kDirectSums": shape.sends_sums_directly,
    }
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"constexpr u64 kTapeBytes = {2 * shape.tape.num_values}ull;"]
    lines += [f"using WeightFormat = {FORMATS[shape.weight_dtype]};", *kv_lines(shape.kv_dtype, spec.head_dim)]
    for name, (words, _) in shape.words.lists.items():
        lines += [f"constexpr u32 k{name}Offset = {shape.words.offset_of(name)}, k{name}Stride = {words};"]
    lines += ["}  // namespace kog"]
    forms = {phase.name: op for phase, op in sorted(shape.ops.items())}
    if shape.has_plain_outputs:
        forms["DELTA_OUT"] = shape.net_out()
    lines += [_op_line(name, op) for name, op in forms.items()]
    lines += [f"#define KOG_POLL_DELAYS {', '.join(map(str, shape.words.delays))}"]
    if shape.coding is not None:
        lines += _coding_header(shape, shape.coding)
    if shape.head_coding is not None:
        lines += [f"#define KOG_HEAD_FORMAT {FORMATS[shape.head_coding.expanded or shape.weight_dtype]}"]
        lines += [f"namespace kog {{ constexpr u64 kHeadScalesOffset = {2 * shape.tape.head_scales_place}ull; }}"]
    if shape.experts is not None:
        lines += shape.experts.header()
        lines += [_op_line("SHARED_GATE_UP", shape.experts.shared_gate_up())] if shape.experts.lane_shared else []
        lines += ["#define KOG_UNION"] if shape.tokens > 1 and shape.experts.unites else []
    if shape.delta is not None:
        lines += shape.delta.header()
        if shape.tokens > 1:
            lines.append(f"#define KOG_DELTA_{'COMPANY' if shape.company else 'PASSES'}")
    if shape.awaits_attention:
        lines.append("#define KOG_AWAITS_ATTENTION")
    if shape.whole_windows:
        lines.append("#define KOG_WHOLE_WINDOWS")
    if shape.keeps_hashes:
        lines += [f"#define KOG_HASHES {NUM_HASHES}", f"#define KOG_HASH_TOKENS {HASH_TOKENS}"]
    if shape.checks_experts:
        lines.append(f"#define KOG_CHOICES {CHOICE_POSITIONS}")
    if shape.looks_up:
        lines += ["#define KOG_DRAFTS", f"namespace kog {{ constexpr u32 kPlaces = {PLACES}, kDraftPatience = {PATIENCE}; }}"]
        lines += [
            f"namespace kog {{ constexpr int kDraftUnit = {UNIT}, kDraftShare = {SHARE}, kDraftMostSaved = {MOST_SAVED}; }}"
        ]
    if shape.company:
        lines.append("#define KOG_COMPANY")
    if shape.traced_step >= 0:
        lines += ["#define KOG_TRACE 1", f"namespace kog {{ constexpr u32 kTracedStep = {shape.traced_step}; }}"]
    return "\n".join(lines) + "\n"


def _place(number: int, lane: int, layer: int) -> int:
    """A product as the kernel's table has it: its number among those of its layer and lane, the lane among the hosted ones."""
    return number | lane << _LANE_BIT | layer << _LAYER_BIT


def _op_line(name: str, op: OpShape) -> str:
    """The arguments of `Op` (phases/layout.cuh)."""
    numbers = [op.rows, op.blocks, op.per, op.steps, op.warps_of(0), op.num_long_tiles, op.rows_of(op.blocks - 1)]
    numbers += [op.warps_of(op.tiles - 1)] if op.in_turn else []
    return f"#define KOG_{name}_OP {', '.join(map(str, numbers))}"


def _coding_header(shape: KernelShape, coding: Coding) -> list[str]:
    """What the kernel knows of quantised weights."""
    numbers = {
        "kCodeBits": coding.bits,
        "kCodeScales": coding.scales,
        "kCodeScaleBytes": coding.scale_bytes,
        "kCodeZeroBytes": coding.zero_bytes,
        "kScaleRows": shape.tape.scale_rows,
    }
    floats = {}
    if shape.has_plain_inputs or shape.has_plain_outputs:
        floats["kNetScale"] = coding.plain_scale(shape.weight_dtype)
    return [
        f"#define KOG_CODE {CODES[coding.number]}",
        f"#define KOG_CODE_FORMAT {FORMATS[coding.expanded or shape.weight_dtype]}",
        *(["#define KOG_INTEGERS"] if coding.is_integer else []),
        f"#define KOG_SCALE {SCALES[coding.scale]}",
        *(["#define KOG_PLAIN_ATTENTION"] if coding.is_of_experts else []),
        *(["#define KOG_PLAIN_NET_INPUTS"] if shape.has_plain_inputs else []),
        *(["#define KOG_PLAIN_NET_OUTPUTS"] if shape.has_plain_outputs else []),
        *(f"namespace kog {{ constexpr float {name} = static_cast<float>({value!r}); }}" for name, value in floats.items()),
        *(f"namespace kog {{ constexpr int {name} = {value}; }}" for name, value in numbers.items()),
    ]
