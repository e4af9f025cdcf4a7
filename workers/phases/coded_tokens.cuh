// Products with several tokens: sums of 16-bit weights, of codes that become 16-bit numbers, and of the LM head in integers of 8 bits. An
// operand of codes is taken apart once for all tokens.
#pragma once
#include "coded_eight.cuh"
#include "coded_head.cuh"

namespace kog {

// For each two groups of eight rows: of the first halves of the columns and of the second ones, columns are tokens' high and low parts in turn.
// So a thread has one token's sums, and adds its four parts up in the order of a single token's.
struct TokenSums {
    float of[(kRowGroups + 1) / 2][2][4] = {};

    // Of the first half of the columns, or the second one.
    __device__ __forceinline__ float half(int group, int i) const {
        const float(&sums)[4] = of[group / 2][i];
        return sums[2 * (group & 1)] + sums[2 * (group & 1) + 1];
    }
    __device__ __forceinline__ float row_sum(u32, int group) const { return half(group, 0) + half(group, 1); }

    // Rows of two groups are the upper and the lower ones of A, first halves of their columns and then the second ones. Registers of a group's
    // rows as a single token's operand has them.
    template <class Format>
    __device__ __forceinline__ void add(int pair, const u32 (&upper)[4], const u32 (&lower)[4], const uint4& x) {
        Format::mma(of[pair][0], upper[0], lower[0], upper[2], lower[2], x.x, x.y);
        Format::mma(of[pair][1], upper[1], lower[1], upper[3], lower[3], x.z, x.w);
    }
    // The same of kGroups groups, of which `expand(group, registers)` has the registers.
    template <class Format, int kGroups, class Expand>
    __device__ __forceinline__ void add_groups(const uint4& x, Expand expand) {
#pragma unroll
        for (int group = 0; group < kGroups; group += 2) {
            u32 upper[4], lower[4] = {};
            expand(group, upper);
            if (group + 1 < kGroups) expand(group + 1, lower);
            add<Format>(group / 2, upper, lower, x);
        }
    }
};

#if defined(KOG_CODE) && !defined(KOG_INTEGERS)
// Of codes that are floats: EightBitSums and FourBitSums of several tokens. With scales on the tape `scaled` has the sums of both halves of the
// columns, each added up in the order of a single token's.
struct FloatTokenSums {
    TokenSums sums;
    float scaled[kRowGroups][2] = {};

    __device__ __forceinline__ float row_sum(u32, int group) const {
        const float first = kCodeScales > 0 ? scaled[group][0] : sums.half(group, 0), second = kCodeScales > 0 ? scaled[group][1] : sums.half(group, 1);
        return first * kCodeFactor + second * kCodeFactor;
    }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). `free` is called with what
    // depends on all codes and scales that were read: of four bits before the first product.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        u32 loaded = 0, scales[kGroups][4];
        if constexpr (kCodeScales > 0) {
            const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                load_bytes<kCodeScaleBytes>(first + (group * 8 + (lane >> 2)) * kCodeScaleBytes, scales[group]);
                loaded |= scales[group][0];
            }
        }
        if constexpr (kCodeScales == 1 && kLoads > 1) {  // unrolled, this would need more registers than there are
            sums = {};
#pragma unroll 1
            for (int load = 0; load < kLoads; ++load) add_load<kGroups, kRows>(at, x_address, load, scales, loaded, free);
            end_group<kGroups>(0, scales);
        } else {
#pragma unroll
            for (int load = 0; load < kLoads; ++load) add_load<kGroups, kRows>(at, x_address, load, scales, loaded, free);
        }
        if constexpr (kLoads > 1) free(loaded);
    }

private:
    static constexpr int kOperandsOfScale = kCodeScales > 0 ? kOperands / kCodeScales : kOperands;
    static constexpr bool kEndsGroups = kCodeScales > 1 || (kCodeScales == 1 && kLoads == 1);
    // What 16 bytes of each thread and row add.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add_load(u32 at, u32 x_address, int load, const u32 (&scales)[kGroups][4], u32& loaded, Free free) {
        uint4 x[kOperandsOfLoad], codes[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) load_shared(at + load * kRows * 64 + group * 512, codes[group]);
#pragma unroll
        for (int i = 0; i < kOperandsOfLoad; ++i) load_shared(x_address + (load * kOperandsOfLoad + i) * kXStepBytes, x[i]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) loaded |= codes[group].x;
        if constexpr (kLoads == 1) free(loaded);
#pragma unroll
        for (int i = 0; i < kOperandsOfLoad; ++i) {
            const int operand = load * kOperandsOfLoad + i;
            if (kEndsGroups && operand % kOperandsOfScale == 0) sums = {};
            sums.template add_groups<CodeFormat, kGroups>(x[i], [&](int group, u32(&a)[4]) {
                const u32 all[4] = {codes[group].x, codes[group].y, codes[group].z, codes[group].w};
                u32 q[Code::kWords];
#pragma unroll
                for (int k = 0; k < Code::kWords; ++k) q[k] = all[i * Code::kWords + k];
                Code::expand(q, a);
            });
            if (kEndsGroups && operand % kOperandsOfScale == kOperandsOfScale - 1) end_group<kGroups>(operand / kOperandsOfScale, scales);
        }
    }
    template <int kGroups>
    __device__ __forceinline__ void end_group(int i, const u32 (&scales)[kGroups][4]) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float scale = Scale::get(scales[group], i);
#pragma unroll
            for (int half = 0; half < 2; ++half) scaled[group][half] = __fmaf_rn(sums.half(group, half), scale, scaled[group][half]);
        }
    }
};
#endif

#ifdef KOG_HEAD_FORMAT
// HeadSums of several tokens.
struct HeadTokenSums {
    TokenSums sums;

    __device__ __forceinline__ float row_sum(u32 lane, int group) const { return sums.row_sum(lane, group); }

    // See HeadSums; `free` is called with what depends on all codes that were read.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32, u32 at, u32 x_address, Free free) {
        uint4 x[HeadWeights::kXSteps], codes[kGroups];
        u32 loaded = 0;
#pragma unroll
        for (int i = 0; i < HeadWeights::kXSteps; ++i) load_shared(x_address + i * kXStepBytes, x[i]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            load_shared(at + group * 512, codes[group]);
            loaded |= codes[group].x;
        }
#pragma unroll
        for (int i = 0; i < HeadWeights::kXSteps; ++i)
            sums.template add_groups<HeadWeights::Format, kGroups>(x[i], [&](int group, u32(&a)[4]) {
                const u32 first = i == 0 ? codes[group].x : codes[group].z, second = i == 0 ? codes[group].y : codes[group].w;
                a[0] = expand_int8(first), a[1] = expand_int8(first, true), a[2] = expand_int8(second), a[3] = expand_int8(second, true);
            });
        free(loaded);
    }
};
#endif

}  // namespace kog
