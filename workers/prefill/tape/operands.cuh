// Parts of tape_product.cuh: weights as operands in registers, the products of 64 columns, and what becomes of results.
#pragma once

#include "panels.cuh"
#include "pdl.cuh"
#include "slot_ring.cuh"
#include "weights.cuh"

namespace kog {

constexpr u32 kGroupThreads = 128, kGroupLines = 64;
constexpr u32 kPanel = 64;

__device__ __forceinline__ u32 aligned_memory() { return (shared_memory() + 1023) & ~1023u; }
template <class Tile>
__device__ __forceinline__ u32 barrier_of(u32 slot) {
    return aligned_memory() + Tile::kStages * Tile::kStageBytes + slot * 8;
}

// Operands of 64 columns, two of 32, of 16 rows.
struct Operands {
    u32 v[2][2][4];  // 32 columns, upper and lower row, pairs

    // They stay where they are until here, whatever multiplies them meanwhile.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (u32 i = 0; i < 16; ++i) kept(v[i / 8][i / 4 % 2][i % 4]);
    }
};
struct Words {
    u32 all[4];
};
__device__ __forceinline__ Words words_at(u32 address) {
    const uint4 words = *reinterpret_cast<const uint4*>(at_shared(address));
    return {{words.x, words.y, words.z, words.w}};
}
constexpr u32 kGroupsOfStep = kScales > 0 ? kScales : 1;  // with a scale each
constexpr u32 kOfSection = 4 / Code::kWords;    // operands: a section has their 64 bytes
// `half`: 64 columns of a step of 128, or of two pairs of steps of 32. `first_section`: of these, that the stage has.
__device__ __forceinline__ void expand_row(u32 weights, const OperandRow& row, u32 half, u32 first_section, u32 (&even)[4], u32 (&odd)[4]) {
    uint4 given[2];
    u32 factor = 0;
    Zero zero{0xe408e408u, 0xd480d480u};  // of 8
#pragma unroll
    for (u32 n = 0; n < 2; ++n) {
        const u32 operand = half * 2 + n;  // of a stage
        if constexpr (kIsCoded && kScales > 0) {
            constexpr u32 kOfScale = 4 / kGroupsOfStep;  // operands
            if (operand % kOfScale == 0 || n == 0) {
                const u32 group = operand / kOfScale;
                const float scale = Scale::get(at_shared(weights + row.scales + group * (kScaleBytes / kGroupsOfStep))) * (Code::kFactor * kWeightScale);
                factor = Fp16::pack(scale, scale);
                if constexpr (kZeroBytes > 0) zero = Int4::zero(*at_shared(weights + row.zeros + group));
            }
        }
        const Words words = words_at(weights + row.codes + (operand / kOfSection - first_section) * row.section);
        given[n] = Code::operands(words.all + operand % kOfSection * Code::kWords, factor, zero);
    }
    even[0] = given[0].x, even[1] = given[0].y, even[2] = given[0].z, even[3] = given[0].w;
    odd[0] = given[1].x, odd[1] = given[1].y, odd[2] = given[1].z, odd[3] = given[1].w;
}
// Queue the products of 64 columns with rows whose panel is at address `x`.
template <u32 kSums>
__device__ __forceinline__ void multiply(float (&sums)[kSums], u32 panel, const Operands& of) {
    const u64 x = rows_at<kPanel>(panel);
    __syncwarp();
    settle(sums);
    products_begin();
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        const u32 i = k % 2 * 2;
        multiply_rows(sums, of.v[k / 2][0][i], of.v[k / 2][1][i], of.v[k / 2][0][i + 1], of.v[k / 2][1][i + 1], x + (k * 32 >> 4), true);
    }
    products_commit();
}
// Tails whose results are binary16 as they are. A thread has two neighbouring rows of the matrix twice, in such an order that a transposition
// gives it four.
template <class Form>
struct PlainRows {
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return threadIdx.x / 32 * 16 + laneid() / 8 * 4 + which * 2 + laneid() / 4 % 2; }

    // `to`: where the results of a row begin.
    template <class Product, class To>
    static __device__ __forceinline__ void put(const Product& tile, To to) {
        const u32 own = threadIdx.x / 32 * 16 + laneid() % 4 * 4, first_row = tile.row_at(own);
        const float upper = tile.factor(0), lower = tile.factor(1);
#pragma unroll
        for (u32 i = 0; i < sizeof(tile.sums) / sizeof(float); i += 4) {
            u32 first = transposed(Fp16::pack(tile.sums[i] * upper, tile.sums[i + 1] * upper));
            u32 last = transposed(Fp16::pack(tile.sums[i + 2] * lower, tile.sums[i + 3] * lower));
            const u32 row = i * 2 + laneid() / 4;
            if (row >= tile.share.room) continue;
            if (row >= tile.share.count) first = last = 0;
            u16* const there = to(row);
            if constexpr (Blocks<Form>::kIsEven && Form::kRows % 4 == 0 && Form::kMatrixRows % 4 == 0) {
                if (first_row != kNowhere) *reinterpret_cast<uint2*>(there + first_row) = make_uint2(first, last);
            } else {
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    const u32 at = tile.row_at(own + k);
                    if (at != kNowhere) there[at] = static_cast<u16>((k < 2 ? first : last) >> k % 2 * 16);
                }
            }
        }
    }
};

// Tails of products whose matrix has gates and ups in turn. A thread has a gate and the up that belongs to it: neighbours, of which every other
// thread has the upper one first, so that eight threads read 128 bytes that do not lie in the same banks. A warp has the two gates of the same
// place in four units of 8: they stand together in the order of products.
template <class Form>
struct GatedRows {
    static constexpr bool kAreTogether = Blocks<Form>::kIsEven && Form::kRows % 4 == 0 && Form::kMatrixRows % 4 == 0 && kFfn % 2 == 0;  // two neighbouring gates
    static_assert(Form::kRows % 2 == 0 && Form::kLastRows % 2 == 0, "a gate and its up are in one block");
    static __device__ __forceinline__ u32 gate_of(u32 i) {  // of the eight of this warp
        const u32 warp = threadIdx.x / 32;
        return warp / 4 * 32 + i / 2 * 8 + warp % 4 * 2 + i % 2;
    }
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return gate_of(laneid() / 4) * 2 + (which ^ laneid() / 4 % 2); }

    // `activation`: of this thread's gate and its up. `to`: where that of a row of what is multiplied goes, and of a gate's row of the matrix.
    template <class Product, class Activation, class To>
    static __device__ __forceinline__ void put(const Product& tile, Activation activation, To to) {
        const bool is_up_first = laneid() / 4 % 2;
        const float upper = tile.factor(0), lower = tile.factor(1);
        u32 gates[2];
#pragma unroll
        for (u32 k = 0; k < 2; ++k) gates[k] = tile.row_at(gate_of(laneid() % 4 * 2 + k) * 2);
#pragma unroll
        for (u32 i = 0; i < sizeof(tile.sums) / sizeof(float); i += 4) {
            float values[2];
#pragma unroll
            for (u32 k = 0; k < 2; ++k) {
                const float one = tile.sums[i + k] * upper, other = tile.sums[i + 2 + k] * lower;
                values[k] = activation(is_up_first ? other : one, is_up_first ? one : other);
            }
            const u32 both = transposed(Fp16::pack(values[0], values[1])), row = i * 2 + laneid() / 4;
            if (row >= tile.share.count) continue;
            if constexpr (kAreTogether) {
                if (gates[0] != kNowhere) *reinterpret_cast<u32*>(to(row, gates[0])) = both;
            } else {
#pragma unroll
                for (u32 k = 0; k < 2; ++k)
                    if (gates[k] != kNowhere) *to(row, gates[k]) = static_cast<u16>(both >> k * 16);
            }
        }
    }
};

}  // namespace kog
