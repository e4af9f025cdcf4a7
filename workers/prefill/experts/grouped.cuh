// Products of the matrices of experts and their pairs (a row and one of its experts), binary16 with float32 sums, on Hopper's matrix units.
//
// Pairs lie in the order of experts. A tile has kColumns rows of an expert's matrix, 64 for each of two groups of four warps, and up to
// Tile::kRows of its pairs. Which pairs these are is only known on the device: there are as many thread blocks as could be needed, and those
// without pairs leave at once. The matrix comes as the monokernel has it: a thread expands it into operands in its registers; pairs are the
// operand in shared memory. Threads queue copies of the next kStages - 1 parts of both, each kStage columns, beside the products of one.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a pair has.
#pragma once

#include "panels.cuh"
#include "pdl.cuh"
#include "weights.cuh"

namespace kog {

using Params = KogExpertsParams;
constexpr u32 kGroupThreads = 128, kGroups = kTileThreads / kGroupThreads;
constexpr u32 kPanel = 64, kPanels = kStage / kPanel, kSteps32 = kStage / 32, kWeightSteps = kStage / kStepColumns;
constexpr u32 kNowhere = 0xffffffffu;
constexpr u32 kColumnsOfThread = kColumns * 4 / kTileThreads;  // whose quarter it copies
static_assert(kColumns == 64 * kGroups && kTileThreads == 256, "a group has 64 columns");
static_assert(kNumExperts <= kTileThreads, "a thread looks at each expert");

template <class Tile, class Form, class Tail>
struct Grouped {
    static constexpr u32 kXBytes = Tile::kRows * kStage * 2, kPanelBytes = Tile::kRows * kPanel * 2;
    static constexpr u32 kWeightBytes = kColumns * 64 * kWeightSteps, kStageBytes = Tile::kStageBytes;
    static constexpr u32 kAcross = (Form::kMatrixRows + kColumns - 1) / kColumns;
    static constexpr u32 kRowsOfThread = Tile::kRows * 8 / kTileThreads;  // of which it copies 16 bytes of a panel
    static_assert(kStageBytes >= kXBytes + kWeightBytes + (kIsCoded ? kColumns * 4 : 0) && kStageBytes % 1024 == 0, "parts");

    const Params& params;
    u32 lane, column, expert, first, count;  // of pairs `count`; `column`: the first row of the matrix
    u32 base;                                // of shared memory
    u32 rows[kRowsOfThread];                 // what is multiplied, or kNowhere
    WeightRow columns[kColumnsOfThread];
    float sums[Tile::kRows / 2];

    // False: there are none.
    __device__ __forceinline__ bool find() {
        __shared__ u32 found[3];
        const u32 slot = blockIdx.x / (Tail::kLanesOfTiles * kAcross), across = blockIdx.x % (Tail::kLanesOfTiles * kAcross);
        lane = across / kAcross, column = across % kAcross * kColumns;
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
        base = (shared_memory() + 1023) & ~1023u;
#pragma unroll
        for (u32 i = 0; i < kRowsOfThread; ++i) {
            const u32 row = threadIdx.x / 8 + i * (kTileThreads / 8);
            rows[i] = row < count ? Tail::row_of(params, first + row) : kNowhere;
        }
#pragma unroll
        for (u32 i = 0; i < kColumnsOfThread; ++i) columns[i] = find_row<Form>(Tail::first_byte(lane), column + threadIdx.x / 4 + i * (kTileThreads / 4));
#pragma unroll
        for (u32 i = 0; i < Tile::kRows / 2; ++i) sums[i] = 0;
    }
    // Queue the copies of a part.
    __device__ __forceinline__ void load(u32 stage, u32 num_steps) {
        const u32 to = base + stage % Tile::kStages * kStageBytes, weights = to + kXBytes;
        const unsigned char* const x = Tail::rows_from(params);
#pragma unroll
        for (u32 panel = 0; panel < kPanels; ++panel) {
            const u32 chunk = threadIdx.x % 8, at = stage * kStage + panel * kPanel + chunk * 8;
#pragma unroll
            for (u32 i = 0; i < kRowsOfThread; ++i) {
                const u32 row = threadIdx.x / 8 + i * (kTileThreads / 8);
                const bool is_there = rows[i] != kNowhere && at < Tail::kWidth;
                const u64 from = is_there ? static_cast<u64>(rows[i]) * Tail::kRowStride + lane * Tail::kLaneStride + at : 0;
                copy_async<16>(to + panel * kPanelBytes + row * 128 + ((chunk ^ row % 8) << 4), x + 2 * from, is_there);
            }
        }
        const unsigned char* const experts = reinterpret_cast<const unsigned char*>(params.experts_ptr) + static_cast<u64>(expert) * kExpertBytes;
        const u32 quarter = threadIdx.x % 4;
#pragma unroll
        for (u32 n = 0; n < kWeightSteps; ++n) {
            const u32 step = stage * kWeightSteps + n;
#pragma unroll
            for (u32 i = 0; i < kColumnsOfThread; ++i) {
                const WeightRow& at = columns[i];
                const u32 place = Tail::place_of(threadIdx.x / 4 + i * (kTileThreads / 4));
                const bool is_there = at.part != 0 && step < num_steps;
                const unsigned char* const from = experts + (is_there ? at.base + at.part * parts_before<Form>(at.cta, step) : 0);
                copy_async<16>(weights + (n * kColumns + place) * 64 + quarter * 16, from + quarter * 16, is_there);
                if (kIsCoded && quarter == 0) copy_async<4>(weights + kWeightBytes + place * 4, from + at.scales, is_there);
            }
        }
    }
    // A row of weights: of each 32 columns a thread has eight.
    __device__ __forceinline__ void expand(u32 weights, u32 row, u32 (&v)[kSteps32][4]) {
        const u32 at = weights + row * 64 + laneid() % 4 * 16;
        uint4 held[kWeightSteps];
#pragma unroll
        for (u32 n = 0; n < kWeightSteps; ++n) held[n] = *reinterpret_cast<const uint4*>(at_shared(at + n * kColumns * 64));
        [[maybe_unused]] u32 scales = 0;
        if constexpr (kIsCoded) scales = *reinterpret_cast<const u32*>(at_shared(weights + kWeightBytes + row * 4));
        [[maybe_unused]] const u32 words[4] = {held[0].x, held[0].y, held[0].z, held[0].w};
#pragma unroll
        for (u32 step = 0; step < kSteps32; ++step) {
            uint4 pairs;
            if constexpr (kIsCoded) pairs = CodedWeights::operand(words[step], CodedWeights::factor(scales, step));
            else pairs = PlainWeights::operand(held[step]);
            v[step][0] = pairs.x, v[step][1] = pairs.y, v[step][2] = pairs.z, v[step][3] = pairs.w;
        }
    }
    __device__ __forceinline__ void multiply(u32 stage) {
        const u32 from = base + stage % Tile::kStages * kStageBytes, weights = from + kXBytes;
        const u32 row = threadIdx.x / 32 * 16 + laneid() / 4;
        u32 upper[kSteps32][4], lower[kSteps32][4];
        expand(weights, row, upper), expand(weights, row + 8, lower);
        const u64 x = rows_at<kPanel>(from);
        __syncwarp();
        settle(sums);
        products_begin();
#pragma unroll
        for (u32 k = 0; k < kStage / 16; ++k) {
            const u32 i = k % 2 * 2;
            multiply_weights(sums, upper[k / 2][i], lower[k / 2][i], upper[k / 2][i + 1], lower[k / 2][i + 1],
                             x + (k * 16 / kPanel * kPanelBytes + k * 16 % kPanel * 2 >> 4));
        }
        products_commit();
    }
    __device__ __forceinline__ void run() {
        if (!find()) return;
        prepare();
        const u32 num_steps = (Tail::num_columns(params, lane) + kStepColumns - 1) / kStepColumns;
        const u32 num_stages = (num_steps + kWeightSteps - 1) / kWeightSteps;
#pragma unroll
        for (u32 stage = 0; stage + 1 < Tile::kStages; ++stage) {
            if (stage < num_stages) load(stage, num_steps);
            copies_commit();
        }
#pragma unroll 1
        for (u32 stage = 0; stage < num_stages; ++stage) {
            products_wait<0>();
            settle(sums);
            copies_wait<Tile::kStages - 2>();
            __syncthreads();
            multiply(stage);
            if (stage + Tile::kStages - 1 < num_stages) load(stage + Tile::kStages - 1, num_steps);
            copies_commit();
        }
        products_wait<0>();
        settle(sums);
        copies_wait<0>();
        __syncthreads();
        Tail::put(*this);
        __syncthreads();
        Tail::store(*this);
    }

    // ---- results on their way out: kOut of each pair, side by side ----
    template <u32 kOut>
    __device__ __forceinline__ u16* result_at(u32 row, u32 at) const {
        return reinterpret_cast<u16*>(at_shared(base + row * (kOut * 2 + 16) + at * 2));
    }
    // `to(pair, unit)`: where 8 results of a pair go; `num_units`: that there are of this tile's first one on.
    template <u32 kOut, class Place>
    __device__ __forceinline__ void store_units(u32 num_units, Place to) const {
        for (u32 i = threadIdx.x; i < count * (kOut / 8); i += kTileThreads) {
            const u32 row = i / (kOut / 8), unit = i % (kOut / 8);
            if (unit < num_units) *to(first + row, unit) = *reinterpret_cast<const uint4*>(result_at<kOut>(row, unit * 8));
        }
    }
};

}  // namespace kog
