// Codes of four bits: their products, scaled. All that a tile has for a thread is read at once, and the tile given back, before the first
// product: with two matrix warps for each scheduler nothing else hides the way from shared memory.
//
// x of a step lies otherwise than for 16-bit weights (`LayerX`): of the matrix unit's columns the first two have its high parts, of the
// first halves of the columns and of the second ones, the next two its low parts. So of a thread's four results the first and the last
// are of use, whatever the thread.
#pragma once
#include "coded.cuh"

#ifdef KOG_CODE
namespace kog {

// What is to be added to products with integers for a scale's columns of x: less their sums with n = 8, which stands for 0, or with zero
// points those with n = 0, and the sums of x / 16, times which a zero point is taken off. Of a thread's own sums, as above.
struct Corrections {
    static constexpr int kParts = kCodeScales > 0 ? kCodeScales : 1, kOperandsOfPart = kOperands / kParts;
    static constexpr bool kHasZeros = kCodeZeroBytes > 0;
    static constexpr u32 kOne = kHasZeros ? 0xbc00bc00u : 0xbe00be00u, kSixteen = kHasZeros ? 0xcc00cc00u : 0xcc20cc20u;  // -1 or -1.5, -16 or -16.5
    static constexpr u32 kSixteenth = 0x2c002c00u;
    float offset[kParts], x[kHasZeros ? kParts : 1];

    __device__ __forceinline__ void find(const uint2 (&pairs)[kOperands]) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float sum[4] = {}, sum_of_x[4] = {};
#pragma unroll
            for (int i = part * kOperandsOfPart; i < (part + 1) * kOperandsOfPart; ++i) {
                CodeFormat::mma(sum, kOne, kSixteen, kOne, kSixteen, pairs[i].x, pairs[i].y);
                if constexpr (kHasZeros) CodeFormat::mma(sum_of_x, kSixteenth, kSixteenth, kSixteenth, kSixteenth, pairs[i].x, pairs[i].y);
            }
            offset[part] = sum[0] + sum[3];
            if constexpr (kHasZeros) x[part] = sum_of_x[0] + sum_of_x[3];
        }
    }
    // Kept in shared memory: of a step kCodeXSums pairs, for the two threads of a row that have sums of their own.
    __device__ __forceinline__ void store(u32 lane, u32 at) const {
        if (lane >= 2) return;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            store_shared(at + part * 8 + lane * 4, offset[part]);
            if constexpr (kHasZeros) store_shared(at + (kParts + part) * 8 + lane * 4, x[part]);
        }
    }
    __device__ __forceinline__ void load(u32 lane, u32 at) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            offset[part] = load_shared_f32(at + part * 8 + (lane & 1) * 4);
            if constexpr (kHasZeros) x[part] = load_shared_f32(at + (kParts + part) * 8 + (lane & 1) * 4);
        }
    }
};

// Partial sums of a block of rows in a thread of a matrix warp. With scales on the tape `scaled` has them, of this thread's columns; else
// `sums` as the matrix unit leaves them, and `offset` what is to be added.
struct FourBitSums {
    float sums[kRowGroups][4] = {};
    float scaled[kRowGroups] = {};
    float offset = 0;

    __device__ __forceinline__ float part(u32, int group) const {
        return (kCodeScales > 0 ? scaled[group] : sums[group][0] + sums[group][3] + offset) * kCodeFactor;
    }

    // A warp's part of a tile, which begins at `at` (for this thread: 16 bytes for each thread in front of it). `free` is called with what
    // depends on all that was read of it. `kKeepsX`: corrections lie at `kept`, or if they are not `known` are to be kept there.
    template <int kGroups, int kRows, bool kKeepsX, class Free>
    __device__ __forceinline__ void add(u32 lane, u32 at, u32 x_address, u32 kept, bool known, Free free) {
        uint2 x[kOperands];
        uint4 codes[kGroups];
        u32 loaded = 0, scales[kGroups][4], zeros[kGroups][4];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) load_shared(at + group * 512, codes[group]);
        const u32 first = at - lane * 16 + kRows * CodedWeights::kRowBytes;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const u32 row = group * 8 + (lane >> 2);
            loaded |= codes[group].x;
            if constexpr (kCodeScales > 0) {
                load_bytes<kCodeScaleBytes>(first + row * kCodeScaleBytes, scales[group]);
                loaded |= scales[group][0];
            }
            if constexpr (kCodeZeroBytes > 0) {
                load_bytes<kCodeZeroBytes>(first + kRows * kCodeScaleBytes + row * kCodeZeroBytes, zeros[group]);
                loaded |= zeros[group][0];
            }
        }
        free(loaded);
#pragma unroll
        for (int i = 0; i < kOperands; ++i) load_shared(x_address + i * 128, x[i]);
        Corrections corrections;
        if constexpr (Code::kHasOffset) {
            if (kKeepsX && known) {
                corrections.load(lane, kept);
            } else {
                corrections.find(x);
                if constexpr (kKeepsX) corrections.store(lane, kept);
            }
            if constexpr (kCodeScales == 0) offset += corrections.offset[0];
        }
        const Offsets offsets{opaque(kOnes), opaque(kSixteens)};
        constexpr bool kBegins = Code::kHasOffset && kKeepsX;  // sums begin with corrections; else products would wait for these
#pragma unroll
        for (int i = 0; i < kOperands; ++i) {
            const int part = i / Corrections::kOperandsOfPart;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                if (kCodeScales > 0 && i % Corrections::kOperandsOfPart == 0) begin(sums[group], kBegins ? corrections.offset[part] : 0.0f);
                const u32 words[4] = {codes[group].x, codes[group].y, codes[group].z, codes[group].w}, q[Code::kWords] = {words[i]};
                u32 a[4];
                Code::expand(q, a, offsets);
                CodeFormat::mma(sums[group], a[0], a[1], a[2], a[3], x[i].x, x[i].y);
                if (kCodeScales > 0 && i % Corrections::kOperandsOfPart == Corrections::kOperandsOfPart - 1) {
                    float sum = sums[group][0] + sums[group][3];
                    if constexpr (Code::kHasOffset && !kBegins) sum += corrections.offset[part];
                    if constexpr (kCodeZeroBytes > 0) sum -= static_cast<float>(zeros[group][0] >> 8 * part & 0xff) * corrections.x[part];
                    scaled[group] += Scale::get(scales[group], part) * sum;
                }
            }
        }
    }

private:
    static __device__ __forceinline__ void begin(float (&sum)[4], float value) { sum[0] = value, sum[1] = 0, sum[2] = 0, sum[3] = 0; }
};

}  // namespace kog
#endif
