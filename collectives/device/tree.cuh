// The one order in which sums over ranks are taken: adjacent pairs, then pairs of pairs; an odd last one goes up unchanged. The same
// as `collectives/reference.py:tree_sum`, so ranks, world sizes and the CPU have the same bits. Includes nothing: a host compiles it.
#pragma once

namespace kog {

template <int kCount>
__device__ __forceinline__ float tree_sum(float (&part)[kCount]) {
    constexpr int kPairs = kCount / 2, kLeft = kCount - kPairs;
    float next[kLeft];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) next[i] = part[2 * i] + part[2 * i + 1];
    if constexpr (kCount % 2) next[kPairs] = part[kCount - 1];
    if constexpr (kLeft == 1) return next[0];
    else return tree_sum<kLeft>(next);
}

}  // namespace kog
