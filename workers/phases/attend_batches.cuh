// Softmax over the batches of a warp, and the products with their keys and values.
#pragma once
#include "attend_query.cuh"

namespace kog {

// What products of keys and the query are added up in.
template <bool kIntegers>
struct ScoreSum {
    using Type = float;
};
template <>
struct ScoreSum<true> {
    using Type = int;
};

struct BatchMixer : QueryReader {
    // Softmax over a warp's rows so far: the largest score and the sum of weights of the thread's rows for one head, and outputs.
    struct Mixed {
        float outputs[kHeadDim / 16][4] = {};
        float peak = -INFINITY, sum = 0;
        float weights[4] = {};  // of INT4: sums of what codes of V were multiplied with, in the columns of `outputs`
    };
    // Work on `kMixedBatches` batches, then have their registers filled with those from `next` on.
    __device__ __forceinline__ void mix(const Rows& rows, u32 set, u32 number, u32 next, const Query& query, Batch* batches, Mixed& mixed) {
        const u32 lane = opaque(this->lane), group = lane >> 2, part = lane & 3;
        float scores[kMixedBatches][2], value_scales[kMixedBatches][2];
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j)
            if (number + j * kSetWarps == rows.fresh_batch) put_fresh(rows, batches[j]);
        // Scores: rows `group` and `group + 8` of a batch, for query head `part`; of FP8 in two chains that do not wait for each other.
        ScoreSum<kKvRotated>::Type sums[kMixedBatches][kChains][4] = {};
#pragma unroll
        for (int i = 0; i < kQueryRegisters / 2; ++i)
#pragma unroll
            for (u32 j = 0; j < kMixedBatches; ++j) add_products(sums[j][i % kChains], batches[j], query, i);
        if (warp == 0) stamp(role, kScored, step, product);
        float next_peak = mixed.peak;
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j) {
            load_keys(rows, next + j * kSetWarps, batches[j]);
            const bool is_there = j == 0 || number + j * kSetWarps < rows.num_batches;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 slot = (number + j * kSetWarps) * 16 + group + 8 * i;
                const bool seen = (rows.last >= slot ? rows.last - slot : rows.last + rows.capacity - slot) < rows.num_seen;  // rows before the last one
                float score, scale = query.scale;
                if constexpr (kKvRotated) score = static_cast<float>(sums[j][0][2 * i] * 512 + sums[j][0][2 * i + 1] * 2 - query.offset);
                else score = sums[j][0][2 * i] + sums[j][0][2 * i + 1];
                if constexpr (kKvCoded) {
                    const u32 scales = __shfl_sync(kFullWarp, batches[j].scales, group + 8 * i);
                    if constexpr (kChains > 1) score += sums[j][1][2 * i] + sums[j][1][2 * i + 1];
                    scale *= Fp16::low(scales), value_scales[j][i] = kWeightScale * Fp16::high(scales);
                }
                scores[j][i] = is_there && seen ? score * scale : -INFINITY;
            }
            next_peak = fmaxf(next_peak, fmaxf(scores[j][0], scores[j][1]));
        }
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) next_peak = fmaxf(next_peak, __shfl_xor_sync(kFullWarp, next_peak, offset));
        const float base = next_peak == -INFINITY ? 0.0f : next_peak;
        const float shrink = exp2_approx(mixed.peak - base);
        mixed.sum *= shrink, mixed.peak = next_peak;
        u32 first[kMixedBatches], second[kMixedBatches];
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j) {
            float weights[2] = {exp2_approx(scores[j][0] - base), exp2_approx(scores[j][1] - base)};
            mixed.sum += weights[0] + weights[1];
            if constexpr (kKvCoded) weights[0] *= value_scales[j][0], weights[1] *= value_scales[j][1];
            const int from = part * 8 + head_of(group, set);  // the thread that holds this head's weight of position 2 * part
            const float a = __shfl_sync(kFullWarp, weights[0], from), b = __shfl_sync(kFullWarp, weights[0], from + 4);
            const float c = __shfl_sync(kFullWarp, weights[1], from), d = __shfl_sync(kFullWarp, weights[1], from + 4);
            first[j] = KvFormat::pack(a, b), second[j] = KvFormat::pack(c, d);
            if (group & 1) first[j] = pack_rest<KvFormat>(a, b, first[j]), second[j] = pack_rest<KvFormat>(c, d, second[j]);
        }
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j) {
            const Batch& batch = batches[j];
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) mixed.outputs[i][k] *= j == 0 ? shrink : 1;
                KvFormat::mma(mixed.outputs[i], expand_value(batch.values[0], 2 * i), expand_value(batch.values[0], 2 * i + 1),
                              expand_value(batch.values[1], 2 * i), expand_value(batch.values[1], 2 * i + 1), first[j], second[j]);
            }
            if constexpr (kKvRotated) {
#pragma unroll
                for (int k = 0; k < 4; ++k) mixed.weights[k] *= j == 0 ? shrink : 1;
                KvFormat::mma(mixed.weights, kUnitPair, kUnitPair, kUnitPair, kUnitPair, first[j], second[j]);
            }
            load_values(rows, next + j * kSetWarps, batches[j]);
            // Neighbours, though this warp mixes every kSetWarps-th one: together a set's warps read what all sets' will mix.
            if (j == 0 && set == 0) read_ahead(rows, number + share_of(warp) * (kMixedBatches - 1) + (kBatches + kBatchesAhead) * kAttendWarps);
        }
    }
    // Of the keys of a batch and the query, the i-th registers.
    static __device__ __forceinline__ void add_products(float (&sums)[4], const Batch& batch, const Query& query, int i) {
        KvFormat::mma(sums, expand_value(batch.keys[0], 2 * i), expand_value(batch.keys[1], 2 * i), expand_value(batch.keys[0], 2 * i + 1),
                      expand_value(batch.keys[1], 2 * i + 1), query.registers[2 * i], query.registers[2 * i + 1]);
    }
    static __device__ __forceinline__ void add_products(int (&sums)[4], const Batch& batch, const Query& query, int i) {
        mma_bytes(sums, key_codes(batch.keys[0], batch.tops[0], 2 * i), key_codes(batch.keys[1], batch.tops[1], 2 * i),
                  key_codes(batch.keys[0], batch.tops[0], 2 * i + 1), key_codes(batch.keys[1], batch.tops[1], 2 * i + 1),
                  query.registers[2 * i], query.registers[2 * i + 1]);
    }
    // Weights times the scale of values are multiplied by this, too, so that they are in binary16's range.
    static constexpr float kWeightScale = kKvRotated ? 8 : 256, kUnscale = kKvCoded ? kUnit / kWeightScale : 1;
    static constexpr u32 kChains = kKvCoded && !kKvRotated ? 2 : 1;
};

}  // namespace kog
