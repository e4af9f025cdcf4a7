// A set of a model's layers: one bit each, in one word or two.
#pragma once
#include "ptx.cuh"

namespace kog {

template <int kNumLayers, bool kTwoWords = (kNumLayers > 64)>
struct LayerMask {
    u64 bits;

    __device__ __forceinline__ bool has(u32 layer) const { return (bits >> layer) & 1; }
    // How many layers before this one are in the set.
    __device__ __forceinline__ u32 num_before(u32 layer) const { return __popcll(bits & ((1ull << layer) - 1)); }
};

template <int kNumLayers>
struct LayerMask<kNumLayers, true> {
    static_assert(kNumLayers <= 128, "two words");
    LayerMask<64> low, high;

    __device__ __forceinline__ bool has(u32 layer) const { return layer < 64 ? low.has(layer) : high.has(layer - 64); }
    __device__ __forceinline__ u32 num_before(u32 layer) const {
        return layer < 64 ? low.num_before(layer) : __popcll(low.bits) + high.num_before(layer - 64);
    }
};

}  // namespace kog
