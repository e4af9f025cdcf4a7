// Quantised weights: how a thread's codes become pairs of 16-bit numbers for the matrix unit, which multiplies them exactly, and how
// sums are scaled. How bits lie in a word is defined in kog_dist/decode/coded_packing.py. What the matrix unit sees of a code is its value
// times a power of two: kCodeFactor undoes that and x's kCodedXScale. Sums of floats are in coded_eight.cuh and coded_four.cuh, by the bits
// of a code; integers stay what they are (coded_integers.cuh).
#pragma once
#include "layout.cuh"
#include "number_bits.cuh"

#ifdef KOG_CODE
namespace kog {

// FP8: sign, four bits of exponent, three of significand; as binary16.
struct E4m3 {
    static constexpr int kWords = 2;  // of a thread, for one operand
    static __device__ __forceinline__ void expand(const u32 (&q)[2], u32 (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) a[2 * i] = expand_e4m3(q[i]), a[2 * i + 1] = expand_e4m3(q[i], true);
    }
};
// FP4: sign, two bits of exponent, one of significand; as bfloat16, whose subnormal numbers are the subnormal ones.
struct E2m1 {
    static constexpr int kWords = 1;
    static __device__ __forceinline__ void expand(const u32 (&q)[1], u32 (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = e2m1_pair(q[0], i);
    }
};
// Integers of four bits.
struct Int4 {
    static constexpr int kWords = 1;
};
using Code = KOG_CODE;
using CodeFormat = KOG_CODE_FORMAT;
constexpr int kOperands = 4;             // of a step: of eight rows and 32 columns
constexpr int kLoads = Code::kWords;     // of 16 bytes, of a thread for a step of eight rows
constexpr int kOperandsOfLoad = kOperands / kLoads;
static_assert(kLoads * 64 == CodedWeights::kRowBytes, "codes of a row of a step");

// Scales of a row of a step, as read from shared memory; `get<i>` of the words that hold them.
struct Float32Scale {
    static __device__ __forceinline__ float get(const u32 (&words)[4], int i) { return __uint_as_float(words[i]); }
};
struct Bf16Scale {
    static __device__ __forceinline__ float get(const u32 (&words)[4], int i) {
        return i & 1 ? Bf16::high(words[i / 2]) : Bf16::low(words[i / 2]);
    }
};
struct Fp16Scale {
    static __device__ __forceinline__ float get(const u32 (&words)[4], int i) {
        return i & 1 ? Fp16::high(words[i / 2]) : Fp16::low(words[i / 2]);
    }
};
struct E8m0Scale {
    static __device__ __forceinline__ float get(const u32 (&words)[4], int i) { return __uint_as_float((words[0] >> 8 * i & 0xff) << 23); }
};
using Scale = KOG_SCALE;

// kBytes of shared memory, a power of two, into the words that hold them.
template <int kBytes>
__device__ __forceinline__ void load_bytes(u32 address, u32 (&words)[4]) {
    if constexpr (kBytes == 1) words[0] = load_shared_u8(address);
    if constexpr (kBytes == 2) words[0] = load_shared_u16(address);
    if constexpr (kBytes == 4) words[0] = load_shared_u32(address);
    if constexpr (kBytes == 8) {
        uint2 v;
        load_shared(address, v);
        words[0] = v.x, words[1] = v.y;
    }
    if constexpr (kBytes == 16) {
        uint4 v;
        load_shared(address, v);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}

__device__ __forceinline__ void clear(float (&sum)[4]) { sum[0] = 0, sum[1] = 0, sum[2] = 0, sum[3] = 0; }
// Of an mma's results the sum that belongs to this thread's row: of its first columns or, in odd threads, of its second ones. Threads behind
// the second of a row have none, or those of another group of rows.
__device__ __forceinline__ float own_sum(u32 lane, const float (&sum)[4]) { return (lane & 1) ? sum[2] + sum[3] : sum[0] + sum[1]; }

}  // namespace kog
#endif
