// Floats of four bits: their products, scaled. All that a tile has for a thread is read at once, and the tile given back, before the first
// product: there are two matrix warps for each scheduler, and little else hides the way from shared memory.
#pragma once
#include "coded.cuh"

#if defined(KOG_CODE) && !defined(KOG_INTEGERS)
namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp. Two groups of eight rows share the results of their products (`kShared`): B has x
// in its first four columns for the even group and in its last four for the odd one, and zeros elsewhere, so that each of a row's four threads
// has sums of its own: of the first or the second half of the columns (`lane` even or odd) of the even or the odd group. With scales on the
// tape `scaled` has them; else `sums` as the matrix unit leaves them.
struct FourBitSums {
    static constexpr int kShared = kDirectSums ? 1 : 2;  // where the stream is kept in registers, there are none for both groups' x
    static constexpr int kResults = (kRowGroups + kShared - 1) / kShared;
    static constexpr int kAhead = kMaxPer > 12 ? 1 : 2;  // operands of x on their way, where what is gathered leaves registers
    float sums[kResults][4] = {};
    float scaled[kResults] = {};
    uint2 x[kShared][kAhead] = {};  // zeros stay where a thread loads none

    __device__ __forceinline__ float part(u32 lane, int result) const {
        return (kCodeScales > 0 ? scaled[result] : own_sum(lane, sums[result])) * kCodeFactor;
    }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). `free` is called with what
    // depends on all codes and scales that were read.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        constexpr int kOwnResults = (kGroups + kShared - 1) / kShared;
        uint4 codes[kGroups];
        u32 scales[kOwnResults][4];
        free(read<kRows>(lane, at, x_address, codes, scales));
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
            if (kCodeScales > 0 && i % kOperandsOfScale == 0)
#pragma unroll
                for (int result = 0; result < kOwnResults; ++result) clear(sums[result]);
#pragma unroll
            for (int k = 0; k < kShared * kOwnResults; ++k) {  // products with the same sums apart from each other
                const int result = k % kOwnResults, one = k / kOwnResults, group = kShared * result + one;
                if (group >= kGroups) continue;
                const u32 words[4] = {codes[group].x, codes[group].y, codes[group].z, codes[group].w}, q[Code::kWords] = {words[i]};
                u32 a[4];
                Code::expand(q, a);
                CodeFormat::mma(sums[result], a[0], a[1], a[2], a[3], x[one][i % kAhead].x, x[one][i % kAhead].y);
            }
            if (i + kAhead < kOperands) load_x<kGroups>(lane, x_address, i + kAhead);
            if (kCodeScales > 0 && i % kOperandsOfScale == kOperandsOfScale - 1)
#pragma unroll
                for (int result = 0; result < kOwnResults; ++result)
                    scaled[result] += Scale::get(scales[result], i / kOperandsOfScale) * own_sum(lane, sums[result]);
        }
    }

private:
    // Codes and scales, and the first operands of x. Returns what depends on all codes and scales.
    template <int kRows, int kGroups, int kOwnResults>
    __device__ __forceinline__ u32 read(u32 lane, u32 at, u32 x_address, uint4 (&codes)[kGroups], u32 (&scales)[kOwnResults][4]) {
        const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes, row = (kShared == 2 ? (lane >> 1 & 1) * 8 : 0) + (lane >> 2);
        u32 loaded = 0;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) load_shared(at + group * 512, codes[group]);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load_x<kGroups>(lane, x_address, i);
#pragma unroll
        for (int result = 0; result < kOwnResults; ++result)
            if constexpr (kCodeScales > 0) load_bytes<kCodeScaleBytes>(first + (result * kShared * 8 + row) * kCodeScaleBytes, scales[result]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) loaded |= codes[group].x;
#pragma unroll
        for (int result = 0; result < kOwnResults; ++result)
            if constexpr (kCodeScales > 0) loaded |= scales[result][0];
        return loaded;
    }
    template <int kGroups>
    __device__ __forceinline__ void load_x(u32 lane, u32 x_address, int i) {
        if constexpr (kShared == 1) {
            load_shared(x_address + i * 128, x[0][i % kAhead]);
        } else {
            load_shared_if(lane < 16, x_address + i * 128, x[0][i % kAhead]);
            if constexpr (kGroups > 1) load_shared_if(lane >= 16, x_address + i * 128, x[1][i % kAhead]);
        }
    }
    static constexpr int kOperandsOfScale = kOperands / (kCodeScales > 0 ? kCodeScales : 1);  // columns with scales of their own
};

}  // namespace kog
#endif
