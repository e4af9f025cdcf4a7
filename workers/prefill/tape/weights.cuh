// Matrices where the monokernel has them: which parts of them a tile copies, where in these the columns of a row lie, and the operands of a
// product that they are, in binary16. Behind a header that says what kRowBytes is. A step is what lies together of a row: 32 columns
// of 16 bit, or 128 codes. A part is a step of a block of neighbouring rows: kRowBytes of each row in sections of 64 bytes, [section][row],
// and of codes their scales, [row][scale], and zero points.
#pragma once

#include "async_copy.cuh"
#include "quad.cuh"

namespace kog {

constexpr u32 kNowhere = 0xffffffffu;
constexpr u32 kStepColumns = kIsCoded ? 128 : 32;
template <u32 kBytes>
__device__ __forceinline__ constexpr u32 part_bytes(u32 rows) { return rows * kBytes + (rows * (kScaleBytes + kZeroBytes) + 15) / 16 * 16; }

// The blocks of rows of a matrix in the form `Form`, one behind the other.
template <class Form>
struct Blocks {
    static constexpr u32 kPartBytes = part_bytes<kRowBytes>(Form::kRows);
    static constexpr u32 kAll = (Form::kMatrixRows + Form::kCtaRows - 1) / Form::kCtaRows * Form::kBlocks;
    static constexpr bool kIsEven = Form::kLastRows == Form::kRows;  // all blocks have as many rows

    static __device__ __forceinline__ constexpr u32 num_rows(u32 block) {
        return kIsEven || block % Form::kBlocks + 1 < Form::kBlocks ? Form::kRows : Form::kLastRows;
    }
    // The first row of a block, of the matrix.
    static __device__ __forceinline__ u32 first_row(u32 block) { return block / Form::kBlocks * Form::kCtaRows + block % Form::kBlocks * Form::kRows; }
    // The first byte of a part, of a matrix that begins at 0.
    static __device__ __forceinline__ u32 part_at(u32 block, u32 step) {
        constexpr u32 kParts = (Form::kWarps * Form::kTiles - (Form::kTiles - Form::kLongTiles)) * Form::kSteps;  // of a block
        const u32 cta = block / Form::kBlocks, warp = step / Form::kPer, of_warp = step % Form::kPer, tile = of_warp / Form::kSteps;
        const u32 num_short = tile > Form::kLongTiles ? tile - Form::kLongTiles : 0, num_warps = Form::kWarps - (tile >= Form::kLongTiles);
        const u32 before = (Form::kCtas * (Form::kWarps * tile - num_short) + cta * num_warps + warp) * Form::kSteps + of_warp % Form::kSteps;
        return Form::kCtas * (block % Form::kBlocks) * kParts * kPartBytes + before * part_bytes<kRowBytes>(num_rows(block));
    }
};

// Where a thread finds its columns of a row in a step of a tile, in bytes. `section`: of one.
struct OperandRow {
    u32 codes, section, scales, zeros;
};

// The order of products. Of 32 neighbouring columns a thread has eight of a matrix: as pairs (0 1) (4 5) (2 3) (6 7), in binary16, the
// operands of two products. These want two of each eight values of the other operand from a thread's columns: pair q of all four threads
// stands together there. Where a pair of columns goes, counted in pairs:
__device__ __forceinline__ constexpr u32 product_place(u32 pair) {
    const u32 thread = pair % 16 / 4, of_thread = pair % 4;
    return pair / 16 * 16 + place_of_pair(of_thread) * 4 + thread;
}

// What is taken off integers, twice: see Int4.
struct Zero {
    u32 low, high;
};
// What weights become, times kWeightScale: `operands` are the eight values of 32 columns, whose bits are `words`. `scale`: of codes, times
// kFactor, twice.
__device__ __forceinline__ u32 scaled(u32 values, u32 scale) {
    if constexpr (kScales == 0) return values;  // a row has one scale, which its sums are multiplied by
    return multiply_halves(values, scale);
}
struct Plain {  // of 16 bit: `words` are these pairs
    static constexpr u32 kWords = 4;
    static constexpr float kFactor = 1.0f;
    static __device__ __forceinline__ uint4 operands(const u32* words, u32, const Zero&) {
        if constexpr (kIsHalf) return make_uint4(words[0], words[1], words[2], words[3]);
        return make_uint4(narrow(words[0]), narrow(words[1]), narrow(words[2]), narrow(words[3]));
    }
    static __device__ __forceinline__ u32 narrow(u32 pair) { return Fp16::pack(WeightFormat::low(pair), WeightFormat::high(pair)); }
};
struct E2m1 {  // exponents are 14 lower than in binary16
    static constexpr u32 kWords = 1;
    static constexpr float kFactor = 16384.0f;
    static __device__ __forceinline__ uint4 operands(const u32* words, u32 scale, const Zero&) {
        const u32 word = words[0], turned = word << 10 | word >> 22;  // magnitudes in bits 9 to 11 of a half, signs in bit 15
        const u32 last = masked_or<0x08000800u>(word << 1, word << 9 & 0x06000600u);  // as in `e2m1_pair`
        return make_uint4(value(word << 3, word, scale), value(word << 7, word << 4, scale), value(turned << 3, turned, scale),
                          multiply_halves(masked_or<0x80008000u>(word << 6, last), scale));
    }
    static __device__ __forceinline__ u32 value(u32 magnitude, u32 sign, u32 scale) {
        return multiply_halves(masked_or<0x80008000u>(sign, magnitude & 0x0e000e00u), scale);
    }
};
struct E4m3 {
    static constexpr u32 kWords = 2;
    static constexpr float kFactor = 1.0f;
    static __device__ __forceinline__ uint4 operands(const u32* words, u32 scale, const Zero&) {
        return make_uint4(scaled(expand_e4m3(words[0]), scale), scaled(expand_e4m3(words[0], true), scale), scaled(expand_e4m3(words[1]), scale),
                          scaled(expand_e4m3(words[1], true), scale));
    }
};
struct Int4 {  // n of column k and of column k + 4 become 1024 + n or 64 + n, in the bits of binary16
    static constexpr u32 kWords = 1;
    static constexpr float kFactor = 1.0f;
    static __device__ __forceinline__ uint4 operands(const u32* words, u32 scale, const Zero& zero) {
        const u32 word = words[0], last = word >> 8;
        const u32 v0 = value(masked_or<0x000f000fu>(word, 0x64006400u), zero.low, scale), v1 = value(masked_or<0x00f000f0u>(word, 0x54005400u), zero.high, scale);
        const u32 v2 = value(masked_or<0x000f000fu>(last, 0x64006400u), zero.low, scale), v3 = value(masked_or<0x00f000f0u>(last, 0x54005400u), zero.high, scale);
        return make_uint4(__byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632));
    }
    static __device__ __forceinline__ u32 value(u32 integers, u32 zero, u32 scale) { return scaled(add_halves(integers, zero), scale); }
    static __device__ __forceinline__ Zero zero(u32 point) {
        const float number = static_cast<float>(point);
        return {Fp16::pack(-1024.0f - number, -1024.0f - number), Fp16::pack(-64.0f - number, -64.0f - number)};
    }
};
using Code = KOG_CODE;

// How scales lie.
struct Float32Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return *reinterpret_cast<const float*>(at); }
};
struct Bf16Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return Bf16::low(*reinterpret_cast<const u16*>(at)); }
};
struct Fp16Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return Fp16::low(*reinterpret_cast<const u16*>(at)); }
};
struct E8m0Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return __uint_as_float(static_cast<u32>(*at) << 23); }
};
using Scale = KOG_SCALE;

}  // namespace kog
