// Keys and values in less than 16 bits (kog_dist/decode/kv_formats.py defines them): codes, and one scale for a row of a head and each of K and V.
// FP8: a code times its scale is exact in binary16, but for what is smaller than its smallest number. INT4: rows are rotated, keys have codes of six
// bits, values of four; they stand for odd multiples of the scale. Behind a header with `kKvBits`.
#pragma once
#include "ptx.cuh"

namespace kog {

constexpr bool kKvCoded = kKvBits < 16, kKvRotated = kKvBits == 4;
constexpr int kCodePairs = 16 / kKvBits;         // pairs of values in a register
constexpr u32 kKvScaleBytes = kKvCoded ? 4 : 0;  // of a position of a head: the scales of its rows of K and V, binary16

// A row's scale, by the largest magnitude in it, which gets the largest code: 7 significant bits, so that rounding a rounded row changes nothing.
__device__ __forceinline__ float row_scale(float largest, float most_code) {
    const u32 bits = __float_as_uint(largest / most_code);
    const float scale = fminf(fmaxf(__uint_as_float((bits + 0xffffu + (bits >> 17 & 1)) & ~0x1ffffu), kKvLeastScale), kKvMostScale);
    return !kKvRotated || largest < INFINITY ? scale : __uint_as_float(0x7fc00000u);  // a rotated row has a NaN or an infinity everywhere
}
__device__ __forceinline__ float most_code(bool is_key) { return kKvRotated ? (is_key ? kKvMostKey : kKvMostValue) : kKvMostCode; }

// ---- FP8 ----
// The codes of two neighbouring values, in the lower half.
__device__ __forceinline__ u32 encode_pair(float low, float high, float inverse_scale) {
    return pack_e4m3(low * inverse_scale, high * inverse_scale);
}
__device__ __forceinline__ uint2 decode_four(u32 codes, float scale) {
    const u32 first = expand_e4m3(codes), second = expand_e4m3(codes, true);
    return {Fp16::pack(Fp16::low(first) * scale, Fp16::high(first) * scale), Fp16::pack(Fp16::low(second) * scale, Fp16::high(second) * scale)};
}

// ---- INT4 ----
__device__ __forceinline__ u32 encode_steps(float value, float half_inverse, float most) {
    return static_cast<u32>(fminf(fmaxf(rintf(__fadd_rn(__fmul_rn(value, half_inverse), 0.5f * most)), 0.0f), most));
}
// One stage of a Hadamard transform: this thread's value and that of the thread whose number differs in the bits of `mask`.
__device__ __forceinline__ float mixed_with(float own, u32 mask, bool is_second) {
    const float theirs = __shfl_xor_sync(kFullWarp, own, mask);
    return is_second ? theirs - own : own + theirs;
}
__device__ __forceinline__ void mix_pair(float& first, float& second) {
    const float sum = first + second;
    second = first - second, first = sum;
}
// A row of `kThreads` neighbouring threads with four values each, times the Hadamard matrix. All threads of the warp call it.
template <u32 kThreads>
__device__ __forceinline__ float4 rotated_row(float4 v, u32 thread, float factor) {
    mix_pair(v.x, v.y), mix_pair(v.z, v.w), mix_pair(v.x, v.z), mix_pair(v.y, v.w);
#pragma unroll
    for (u32 offset = 1; offset < kThreads; offset *= 2) {
        const bool is_second = thread & offset;
        v.x = mixed_with(v.x, offset, is_second), v.y = mixed_with(v.y, offset, is_second);
        v.z = mixed_with(v.z, offset, is_second), v.w = mixed_with(v.w, offset, is_second);
    }
    return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}

// ---- rows of `kThreads` neighbouring threads with four values each; all threads of the warp make these calls ----
struct CodedFour {
    u32 codes;  // a byte each
    float scale;
};
template <u32 kThreads>
__device__ __forceinline__ CodedFour encode_four(float4 value, bool is_key, u32 thread) {
    static_assert(!kKvCoded || (kThreads <= 32 && (kThreads & (kThreads - 1)) == 0), "the threads of a row are in one warp");
    if constexpr (kKvRotated) value = rotated_row<kThreads>(value, thread, kKvFactorIn);
    float largest = fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w)));
#pragma unroll
    for (u32 offset = 1; offset < kThreads; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    const float most = most_code(is_key), scale = row_scale(largest, most);
    if constexpr (kKvRotated) {
        const float inverse = 0.5f / scale;
        return {encode_steps(value.x, inverse, most) | encode_steps(value.y, inverse, most) << 8 | encode_steps(value.z, inverse, most) << 16 |
                    encode_steps(value.w, inverse, most) << 24, scale};
    } else {
        const float inverse = 1.0f / scale;
        return {encode_pair(value.x, value.y, inverse) | encode_pair(value.z, value.w, inverse) << 16, scale};
    }
}
// What they stand for, in binary16.
template <u32 kThreads>
__device__ __forceinline__ uint2 kept_four(const CodedFour& coded, bool is_key, u32 thread) {
    if constexpr (kKvRotated) {
        const float most = most_code(is_key), scale = coded.scale;
        const auto step = [&](u32 k) { return (2.0f * static_cast<float>(coded.codes >> 8 * k & 0xff) - most) * scale; };
        const float4 kept = rotated_row<kThreads>(float4{step(0), step(1), step(2), step(3)}, thread, kKvFactorOut);
        return {Fp16::pack(kept.x, kept.y), Fp16::pack(kept.z, kept.w)};
    } else {
        return decode_four(coded.codes, coded.scale);
    }
}

}  // namespace kog
