// x for products with integers. All columns of a vector that a matrix warp has are whole numbers of 23 bits times one weight: the largest
// magnitude says which. The matrix unit multiplies bytes, so x has three digits of 8 bits. A byte of weights has two integers of four bits,
// of columns 2k and 2k + 1. Taken as it is, it is 16 times the second one, and the first one above that, which is too much by the first one
// times x of the second column. So x of the first columns has a sixteenth of the second ones' less.
//
// A step of x, 128 columns, has 512 bytes, of which each thread of a matrix warp reads 16: as the columns of B, of each digit the first
// columns and the second ones, 64 bytes each. In place of the last two columns of B, whose products nobody wants, the first step of a vector
// has what each thread of a row multiplies its sums by.
//
// Of several tokens two share the columns of B: first columns of their digits in turn, and behind 512 bytes the second ones. Behind 1024 bytes
// are those of the next two.
#pragma once
#include "layout.cuh"

namespace kog {

#ifdef KOG_INTEGERS
struct DigitX {
    static constexpr bool kIsInteger = true;
    static constexpr u32 kStepBytes = 512 * kTokens, kDigits = 3, kDigitBytes = 128, kWeights = kDigits * kDigitBytes;
    static constexpr u32 kHalfBytes = kTokens == 1 ? kDigitBytes / 2 : 512, kPairBytes = 1024;  // from first columns to second ones; of two tokens
    static constexpr u32 kParts = kCodeScales > 0 ? kCodeScales : 1;  // of a step's columns, with scales of their own

    // Where x of a token begins, or what its sums are multiplied by, from where that of the first one does.
    static __device__ __forceinline__ constexpr u32 of_token(u32 token) { return token / 2 * kPairBytes + token % 2 * (kDigitBytes / 2); }
    // Steps of a full warp's vectors of a token, one behind the other from `at` on: of each thread four neighbouring columns of each step.
    template <int kStepsOfVector, int kSteps>
    static __device__ __forceinline__ void write(u32 lane, u32 at, const float4 (&v)[kSteps]) {
        static_assert(kSteps % kStepsOfVector == 0, "whole vectors");
        const u32 operand = lane >> 3, place = kParts > 1 ? operand : (operand & 1) * 2 + (operand >> 1);
        const u32 word = at + (lane >> 1 & 3) * 16 + place * 4 + (lane & 1) * 2;
#pragma unroll
        for (int first = 0; first < kSteps; first += kStepsOfVector) {
            float most = 0;
#pragma unroll
            for (int i = first; i < first + kStepsOfVector; ++i)
                most = max_magnitude(most, max_magnitude(max_magnitude(v[i].x, v[i].y), max_magnitude(v[i].z, v[i].w)));
            const u32 exponent = max(__reduce_max_sync(kFullWarp, __float_as_uint(most)) >> 23, kLeastExponent);
            const float scale = __uint_as_float(kScaleBits - (exponent << 23));
#pragma unroll
            for (int i = first; i < first + kStepsOfVector; ++i) {
                store(word + i * kStepBytes, less_sixteenth(v[i].x, v[i].y), less_sixteenth(v[i].z, v[i].w), scale);
                store(word + i * kStepBytes + kHalfBytes, v[i].y, v[i].w, scale);
            }
            // Sums with what is no number are none; the fourth thread has none of its own.
            const u32 weight = exponent == 255 ? 0x7fffffffu : ((exponent + 8 * lane) << 23) - kWeightBits;
            if (lane <= kDigits) store_shared(at + first * kStepBytes + kWeights + lane * 4, lane == kDigits ? 0 : weight);
        }
    }
    // What sums with a vector of this thread are to be multiplied by; its x (16 bytes for each thread in front of it) begins at `at`.
    static __device__ __forceinline__ float weight(u32 lane, u32 at) { return load_shared_f32(at - lane * 16 + kWeights + (lane & 3) * 4); }

private:
    // By the exponent of the largest magnitude: 15/16 * 2^(148 - exponent), so that numbers stay below 2^22 with a sixteenth of another one;
    // less the first digit's weight, a sixteenth (of what integers count) of what undoes that.
    static constexpr u32 kScaleBits = (274u << 23) + 0x700000u, kWeightBits = (25u << 23) - 0x088889u;
    static constexpr u32 kLeastExponent = 40;  // so that no weight is a subnormal number
    static __device__ __forceinline__ float less_sixteenth(float first, float second) { return __fmaf_rn(second, -0.0625f, first); }
    // The digits of two numbers times `scale`, rounded to whole ones. Added to 1.5 * 2^23 they are the last bits; bytes of these and 128 of each
    // digit are the digits and 128.
    static __device__ __forceinline__ void store(u32 at, float first, float second, float scale) {
        const u32 a = __float_as_uint(__fmaf_rn(first, scale, 12582912.0f)) + kToDigits, b = __float_as_uint(__fmaf_rn(second, scale, 12582912.0f)) + kToDigits;
        const u32 lower = __byte_perm(a, b, 0x5140) ^ 0x80808080u, upper = __byte_perm(a, b, 0x0062) ^ 0x8080u;
        store_shared(at, static_cast<u16>(lower)), store_shared(at + kDigitBytes, static_cast<u16>(lower >> 16));
        store_shared(at + 2 * kDigitBytes, static_cast<u16>(upper));
    }
    static constexpr u32 kToDigits = 0x00808080u - 0x4b400000u;
};
#endif

}  // namespace kog
