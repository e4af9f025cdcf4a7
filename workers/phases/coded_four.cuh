// Codes of four bits: their products, scaled. All that a tile has for a thread is read at once, and the tile given back, before the first
// product: there are two matrix warps for each scheduler, and little else hides the way from shared memory.
#pragma once
#include "coded.cuh"

#ifdef KOG_CODE
namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp. With scales on the tape `scaled` has them, of this thread's columns; else
// `sums` as the matrix unit leaves them, and `x` what they have too much; with zero points `all_x`, too: the sums of x.
struct FourBitSums {
    float sums[kRowGroups][4] = {};
    float x[4] = {}, all_x[4] = {};
    float scaled[kRowGroups] = {};

    __device__ __forceinline__ float part(u32 lane, int group) const { return own(lane, group) * kCodeFactor; }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). `free` is called with what
    // depends on all codes and scales that were read.
    template <int kGroups, int kRows, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, Free free) {
        Part<kGroups> tile;
        const Offsets offsets{opaque(kOnes), opaque(kSixteens)};
        free(tile.template read<kRows>(lane, at, x_address));
        const Corrections corrections = correct(lane, tile.x, offsets);
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                if (kCodeScales > 0 && i % kOperandsOfScale == 0) clear(sums[group]);
                const uint4& codes = tile.codes[group];
                const u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, q[Code::kWords] = {words[i]};
                u32 a[4];
                Code::expand(q, a, offsets);
                CodeFormat::mma(sums[group], a[0], a[1], a[2], a[3], tile.x[i].x, tile.x[i].y);
                if (kCodeScales > 1 && i % kOperandsOfScale == kOperandsOfScale - 1) scale(lane, tile, group, i / kOperandsOfScale, corrections);
            }
        }
        if constexpr (kCodeScales == 1) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) scale(lane, tile, group, 0, corrections);
        }
    }

private:
    static constexpr int kParts = kCodeScales > 0 ? kCodeScales : 1, kOperandsOfScale = kOperands / kParts;  // columns with scales of their own

    template <int kGroups>
    struct Part {
        uint4 codes[kGroups];
        uint2 x[kOperands];
        u32 scales[kGroups][4], zeros[kGroups][4];

        template <int kRows>
        __device__ __forceinline__ u32 read(u32 lane, u32 at, u32 x_address) {
            const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
            u32 loaded = 0;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) load_shared(at + group * 512, codes[group]);
#pragma unroll
            for (int i = 0; i < kOperands; ++i) load_shared(x_address + i * 128, x[i]);
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
            return loaded;
        }
    };

    // For each scale what products with integers have too much, and the sum of x / 16, of which a zero point is taken off as many times.
    struct Corrections {
        float x[kParts] = {}, sixteenth[kParts] = {};
    };
    __device__ __forceinline__ Corrections correct(u32 lane, const uint2 (&pairs)[kOperands], const Offsets& of) {
        Corrections found;
        if constexpr (!Code::kHasOffset) return found;
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
            if (kCodeScales > 0 && i % kOperandsOfScale == 0) clear(x), clear(all_x);
            if constexpr (kCodeZeroBytes > 0) {
                CodeFormat::mma(x, of.one, of.sixteen, of.one, of.sixteen, pairs[i].x, pairs[i].y);
                CodeFormat::mma(all_x, of.one, of.one, of.one, of.one, pairs[i].x, pairs[i].y);
            } else {
                CodeFormat::mma(x, kEights, kOtherEights, kEights, kOtherEights, pairs[i].x, pairs[i].y);
            }
            if (i % kOperandsOfScale == kOperandsOfScale - 1) {
                found.x[i / kOperandsOfScale] = own_sum(lane, x);
                if constexpr (kCodeZeroBytes > 0) found.sixteenth[i / kOperandsOfScale] = own_sum(lane, all_x) * 0.0625f;
            }
        }
        return found;
    }

    __device__ __forceinline__ float own(u32 lane, int group) const {
        if constexpr (kCodeScales > 0) return scaled[group];
        const float sum = own_sum(lane, sums[group]);
        return Code::kHasOffset ? sum - own_sum(lane, x) : sum;
    }
    template <int kGroups>
    __device__ __forceinline__ void scale(u32 lane, const Part<kGroups>& tile, int group, int i, const Corrections& corrections) {
        float sum = own_sum(lane, sums[group]);
        if constexpr (Code::kHasOffset) sum -= corrections.x[i];
        if constexpr (kCodeZeroBytes > 0) sum -= static_cast<float>(tile.zeros[group][0] >> 8 * i & 0xff) * corrections.sixteenth[i];
        scaled[group] += Scale::get(tile.scales[group], i) * sum;
    }
};

}  // namespace kog
#endif
