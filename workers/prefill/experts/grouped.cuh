// Products of pairs (a row and one of its experts) and the matrices of their experts, binary16 with float32 sums.
//
// Pairs lie in the order of experts. A tile has up to Tile::kRows pairs of one expert and Tile::kColumns rows of its matrix. Which pairs these
// are is only known on the device: there are as many thread blocks as could be needed, and those without pairs leave at once. Threads
// queue copies of the next kStages - 1 parts of rows and matrix, each kStage columns, and multiply the part that has come.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a pair has.
#pragma once

#include "pdl.cuh"
#include "quad.cuh"
#include "weights.cuh"

namespace kog {

using Params = KogExpertsParams;
constexpr u32 kStage = kIsCoded ? 128 : 64, kSteps32 = kStage / 32, kWeightSteps = kStage / kStepColumns;
constexpr u32 kNowhere = 0xffffffffu;

#ifdef __CUDACC__
extern __shared__ __align__(128) unsigned char tile_memory[];
#else
alignas(128) static unsigned char tile_memory[kMostSharedBytes];
#endif

// What of the sums of four neighbouring columns of eight each becomes is up to the `Tail`.
template <class Tile, class Form, class Tail>
struct Grouped {
    static constexpr u32 kWarpRows = Tile::kRows / Tile::kWarpsDown, kAcross = 8 / Tile::kWarpsDown;
    static constexpr u32 kRowSets = kWarpRows / 16;
    static constexpr u32 kXBytes = Tile::kRows * kStage * 2, kWeightBytes = Tile::kColumns * 64 * kWeightSteps;
    static constexpr u32 kScaleBytes = kIsCoded ? Tile::kColumns * 4 : 0, kStageBytes = kXBytes + kWeightBytes + kScaleBytes;
    static constexpr u32 kNumColumns = (Form::kMatrixRows + Tile::kColumns - 1) / Tile::kColumns;
    static_assert(Tile::kColumns == kAcross * 32 && kTileThreads == 256, "a warp has 32 columns");
    static_assert(kNumExperts <= kTileThreads, "a thread looks at each expert");

    const Params& params;
    u32 lane, column, expert, first, count;  // of pairs `count`; `column`: the first row of the matrix
    u32* rows;            // of each pair: what is multiplied, or kNowhere
    WeightRow* matrix;    // of each column
    float sums[kRowSets][4][4];

    // False: there are none.
    __device__ __forceinline__ bool find() {
        __shared__ u32 found[3];
        const u32 slot = blockIdx.x / (Tail::kLanesOfTiles * kNumColumns), across = blockIdx.x % (Tail::kLanesOfTiles * kNumColumns);
        lane = across / kNumColumns, column = across % kNumColumns * Tile::kColumns;
        if (threadIdx.x == 0) found[2] = 0;
        __syncthreads();
        if (threadIdx.x < kNumExperts) {  // tiles of expert e begin at slot floor(its first pair / rows) + e: there is room for all
            const u32 e = threadIdx.x;
            const u32 begin = reinterpret_cast<const u32*>(params.offsets_ptr)[e], end = reinterpret_cast<const u32*>(params.offsets_ptr)[e + 1];
            const u32 from = begin / Tile::kRows + e, pair = begin + (slot - from) * Tile::kRows;
            if (slot >= from && slot <= end / Tile::kRows + e && pair < end) found[0] = e, found[1] = pair, found[2] = min(end - pair, Tile::kRows);
        }
        __syncthreads();
        expert = found[0], first = found[1], count = found[2];
        return count > 0;
    }
    __device__ __forceinline__ void prepare() {
        __shared__ u32 all_rows[Tile::kRows];
        __shared__ WeightRow all_columns[Tile::kColumns];
        rows = all_rows, matrix = all_columns;
        for (u32 i = threadIdx.x; i < Tile::kRows; i += kTileThreads) rows[i] = i < count ? Tail::row_of(params, first + i) : kNowhere;
        for (u32 i = threadIdx.x; i < Tile::kColumns; i += kTileThreads) matrix[i] = find_row<Form>(Tail::first_byte(lane), column + i);
#pragma unroll
        for (u32 m = 0; m < kRowSets; ++m)
#pragma unroll
            for (u32 n = 0; n < 4; ++n)
#pragma unroll
                for (u32 i = 0; i < 4; ++i) sums[m][n][i] = 0;
        __syncthreads();
    }
    // Queue the copies of a part.
    __device__ __forceinline__ void load(u32 stage, u32 num_steps, u32 skew) {
        unsigned char* const to = tile_memory + stage % Tile::kStages * kStageBytes;
        const unsigned char* const x = Tail::rows_from(params);
        constexpr u32 kWidth = Tail::kWidth;
#pragma unroll
        for (u32 i = threadIdx.x; i < Tile::kRows * kSteps32 * 4; i += kTileThreads) {
            const u32 quarter = i % 4, row = i / 4 % Tile::kRows, step = i / (4 * Tile::kRows), from = rows[row];
            const u32 at = stage * kStage + step * 32 + quarter * 8 - skew;  // what is in front of the first is huge
            const bool is_there = from != kNowhere && at < kWidth;
            copy_async<16>(to + i * 16, x + (is_there ? 2 * (static_cast<u64>(from) * Tail::kRowStride + lane * Tail::kLaneStride + at) : 0), is_there);
        }
        const unsigned char* const experts = reinterpret_cast<const unsigned char*>(params.experts_ptr) + static_cast<u64>(expert) * kExpertBytes;
#pragma unroll
        for (u32 i = threadIdx.x; i < Tile::kColumns * kWeightSteps * 4; i += kTileThreads) {
            const u32 quarter = i % 4, step = stage * kWeightSteps + i / (4 * Tile::kColumns);
            const WeightRow at = matrix[i / 4 % Tile::kColumns];
            const bool is_there = at.part != 0 && step < num_steps;
            const unsigned char* const from = experts + (is_there ? at.base + at.part * parts_before<Form>(at.cta, step) : 0);
            copy_async<16>(to + kXBytes + i * 16, from + quarter * 16, is_there);
            if constexpr (kIsCoded)
                if (quarter == 0) copy_async<4>(to + kXBytes + kWeightBytes + i, from + at.scales, is_there);
        }
    }
    __device__ __forceinline__ void multiply(u32 stage) {
        const unsigned char* const from = tile_memory + stage % Tile::kStages * kStageBytes;
        const u32 warp = threadIdx.x / 32, down = warp / kAcross * kWarpRows, across = warp % kAcross * 32;
        const uint4* const x = reinterpret_cast<const uint4*>(from) + down * 4 + laneid();  // row laneid / 4, its quarter laneid % 4
        const uint4* const weights = reinterpret_cast<const uint4*>(from + kXBytes) + across * 4 + laneid();
        [[maybe_unused]] uint4 codes[4];
        [[maybe_unused]] u32 scales[4];
        if constexpr (kIsCoded) {
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                codes[n] = weights[n * 32];
                scales[n] = reinterpret_cast<const u32*>(from + kXBytes + kWeightBytes)[across + n * 8 + laneid() / 4];
            }
        }
#pragma unroll
        for (u32 step = 0; step < kSteps32; ++step) {
            uint4 upper[kRowSets], lower[kRowSets];
#pragma unroll
            for (u32 m = 0; m < kRowSets; ++m)
                upper[m] = x[step * Tile::kRows * 4 + m * 64], lower[m] = x[step * Tile::kRows * 4 + m * 64 + 32];
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                uint4 w;
                if constexpr (kIsCoded) {
                    const u32 words[4] = {codes[n].x, codes[n].y, codes[n].z, codes[n].w};
                    w = CodedWeights::operand(words[step], CodedWeights::factor(scales[n], step));
                } else {
                    w = PlainWeights::operand(weights[step * Tile::kColumns * 4 + n * 32]);
                }
#pragma unroll
                for (u32 m = 0; m < kRowSets; ++m) {
                    Fp16::mma(sums[m][n], upper[m].x, lower[m].x, upper[m].z, lower[m].z, w.x, w.y);
                    Fp16::mma(sums[m][n], upper[m].y, lower[m].y, upper[m].w, lower[m].w, w.z, w.w);
                }
            }
        }
    }
    __device__ __forceinline__ void run() {
        if (!find()) return;
        prepare();
        const u32 skew = Tail::skew(params, lane), num_steps = (Tail::kWidth + skew + kStepColumns - 1) / kStepColumns;
        const u32 num_stages = (num_steps + kWeightSteps - 1) / kWeightSteps;
#pragma unroll
        for (u32 stage = 0; stage + 1 < Tile::kStages; ++stage) {
            if (stage < num_stages) load(stage, num_steps, skew);
            copies_commit();
        }
#pragma unroll 1
        for (u32 stage = 0; stage < num_stages; ++stage) {
            copies_wait<Tile::kStages - 2>();
            __syncthreads();
            if (stage + Tile::kStages - 1 < num_stages) load(stage + Tile::kStages - 1, num_steps, skew);
            copies_commit();
            multiply(stage);
        }
        const u32 warp = threadIdx.x / 32, across = column + warp % kAcross * 32;
#pragma unroll
        for (u32 m = 0; m < kRowSets; ++m) {
            const u32 row = warp / kAcross * kWarpRows + m * 16 + laneid() / 4;
            Tail::store(*this, row, across, sums[m]);
        }
    }
};

}  // namespace kog
