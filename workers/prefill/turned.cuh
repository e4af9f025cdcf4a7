// Rotary embedding.
#pragma once

namespace kog {

// Two pairs of a query or key, turned by cosine and sine of each.
__device__ __forceinline__ float4 turned(const float4& pairs, const float4& turns) {
    return {pairs.x * turns.x - pairs.y * turns.y, pairs.x * turns.y + pairs.y * turns.x,
            pairs.z * turns.z - pairs.w * turns.w, pairs.z * turns.w + pairs.w * turns.z};
}
__device__ __forceinline__ bool is_finite_pair(u32 packed) {
    return (packed & 0x7c00u) != 0x7c00u && (packed & 0x7c000000u) != 0x7c000000u;
}

}  // namespace kog
