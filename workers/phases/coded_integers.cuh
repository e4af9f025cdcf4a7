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

    static constexpr int kParts = DigitX::kParts, kProducts = kParts == 1 ? 2 : 1;
    static constexpr u32 kLower = 0x0f0f0f0fu;
    static constexpr u32 kZeros = kCodeZeroBytes > 0 ? 0x11111111u : 0x88888888u;  // codes of 1, to be multiplied by a zero point, or of 0
    static __device__ __forceinline__ u32 word(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

private:
    static __device__ __forceinline__ float whole(const int (&sums)[4]) { return static_cast<float>(sums[0] * 16 + sums[3]); }
};

// Of several tokens. Rows of two groups are the upper and the lower ones of A, lower integers and then whole words; two tokens' digits share the
// columns of B. So a thread has sums of one digit of both tokens, of both groups.
struct IntegerTokenSums {
    static constexpr int kPairs = (kTokens + 1) / 2;  // of tokens
    float scaled[kRowGroups][kPairs][2] = {};

    // The vector's x begins at `x_address`.
    __device__ __forceinline__ void weigh(u32 lane, u32 x_address) {
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            const float weight = DigitX::weight(lane, x_address + DigitX::of_token(token)) * kCodeFactor;
#pragma unroll
            for (int group = 0; group < kRowGroups; ++group) scaled[group][token / 2][token % 2] *= weight;
        }
    }
    // Of token `lane` % kTokens: its digits', in the order of a single token's. Called by a full warp.
    __device__ __forceinline__ float row_sum(u32 lane, int group) const {
        const float(&first)[2] = scaled[group][0], (&last)[2] = scaled[group][kPairs - 1];
        const bool is_upper = kPairs == 2 && (lane & 2), is_odd = lane & 1;
        float sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] = (is_upper ? last[i] : first[i]) + __shfl_xor_sync(kFullWarp, is_upper || kPairs == 1 ? first[i] : last[i], 2);
        return (is_odd ? sums[1] : sums[0]) + __shfl_xor_sync(kFullWarp, is_odd ? sums[0] : sums[1], 1);
    }

    // See IntegerSums. Each word of codes is read and taken apart once for all tokens.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        uint4 codes[kGroups], x[kPairs][2];
        u32 loaded = 0, scales[kGroups][4], zeros[kGroups][4];
        const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
            for (int half = 0; half < 2; ++half) load_shared(x_address + pair * DigitX::kPairBytes + half * DigitX::kHalfBytes, x[pair][half]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const u32 row = group * 8 + (lane >> 2);
            load_shared(at + group * 512, codes[group]);
            loaded |= codes[group].x;
            if constexpr (kCodeScales > 0) load_bytes<kCodeScaleBytes>(first + row * kCodeScaleBytes, scales[group]), loaded |= scales[group][0];
            if constexpr (kCodeZeroBytes > 0)
                load_bytes<kCodeZeroBytes>(first + kRows * kCodeScaleBytes + row * kCodeZeroBytes, zeros[group]), loaded |= zeros[group][0];
        }
        free(loaded);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            int of_zero[kPairs][4] = {};
#pragma unroll
            for (int i = 0; i < kProducts; ++i) add_zero(of_zero, x, part, i);
#pragma unroll
            for (int group = 0; group < kGroups; group += 2) {
                const bool has_lower = group + 1 < kGroups;
                int sums[kPairs][4] = {};
#pragma unroll
                for (int i = 0; i < kProducts; ++i) {  // each of a word and the one kProducts behind
                    const int at = kParts == 4 ? part : 2 * part + i;
                    const u32 q = word(codes[group], at), next = kParts == 4 ? 0 : word(codes[group], at + kProducts);
                    const u32 lower_q = has_lower ? word(codes[group + has_lower], at) : 0;
                    const u32 lower_next = has_lower && kParts < 4 ? word(codes[group + has_lower], at + kProducts) : 0;
                    add_products(sums, {q, lower_q, next, lower_next}, x, part, i);
                }
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
                    for (int k = 0; k < 4 && group + k / 2 < kGroups; ++k) {
                        const int row_group = group + k / 2, token = k % 2;
                        int less = of_zero[pair][token];
                        if constexpr (kCodeZeroBytes > 0) less *= static_cast<int>(zeros[row_group][0] >> 8 * part & 0xff);
                        const float sum = static_cast<float>(sums[pair][k] - less);
                        float& to = scaled[row_group][pair][token];
                        if constexpr (kCodeScales > 0) to = __fmaf_rn(Scale::get(scales[row_group], part), sum, to);
                        else to += sum;
                    }
            }
        }
    }

private:
    static constexpr int kParts = DigitX::kParts, kProducts = IntegerSums::kProducts;
    static constexpr u32 kLower = IntegerSums::kLower, kZeros = IntegerSums::kZeros;
    static __device__ __forceinline__ u32 word(const uint4& words, int i) { return IntegerSums::word(words, i); }
    // Operands of the matrix unit number `i` of a part's columns.
    static constexpr bool kIsSigned = kCodeZeroBytes == 0;  // a code of 8 is 0
    static constexpr u32 kTops = 0x80808080u;
    static __device__ __forceinline__ void multiply(int (&sums)[4], const u32 (&a)[4], const uint4& x, int part, int i) {
        const u32 x0 = word(x, kParts == 4 ? part : 2 * (part + i)), x1 = kParts == 4 ? 0 : word(x, 2 * (part + i) + 1);
        if constexpr (kIsSigned) mma_signed_bytes(sums, a[0], a[1], a[2], a[3], x0, x1);
        else mma_bytes(sums, a[0], a[1], a[2], a[3], x0, x1);
    }
    // A step's products number `i` of a part, of all tokens: 16 times the lower integers of words of two groups of rows, by the digits of first
    // columns, and the whole words by those of second ones. With the top bit of a byte turned over 16 times a code of 8 is 0, and a whole word only
    // too much by 8.
    static __device__ __forceinline__ void add_products(int (&sums)[kPairs][4], const u32 (&q)[4], const uint4 (&x)[kPairs][2], int part, int i) {
        u32 lower[4], whole[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            lower[k] = (q[k] & kLower) << 4, whole[k] = q[k];
            if constexpr (kIsSigned) lower[k] ^= kTops, whole[k] ^= kTops;
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) multiply(sums[pair], lower, x[pair][0], part, i);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) multiply(sums[pair], whole, x[pair][1], part, i);
    }
    // The same of codes of 0, or of zero points of 1.
    static __device__ __forceinline__ void add_zero(int (&sums)[kPairs][4], const uint4 (&x)[kPairs][2], int part, int i) {
        if constexpr (kIsSigned) {
            constexpr u32 kEight = 0x08080808u;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) multiply(sums[pair], {kEight, kEight, kEight, kEight}, x[pair][1], part, i);
        } else {
            add_products(sums, {kZeros, kZeros, kZeros, kZeros}, x, part, i);
        }
    }
};

}  // namespace kog
#endif
