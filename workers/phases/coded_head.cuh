// The LM head in integers of 8 bits: sums of its products. Each row has one scale, which the finaliser multiplies by.
#pragma once
#include "layout.cuh"

#ifdef KOG_HEAD_FORMAT
namespace kog {

// The integers of two codes in binary16: a number whose first byte is 0x64 is 1024 plus its last byte, and a code is its integer plus 128.
__device__ __forceinline__ u32 expand_int8(u32 codes, bool upper = false) {
    return add_halves(__byte_perm(codes, 0x64646464u, upper ? 0x4342 : 0x4140), 0xe480e480u);
}

// Partial sums of a block of rows in a thread of a matrix warp, as the matrix unit leaves them.
struct HeadSums {
    float sums[kRowGroups][4] = {};

    // Of the two columns of a row that this thread has results of.
    __device__ __forceinline__ float part(u32 lane, int group) const {
        const float(&sum)[4] = sums[group];
        return (lane & 1) ? sum[2] + sum[3] : sum[0] + sum[1];
    }

    // A warp's part of a tile, 64 columns, which begins at `at` (for this thread: 16 bytes for each thread in front of it). Returns what
    // depends on all codes that were read.
    template <int kGroups, int kRows>
    __device__ __forceinline__ u32 add(u32 lane, u32 at, u32 x_address) {
        uint2 x_pairs[HeadWeights::kXSteps];
        uint4 codes[kGroups];
        u32 loaded = 0;
#pragma unroll
        for (int i = 0; i < HeadWeights::kXSteps; ++i) load_shared(x_address + i * 128, x_pairs[i]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            load_shared(at + group * 512, codes[group]);
            loaded |= codes[group].x;
        }
#pragma unroll
        for (int i = 0; i < HeadWeights::kXSteps; ++i)
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const u32 first = i == 0 ? codes[group].x : codes[group].z, second = i == 0 ? codes[group].y : codes[group].w;
                HeadWeights::Format::mma(sums[group], expand_int8(first), expand_int8(first, true), expand_int8(second), expand_int8(second, true),
                                         x_pairs[i].x, x_pairs[i].y);
            }
        return loaded;
    }
};

}  // namespace kog
#endif
