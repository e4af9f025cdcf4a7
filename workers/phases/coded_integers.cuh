// Integers of four bits: their products with the digits of x (x_digits.cuh), scaled. A word of eight codes is two operands of the matrix unit:
// itself, and its lower integers. All that a tile has for a thread is read at once, and the tile given back, before the first product.
#pragma once
#include "coded.cuh"
#include "x_digits.cuh"

#ifdef KOG_INTEGERS
namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp: of one digit of x, as a whole number until `weigh`.
struct IntegerSums {
    float scaled[kRowGroups] = {};

    __device__ __forceinline__ float part(u32, int group) const { return scaled[group]; }
    // The vector's x begins at `x_address`.
    __device__ __forceinline__ void weigh(u32 lane, u32 x_address) {
        const float weight = DigitX::weight(lane, x_address) * kCodeFactor;
#pragma unroll
        for (int group = 0; group < kRowGroups; ++group) scaled[group] *= weight;
    }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it), with a step of x (likewise).
    // `free` is called with what depends on all codes and scales that were read.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        uint4 codes[kGroups], x;
        u32 loaded = 0, scales[kGroups][4], zeros[kGroups][4];
        const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) load_shared(at + group * 512, codes[group]);
        load_shared(x_address, x);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const u32 row = group * 8 + (lane >> 2);
            if constexpr (kCodeScales > 0) load_bytes<kCodeScaleBytes>(first + row * kCodeScaleBytes, scales[group]);
            if constexpr (kCodeZeroBytes > 0) load_bytes<kCodeZeroBytes>(first + kRows * kCodeScaleBytes + row * kCodeZeroBytes, zeros[group]);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            loaded |= codes[group].x;
            if constexpr (kCodeScales > 0) loaded |= scales[group][0];
            if constexpr (kCodeZeroBytes > 0) loaded |= zeros[group][0];
        }
        free(loaded);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            int sums[kGroups][4] = {}, zero[4] = {};
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {  // each of a word and the one kProducts behind
                const u32 x0 = word(x, kParts == 4 ? part : 2 * (part + i)), x1 = kParts == 4 ? 0 : word(x, 2 * (part + i) + 1);
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    const u32 q = word(codes[group], kParts == 4 ? part : 2 * part + i);
                    const u32 next = kParts == 4 ? 0 : word(codes[group], 2 * part + i + kProducts);
                    mma_bytes(sums[group], q & kLower, q, next & kLower, next, x0, x1);
                }
                mma_bytes(zero, kZeros & kLower, kZeros, kZeros & kLower, kZeros, x0, x1);
            }
            const float of_zero = whole(zero);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                float less = of_zero;
                if constexpr (kCodeZeroBytes > 0) less *= static_cast<float>(zeros[group][0] >> 8 * part & 0xff);
                const float sum = whole(sums[group]) - less;
                if constexpr (kCodeScales > 0) scaled[group] = __fmaf_rn(Scale::get(scales[group], part), sum, scaled[group]);
                else scaled[group] += sum;
            }
        }
    }

private:
    static constexpr int kParts = DigitX::kParts, kProducts = kParts == 1 ? 2 : 1;
    static constexpr u32 kLower = 0x0f0f0f0fu;
    static constexpr u32 kZeros = kCodeZeroBytes > 0 ? 0x11111111u : 0x88888888u;  // codes of 1, to be multiplied by a zero point, or of 0
    static __device__ __forceinline__ u32 word(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }
    static __device__ __forceinline__ float whole(const int (&sums)[4]) { return static_cast<float>(sums[0] * 16 + sums[3]); }
};

}  // namespace kog
#endif
