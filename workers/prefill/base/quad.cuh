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

// The order of products (weights.cuh) has pairs of 32 columns in four parts: one of each unit, those of the same place in a unit together.
// Where the part stands that has pair `pair` of all units:
__device__ __forceinline__ constexpr u32 place_of_pair(u32 pair) { return pair == 1 ? 2 : pair == 2 ? 1 : pair; }
// Of a thread's unit, laneid() % 4 of a group: the part that has pair laneid() % 4 of all four. A full warp calls it.
__device__ __forceinline__ uint4 in_order_of_products(const uint4& unit) {
    u32 v[4] = {unit.x, unit.y, unit.z, unit.w};
    turn(v);
    return make_uint4(v[0], v[1], v[2], v[3]);
}

}  // namespace kog
