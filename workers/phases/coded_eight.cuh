// Codes of eight bits: their products, scaled.
#pragma once
#include "coded.cuh"

#if defined(KOG_CODE) && !defined(KOG_INTEGERS)
namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp. With scales on the tape `scaled` has them, of this thread's columns; else
// `sums` as the matrix unit leaves them.
struct EightBitSums {
    float sums[kRowGroups][4] = {};
    float scaled[kRowGroups] = {};

    __device__ __forceinline__ float own(u32 lane, int group) const {
        return kCodeScales > 0 ? scaled[group] : own_sum(lane, sums[group]);
    }
    __device__ __forceinline__ float part(u32 lane, int group) const { return own(lane, group) * kCodeFactor; }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). Returns what depends on all
    // codes and scales that were read.
    template <int kGroups, int kRows>
    __device__ __forceinline__ u32 add(u32 lane, u32 at, u32 x_address) {
        u32 loaded = 0, scales[kGroups][4];
        if constexpr (kCodeScales > 0) {
            const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const u32 row = group * 8 + (lane >> 2);
                load_bytes<kCodeScaleBytes>(first + row * kCodeScaleBytes, scales[group]);
                loaded |= scales[group][0];
            }
        }
        if constexpr (kCodeScales == 1) {  // unrolled, this would need more registers than there are
            begin_group<kGroups>();
#pragma unroll 1
            for (int load = 0; load < kLoads; ++load) loaded |= add_load<kGroups, kRows>(lane, at, x_address, load, scales);
            end_group<kGroups>(lane, 0, scales);
        } else {
#pragma unroll
            for (int load = 0; load < kLoads; ++load) loaded |= add_load<kGroups, kRows>(lane, at, x_address, load, scales);
        }
        return loaded;
    }

private:
    static constexpr int kOperandsOfScale = kCodeScales > 0 ? kOperands / kCodeScales : kOperands;
    // What 16 bytes of each thread and row add.
    template <int kGroups, int kRows>
    __device__ __forceinline__ u32 add_load(u32 lane, u32 at, u32 x_address, int load, const u32 (&scales)[kGroups][4]) {
        uint2 x_pairs[kOperandsOfLoad];
        uint4 codes[kGroups];
        u32 loaded = 0;
#pragma unroll
        for (int i = 0; i < kOperandsOfLoad; ++i) load_shared(x_address + (load * kOperandsOfLoad + i) * 128, x_pairs[i]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            load_shared(at + load * kRows * 64 + group * 512, codes[group]);
            loaded |= codes[group].x;
        }
#pragma unroll
        for (int i = 0; i < kOperandsOfLoad; ++i) {
            const int operand = load * kOperandsOfLoad + i;
            if (kCodeScales > 1 && operand % kOperandsOfScale == 0) begin_group<kGroups>();
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const u32 all[4] = {codes[group].x, codes[group].y, codes[group].z, codes[group].w};
                u32 q[Code::kWords], a[4];
#pragma unroll
                for (int k = 0; k < Code::kWords; ++k) q[k] = all[i * Code::kWords + k];
                Code::expand(q, a);
                CodeFormat::mma(sums[group], a[0], a[1], a[2], a[3], x_pairs[i].x, x_pairs[i].y);
            }
            if (kCodeScales > 1 && operand % kOperandsOfScale == kOperandsOfScale - 1)
                end_group<kGroups>(lane, operand / kOperandsOfScale, scales);
        }
        return loaded;
    }
    template <int kGroups>
    __device__ __forceinline__ void begin_group() {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) clear(sums[group]);
    }
    template <int kGroups>
    __device__ __forceinline__ void end_group(u32 lane, int i, const u32 (&scales)[kGroups][4]) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) scaled[group] = __fmaf_rn(own_sum(lane, sums[group]), Scale::get(scales[group], i), scaled[group]);
    }
};

}  // namespace kog
#endif
