// The matrices of experts where the monokernel has them (kog_dist/workers/cuda/expert_weights.py): where a row's columns lie, and the operands
// of a product that they are, in binary16. A step is what lies together of a row: 32 columns of 16 bit, or 128 codes of 4 bit, 64 bytes.
#pragma once

#include "async_copy.cuh"
#include "experts_shape.cuh"

namespace kog {

constexpr u32 kStepColumns = kIsCoded ? 128 : 32;
// A warp's part of a tile, of one step: its rows' 64 bytes, and of codes 4 scales of a byte for each row.
__device__ __forceinline__ constexpr u32 part_bytes(u32 rows) { return rows * 64 + (kIsCoded ? (rows * 4 + 15) / 16 * 16 : 0); }

// Where row `row` of a matrix in the form `Form` lies, of one whose first byte is `first`.
struct WeightRow {
    u32 base, part, cta, scales;  // bytes; `part`: of a step of a warp, 0 = there is no such row; `scales`: from a row's codes to its scales
};
template <class Form>
__device__ __forceinline__ WeightRow find_row(u32 first, u32 row) {
    if (row >= Form::kMatrixRows) return {0, 0, 0, 0};
    const u32 cta = row / Form::kCtaRows, own = row % Form::kCtaRows, block = own / Form::kRows, at = own % Form::kRows;
    const u32 num_rows = block + 1 == Form::kBlocks ? Form::kLastRows : Form::kRows;
    constexpr u32 kParts = (Form::kWarps * Form::kTiles - (Form::kTiles - Form::kLongTiles)) * Form::kSteps;  // of a block
    return {first + Form::kCtas * block * kParts * part_bytes(Form::kRows) + at * 64, part_bytes(num_rows), cta, num_rows * 64 - at * 60};
}
// How many parts lie in front of a row's step, of a block of rows.
template <class Form>
__device__ __forceinline__ u32 parts_before(u32 cta, u32 step) {
    const u32 warp = step / Form::kPer, of_warp = step % Form::kPer, tile = of_warp / Form::kSteps;
    const u32 num_short = tile > Form::kLongTiles ? tile - Form::kLongTiles : 0, num_warps = Form::kWarps - (tile >= Form::kLongTiles);
    return (Form::kCtas * (Form::kWarps * tile - num_short) + cta * num_warps + warp) * Form::kSteps + of_warp % Form::kSteps;
}

// The order of products. Of 32 neighbouring columns a thread has eight of a matrix: as pairs (0 1) (4 5) (2 3) (6 7), in binary16, the
// operands of two products. These want two of each eight values of the other operand from a thread's columns: pair q of all four threads
// stands together there. Where a pair of columns goes, counted in pairs:
__device__ __forceinline__ constexpr u32 product_place(u32 pair) {
    const u32 thread = pair % 16 / 4, of_thread = pair % 4;
    return pair / 16 * 16 + (of_thread == 1 ? 2 : of_thread == 2 ? 1 : of_thread) * 4 + thread;
}
struct PlainWeights {  // of 16 bit: `words` are these pairs
    static __device__ __forceinline__ uint4 operand(const uint4& words) {
        if constexpr (kIsHalf) return words;
        return make_uint4(narrow(words.x), narrow(words.y), narrow(words.z), narrow(words.w));
    }
    static __device__ __forceinline__ u32 narrow(u32 pair) { return Fp16::pack(WeightFormat::low(pair), WeightFormat::high(pair)); }
};
struct CodedWeights {  // E2M1: eight codes in a word; `factor` is 2^14 times their scale, twice
    static __device__ __forceinline__ uint4 operand(u32 word, u32 factor) {
        const u32 last = (word >> 4 & 0x00c000c0u) | (word >> 5 & 0x01000100u) | (word << 1 & 0x80008000u);
        return make_uint4(value(word, factor), value(word << 3, factor), value(word << 6, factor), value(last, factor));
    }
    static __device__ __forceinline__ u32 value(u32 bits, u32 factor) {  // exponents of binary16 are 14 higher
        return multiply_halves((bits & 0x01c001c0u) << 3 | (bits & 0x80008000u), factor);
    }
    // Of the scale of E8M0 at `index` of four. One of 4 or more is infinite here, which ends prefill of the prompt.
    static __device__ __forceinline__ u32 factor(u32 scales, u32 index) {
        const float scale = __uint_as_float((scales >> 8 * index & 0xff) << 23) * 16384.0f;
        return Fp16::pack(scale, scale);
    }
};

}  // namespace kog
