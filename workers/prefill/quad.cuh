// Four neighbouring threads of a warp, which have the results of a row between them.
#pragma once

#include "ptx.cuh"

namespace kog {

// Each has two values of four neighbouring units of 8, and gets all of one of them.
__device__ __forceinline__ void turn(u32 (&v)[4]) {
    const bool odd = laneid() & 1, high = laneid() & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(kFullWarp, odd ? v[i] : v[i + 1], 1);
        v[i] = odd ? got : v[i], v[i + 1] = odd ? v[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(kFullWarp, high ? v[i] : v[i + 2], 2);
        v[i] = high ? got : v[i], v[i + 2] = high ? v[i + 2] : got;
    }
}

}  // namespace kog
