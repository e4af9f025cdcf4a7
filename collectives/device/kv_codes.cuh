// Keys and values in less than 16 bits (kog_dist/decode/kv_formats.py defines them): codes, and one scale for a row of a head and each of K and V.
// A code times its scale is exact in binary16, but for what is smaller than its smallest number. Behind a header with `kKvBits`.
#pragma once
#include "ptx.cuh"

namespace kog {

constexpr bool kKvCoded = kKvBits < 16;
constexpr int kCodePairs = 16 / kKvBits;         // pairs of values in a register
constexpr u32 kKvScaleBytes = kKvCoded ? 4 : 0;  // of a position of a head: the scales of its rows of K and V, binary16

// A row's scale, by the largest magnitude in it, which gets the largest code: 7 significant bits, so that rounding a rounded row changes nothing.
__device__ __forceinline__ float row_scale(float largest) {
    const u32 bits = __float_as_uint(largest / kKvMostCode);
    return fminf(fmaxf(__uint_as_float((bits + 0xffffu + (bits >> 17 & 1)) & ~0x1ffffu), kKvLeastScale), kKvMostScale);
}

// The codes of two neighbouring values, in the lower half.
__device__ __forceinline__ u32 encode_pair(float low, float high, float inverse_scale) {
    return pack_e4m3(low * inverse_scale, high * inverse_scale);
}
// Pair `k` of the values of some registers, without their scale.
template <int kRegisters>
__device__ __forceinline__ u32 expand_pair(const u32 (&codes)[kRegisters], int k) {
    if constexpr (kKvBits == 16) return codes[k];
    else return expand_e4m3(codes[k / 2], k % 2);
}

// Four neighbouring values of a row, whose scale is given: their codes; what these stand for, in binary16.
__device__ __forceinline__ u32 encode_four(const float4& value, float scale) {
    const float inverse = 1.0f / scale;
    return encode_pair(value.x, value.y, inverse) | encode_pair(value.z, value.w, inverse) << 16;
}
__device__ __forceinline__ uint2 decode_four(u32 codes, float scale) {
    const u32 first = expand_e4m3(codes), second = expand_e4m3(codes, true);
    return {Fp16::pack(Fp16::low(first) * scale, Fp16::high(first) * scale), Fp16::pack(Fp16::low(second) * scale, Fp16::high(second) * scale)};
}
// The scale of a row of `kThreads` neighbouring threads with four values each. All threads of the warp call it.
template <u32 kThreads>
__device__ __forceinline__ float shared_scale(const float4& value) {
    static_assert(!kKvCoded || (kThreads <= 32 && (kThreads & (kThreads - 1)) == 0), "the threads of a row are in one warp");
    float largest = fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w)));
#pragma unroll
    for (u32 offset = 1; offset < kThreads; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    return row_scale(largest);
}

}  // namespace kog
