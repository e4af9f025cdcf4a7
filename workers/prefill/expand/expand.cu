// Quantised matrices from the monokernel's tape: each weight in float32 as kog_dist/model/formats/weight_format.py defines it, times its
// column's factor if there is one, rounded to binary16. Where codes and scales lie is defined in kog_dist/decode/coded_packing.py.
#include "ptx.cuh"
#include "expand_shape.cuh"
#include "number_bits.cuh"
#include "unit.cuh"

namespace kog {

using Params = KogExpandParams;
constexpr u32 kRowGroups = 4;  // of eight rows, which a warp takes at a time: a block of rows has at most 32
constexpr u32 kSections = kRowBytes / 64;  // of a row's codes in a step: each thread has 16 bytes of one

// How a thread's codes of eight neighbouring columns lie in kWords words: four pairs, which begin at these columns.
__device__ __forceinline__ constexpr int column_of(int pair) { return pair == 1 ? 4 : pair == 2 ? 2 : 2 * pair; }
__device__ __forceinline__ void set(Unit& unit, int pair, u32 halves, float factor) {
    unit.v[column_of(pair)] = Fp16::low(halves) * factor;
    unit.v[column_of(pair) + 1] = Fp16::high(halves) * factor;
}
struct E4m3 {
    static constexpr int kWords = 2;
    static __device__ __forceinline__ void values(const u32* q, Unit& unit, float) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) set(unit, pair, expand_e4m3(q[pair / 2], pair % 2), 1.0f);
    }
};
struct E2m1 {
    static constexpr int kWords = 1;
    static __device__ __forceinline__ void values(const u32* q, Unit& unit, float) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) set(unit, pair, e2m1_as_binary16(e2m1_pair(q[0], pair)), 16384.0f);
    }
};
struct Int4 {
    static constexpr int kWords = 1;
    static __device__ __forceinline__ void values(const u32* q, Unit& unit, float zero) {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) unit.v[k] = static_cast<float>(q[0] >> 4 * k & 0xf) - zero;
    }
};
using Code = KOG_CODE;
constexpr u32 kSectionOperands = 4 / Code::kWords;  // 32 columns each, of which a thread has eight

struct Float32Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return __ldg(reinterpret_cast<const float*>(at)); }
};
struct Bf16Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return Bf16::low(__ldg(reinterpret_cast<const u16*>(at))); }
};
struct Fp16Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return Fp16::low(__ldg(reinterpret_cast<const u16*>(at))); }
};
struct E8m0Scale {
    static __device__ __forceinline__ float get(const unsigned char* at) { return __uint_as_float(static_cast<u32>(__ldg(at)) << 23); }
};
using Scale = KOG_SCALE;

// A warp's part of a tile: rows of 128 columns from `column` on.
struct Part {
    const unsigned char* codes;
    u32 num_rows, first_row, column, product;  // `first_row` among those of the product
};

__device__ __forceinline__ u64 part_bytes(u32 rows) { return rows * kRowBytes + (rows * (kScaleBytes + kZeroBytes) + 15) / 16 * 16; }

// False: this warp has none.
__device__ __forceinline__ bool find_part(const Params& params, u32 cta, Part& part) {
    const u32 warp = threadIdx.x / 32, of_product = params.blocks * params.tiles;
    const u32 tile = blockIdx.x / params.num_ctas, block = tile % of_product / params.tiles, step = tile % params.tiles;
    const u32 num_short = step > params.long_tiles ? step - params.long_tiles : 0, num_warps = params.warps - (step >= params.long_tiles);
    if (warp >= num_warps) return false;
    part.product = tile / of_product;
    part.num_rows = block + 1 == params.blocks ? params.last_rows : params.rows;
    part.first_row = cta * (params.rows * (params.blocks - 1) + params.last_rows) + block * params.rows;
    part.column = (warp * params.tiles + step) * 128;
    const u64 of_block = params.warps * params.tiles - (params.tiles - params.long_tiles);
    u64 at = reinterpret_cast<const u64*>(params.places_ptr)[2 * part.product];
    at += params.num_ctas * (block * of_block * part_bytes(params.rows) + (params.warps * step - num_short) * part_bytes(part.num_rows));
    at += (cta * num_warps + warp) * part_bytes(part.num_rows);
    part.codes = reinterpret_cast<const unsigned char*>(params.tape_ptr) + at;
    return true;
}

// Where the columns of a row of a product go, and their factors.
struct Target {
    u16* out;
    const float* factors;  // nullptr: there are none
};

__device__ __forceinline__ Target find_target(const Params& params, u32 product, u32 row) {
    const u32 lane = product * (params.product_rows / params.lane_rows) + row / params.lane_rows;
    u32 lane_row = row % params.lane_rows;
    if (params.is_interleaved) lane_row = lane_row % 2 * (params.lane_rows / 2) + lane_row / 2;
    const float* const factors = reinterpret_cast<const float*>(params.factor_ptr);
    return {reinterpret_cast<u16*>(params.out_ptr) + (u64{lane} * params.lane_rows + lane_row) * params.columns,
            factors ? factors + u64{lane} * params.factor_stride : nullptr};
}

__device__ __forceinline__ void store(const Target& to, u32 column, Unit unit) {
    if (to.factors) {
        const Unit factor = float_unit(to.factors + column);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) unit.v[k] *= factor.v[k];
    }
    *reinterpret_cast<uint4*>(to.out + column) = narrowed(unit);
}

// The codes of a row, for the thread that has its `quarter`.
struct Codes {
    uint4 sections[kSections];
};
__device__ __forceinline__ Codes load_row(const Part& part, u32 row, u32 quarter) {
    Codes codes;
#pragma unroll
    for (u32 section = 0; section < kSections; ++section)
        codes.sections[section] = __ldg(reinterpret_cast<const uint4*>(part.codes + (section * part.num_rows + row) * 64 + quarter * 16));
    return codes;
}
__device__ __forceinline__ void expand_row(const Params& params, const Part& part, const Codes& codes, u32 row, u32 quarter, float row_scale) {
    const unsigned char* const scales = part.codes + part.num_rows * kRowBytes + row * kScaleBytes;
    const unsigned char* const zeros = part.codes + part.num_rows * (kRowBytes + kScaleBytes) + row * kZeroBytes;
    const Target to = find_target(params, part.product, part.first_row + row);
#pragma unroll
    for (u32 operand = 0; operand < 4; ++operand) {
        const uint4& mine = codes.sections[operand / kSectionOperands];
        const u32 words[4] = {mine.x, mine.y, mine.z, mine.w};
        const u32 group = operand * kScales / 4, column = part.column + operand * 32 + quarter * 8;
        float scale = row_scale, zero = 8.0f;
        if constexpr (kScales > 0) scale = Scale::get(scales + group * (kScaleBytes / kScales));
        if constexpr (kZeroBytes > 0) zero = static_cast<float>(__ldg(zeros + group));
        Unit unit;
        Code::values(words + operand % kSectionOperands * Code::kWords, unit, zero);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) unit.v[k] *= scale;
        if (column < params.columns) store(to, column, unit);
    }
}

// A tile of a thread block of the monokernel, each warp its part.
__device__ __forceinline__ void expand_tile(const Params& params) {
    const u32 cta = blockIdx.x % params.num_ctas;
    Part part;
    if (!find_part(params, cta, part)) return;
    const u64 number = reinterpret_cast<const u64*>(params.places_ptr)[2 * part.product + 1];
    const u32 own_row = part.first_row - cta * (params.rows * (params.blocks - 1) + params.last_rows);
    const float* const row_scales = reinterpret_cast<const float*>(params.scales_ptr) + (number * params.num_ctas + cta) * kScaleRows + own_row;
    Codes codes[kRowGroups];  // all are on their way before the first is used
#pragma unroll
    for (u32 group = 0; group < kRowGroups; ++group)
        if (group * 8 + laneid() / 4 < part.num_rows) codes[group] = load_row(part, group * 8 + laneid() / 4, laneid() % 4);
#pragma unroll
    for (u32 group = 0; group < kRowGroups; ++group) {
        const u32 row = group * 8 + laneid() / 4;
        if (row < part.num_rows && part.first_row + row < params.product_rows)
            expand_row(params, part, codes[group], row, laneid() % 4, kScales > 0 ? 1.0f : __ldg(row_scales + row));
    }
}

}  // namespace kog

extern "C" __global__ void __launch_bounds__(256) expand(const __grid_constant__ KogExpandParams params) { kog::expand_tile(params); }
