// Quantised weights: how a thread's codes become pairs of 16-bit numbers for the matrix unit, which multiplies them exactly, and how
// sums are scaled. How bits lie in a word is defined in kog_dist/decode/coded_packing.py. What the matrix unit sees of a code is its value
// times a power of two (kCodeFactor undoes that and x's kCodedXScale), and of an integer that much above a constant.
// Sums are in coded_eight.cuh and coded_four.cuh, by the bits of a code.
#pragma once
#include "layout.cuh"
#include "number_bits.cuh"

#ifdef KOG_CODE
namespace kog {

__device__ __forceinline__ u32 rotated_right(u32 value, u32 bits) { return value >> bits | value << (32 - bits); }

// Pairs of binary16 that integers are put on, in registers: constants of an instruction besides its mask would be another one.
struct Offsets {
    u32 one, sixteen;
};
// FP8: sign, four bits of exponent, three of significand; as binary16.
struct E4m3 {
    static constexpr int kWords = 2;  // of a thread, for one operand
    static constexpr bool kHasOffset = false;
    static __device__ __forceinline__ void expand(const u32 (&q)[2], u32 (&a)[4], const Offsets&) {
#pragma unroll
        for (int i = 0; i < 2; ++i) a[2 * i] = expand_e4m3(q[i]), a[2 * i + 1] = expand_e4m3(q[i], true);
    }
};
// FP4: sign, two bits of exponent, one of significand; as bfloat16, whose subnormal numbers are the subnormal ones.
struct E2m1 {
    static constexpr int kWords = 1;
    static constexpr bool kHasOffset = false;
    static __device__ __forceinline__ void expand(const u32 (&q)[1], u32 (&a)[4], const Offsets&) {
        constexpr u32 kMask = kE2m1Signs | kE2m1Magnitudes;
        a[0] = q[0] & kMask, a[1] = q[0] << 3 & kMask, a[2] = q[0] << 6 & kMask, a[3] = last_e2m1_pair(q[0]);
    }
};
// Integers n of four bits: as binary16, 1 + n / 16 in the first and third register, 16 + n / 16 in the others. So one rotation is enough:
// the significand has room for two integers. Products with the same numbers of n = 0 take off what is too much.
struct Int4 {
    static constexpr int kWords = 1;
    static constexpr bool kHasOffset = true;
    static __device__ __forceinline__ void expand(const u32 (&q)[1], u32 (&a)[4], const Offsets& of) {
        const u32 rotated = rotated_right(q[0], 8);
        a[0] = masked_or<0x03c003c0u>(q[0], of.one), a[1] = masked_or<0x003c003cu>(q[0], of.sixteen);
        a[2] = masked_or<0x03c003c0u>(rotated, of.one), a[3] = masked_or<0x003c003cu>(rotated, of.sixteen);
    }
};
using Code = KOG_CODE;
using CodeFormat = KOG_CODE_FORMAT;
constexpr u32 kOnes = 0x3c003c00u, kSixteens = 0x4c004c00u;    // two of binary16
constexpr u32 kEights = 0x3e003e00u, kOtherEights = 0x4c204c20u;  // n = 8, which stands for 0 where there are no zero points
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
// Of an mma's results the sum that belongs to this thread's row; threads behind the second of a row have none.
__device__ __forceinline__ float own_sum(u32 lane, const float (&sum)[4]) { return (lane & 1) ? sum[2] + sum[3] : sum[0] + sum[1]; }

}  // namespace kog
#endif
