// Floats of four bits: their products, scaled. All that a tile has for a thread is read at once, and the tile given back, before the first
// product: there are two matrix warps for each scheduler, and little else hides the way from shared memory.
#pragma once
#include "coded.cuh"

#if defined(KOG_CODE) && !defined(KOG_INTEGERS)
namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp. With scales on the tape `scaled` has them, of this thread's columns; else
// `sums` as the matrix unit leaves them.
struct FourBitSums {
    float sums[kRowGroups][4] = {};
    float scaled[kRowGroups] = {};

    __device__ __forceinline__ float part(u32 lane, int group) const {
        return (kCodeScales > 0 ? scaled[group] : own_sum(lane, sums[group])) * kCodeFactor;
    }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). `free` is called with what
    // depends on all codes and scales that were read.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        Part<kGroups> tile;
        free(tile.template read<kRows>(lane, at, x_address));
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                if (kCodeScales > 0 && i % kOperandsOfScale == 0) clear(sums[group]);
                const uint4& codes = tile.codes[group];
                const u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, q[Code::kWords] = {words[i]};
                u32 a[4];
                Code::expand(q, a);
                CodeFormat::mma(sums[group], a[0], a[1], a[2], a[3], tile.x[i].x, tile.x[i].y);
                if (kCodeScales > 0 && i % kOperandsOfScale == kOperandsOfScale - 1)
                    scaled[group] += Scale::get(tile.scales[group], i / kOperandsOfScale) * own_sum(lane, sums[group]);
            }
        }
    }

private:
    static constexpr int kOperandsOfScale = kOperands / (kCodeScales > 0 ? kCodeScales : 1);  // columns with scales of their own

    template <int kGroups>
    struct Part {
        uint4 codes[kGroups];
        uint2 x[kOperands];
        u32 scales[kGroups][4];

        template <int kRows>
        __device__ __forceinline__ u32 read(u32 lane, u32 at, u32 x_address) {
            const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
            u32 loaded = 0;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) load_shared(at + group * 512, codes[group]);
#pragma unroll
            for (int i = 0; i < kOperands; ++i) load_shared(x_address + i * 128, x[i]);
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
                if constexpr (kCodeScales > 0) load_bytes<kCodeScaleBytes>(first + (group * 8 + (lane >> 2)) * kCodeScaleBytes, scales[group]);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                loaded |= codes[group].x;
                if constexpr (kCodeScales > 0) loaded |= scales[group][0];
            }
            return loaded;
        }
    };
    static __device__ __forceinline__ void clear(float (&sum)[4]) { sum[0] = 0, sum[1] = 0, sum[2] = 0, sum[3] = 0; }
};

}  // namespace kog
#endif
