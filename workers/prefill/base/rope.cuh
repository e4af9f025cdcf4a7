// Rotary embedding.
#pragma once

namespace kog {

// Two pairs of a query or key, turned by cosine and sine of each.
__device__ __forceinline__ float4 turned(const float4& pairs, const float4& turns) {
    return {pairs.x * turns.x - pairs.y * turns.y, pairs.x * turns.y + pairs.y * turns.x,
            pairs.z * turns.z - pairs.w * turns.w, pairs.z * turns.w + pairs.w * turns.z};
}

}  // namespace kog
