// Softmax over the batches of a warp, and the products with their keys and values: all in registers, which further batches take in turn.
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

using Score = ScoreSum<kKvRotated>::Type;
// Weights times the scale of values are multiplied by this, too, so that they are in binary16's range.
constexpr float kWeightScale = kKvRotated ? 8 : 256, kUnscale = kKvCoded ? kUnit / kWeightScale : 1;
constexpr u32 kChains = kKvCoded && !kKvRotated ? 2 : 1;
// Softmax over a warp's rows so far: the largest score and the sum of weights of the thread's rows for one head, and outputs.
struct Mixed {
    float outputs[kHeadDim / 16][4] = {};
    float peak = -INFINITY, sum = 0;
    float weights[4] = {};  // of INT4: sums of what codes of V were multiplied with, in the columns of `outputs`
};
// What outputs so far shrink by, and weights of batches as the matrix unit takes them.
struct BatchWeights {
    float shrink;
    u32 first[kMixedBatches], second[kMixedBatches];
};
// A step of softmax, of all tokens and sets side by side: a step of one waits while the other's is under way.
template <u32 kOf>
__device__ __forceinline__ void weigh_batches(const AttendWarp& self, const CacheRows& rows, const Sight (&sights)[kOf], u32 first_set, u32 number,
                                              const Query (&queries)[kOf][kWarpSets], const Score (&sums)[kOf][kWarpSets][kMixedBatches][kChains][4],
                                              const CacheBatch* batches, Mixed (&mixed)[kOf][kWarpSets], BatchWeights (&to)[kOf][kWarpSets]) {
    const u32 lane = opaque(self.lane), group = lane >> 2, part = lane & 3;
    float scores[kOf][kWarpSets][kMixedBatches][2], value_scales[kMixedBatches][2], peaks[kOf][kWarpSets];
#pragma unroll
    for (u32 t = 0; t < kOf; ++t)
#pragma unroll
        for (u32 s = 0; s < kWarpSets; ++s) peaks[t][s] = mixed[t][s].peak;
#pragma unroll
    for (u32 j = 0; j < kMixedBatches; ++j) {
        const bool is_there = j == 0 || number + j * kTeamWarps < rows.num_batches;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 slot = (number + j * kTeamWarps) * 16 + group + 8 * i;
            float key_scale = 1;
            if constexpr (kKvCoded) {
                const u32 scales = __shfl_sync(kFullWarp, batches[j].scales, group + 8 * i);
                key_scale = Fp16::low(scales), value_scales[j][i] = kWeightScale * Fp16::high(scales);
            }
#pragma unroll
            for (u32 t = 0; t < kOf; ++t) {
                const Sight& sight = sights[t];
                bool seen;
                if constexpr (kKvCoded && !kHasWindows && kOf == 1) seen = slot <= sight.last;
                else seen = (sight.last >= slot ? sight.last - slot : sight.last + rows.capacity - slot) < sight.num_seen;  // rows before the last one
#pragma unroll
                for (u32 s = 0; s < kWarpSets; ++s) {
                    const Score(&sum)[kChains][4] = sums[t][s][j];
                    float score;
                    if constexpr (kKvRotated) score = static_cast<float>(sum[0][2 * i] * 512 + sum[0][2 * i + 1] * 2 - queries[t][s].offset);
                    else score = sum[0][2 * i] + sum[0][2 * i + 1];
                    if constexpr (kChains > 1) score += sum[1][2 * i] + sum[1][2 * i + 1];
                    scores[t][s][j][i] = is_there && seen ? score * (kKvCoded ? queries[t][s].scale * key_scale : queries[t][s].scale) : -INFINITY;
                }
            }
        }
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (u32 s = 0; s < kWarpSets; ++s) peaks[t][s] = fmaxf(peaks[t][s], fmaxf(scores[t][s][j][0], scores[t][s][j][1]));
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1)
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (u32 s = 0; s < kWarpSets; ++s) peaks[t][s] = fmaxf(peaks[t][s], __shfl_xor_sync(kFullWarp, peaks[t][s], offset));
#pragma unroll
    for (u32 t = 0; t < kOf; ++t)
#pragma unroll
        for (u32 s = 0; s < kWarpSets; ++s) {
            Mixed& own = mixed[t][s];
            const float base = peaks[t][s] == -INFINITY ? 0.0f : peaks[t][s];
            to[t][s].shrink = exp2_approx(own.peak - base);
            own.sum *= to[t][s].shrink, own.peak = peaks[t][s];
#pragma unroll
            for (u32 j = 0; j < kMixedBatches; ++j) {
                float weights[2] = {exp2_approx(scores[t][s][j][0] - base), exp2_approx(scores[t][s][j][1] - base)};
                own.sum += weights[0] + weights[1];
                if constexpr (kKvCoded) weights[0] *= value_scales[j][0], weights[1] *= value_scales[j][1];
                const int from = part * 8 + head_of(group, first_set + s);  // the thread that holds this head's weight of position 2 * part
                const float a = __shfl_sync(kFullWarp, weights[0], from), b = __shfl_sync(kFullWarp, weights[0], from + 4);
                const float c = __shfl_sync(kFullWarp, weights[1], from), d = __shfl_sync(kFullWarp, weights[1], from + 4);
                u32 &first = to[t][s].first[j], &second = to[t][s].second[j];
                first = KvFormat::pack(a, b), second = KvFormat::pack(c, d);
                if constexpr (kKvCoded) {  // all threads make both: a warp has both kinds
                    const u32 first_rest = pack_rest<KvFormat>(a, b, first), second_rest = pack_rest<KvFormat>(c, d, second);
                    first = group & 1 ? first_rest : first, second = group & 1 ? second_rest : second;
                } else if (group & 1) {
                    first = pack_rest<KvFormat>(a, b, first), second = pack_rest<KvFormat>(c, d, second);
                }
            }
        }
}
// Outputs, times `shrink`, and the values of a batch, times their weights.
__device__ __forceinline__ void add_values(const CacheBatch& batch, float shrink, u32 first, u32 second, Mixed& mixed) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) mixed.outputs[i][k] *= shrink;
        KvFormat::mma(mixed.outputs[i], expand_value(batch.values[0], 2 * i), expand_value(batch.values[0], 2 * i + 1),
                      expand_value(batch.values[1], 2 * i), expand_value(batch.values[1], 2 * i + 1), first, second);
    }
    if constexpr (kKvRotated) {
#pragma unroll
        for (int k = 0; k < 4; ++k) mixed.weights[k] *= shrink;
        KvFormat::mma(mixed.weights, kUnitPair, kUnitPair, kUnitPair, kUnitPair, first, second);
    }
}
// Of the keys of a batch and the query, the i-th registers.
__device__ __forceinline__ void add_products(float (&sums)[4], const CacheBatch& batch, const Query& query, int i) {
    KvFormat::mma(sums, expand_value(batch.keys[0], 2 * i), expand_value(batch.keys[1], 2 * i), expand_value(batch.keys[0], 2 * i + 1),
                  expand_value(batch.keys[1], 2 * i + 1), query.registers[2 * i], query.registers[2 * i + 1]);
}
// Of codes, which are so few bytes that a branch costs more, `own` is loaded again where there is no such batch; nobody looks at it then.
__device__ __forceinline__ u32 or_again(const CacheRows& rows, u32 batch, u32 own) { return batch < rows.num_batches ? batch : own; }
// Work on `kMixedBatches` batches for the tokens that the warp has, then have their registers filled with those from `next` on. `rows` are those
// of the last token, of which the others see a part.
template <u32 kOf>
__device__ __forceinline__ void mix_batches(const AttendWarp& self, const CacheRows& rows, const Sight (&sights)[kOf], u32 first_set, u32 number, u32 next,
                                            const Query (&queries)[kOf][kWarpSets], CacheBatch* batches, Mixed (&mixed)[kOf][kWarpSets]) {
    if (kMixedBatches == 1 || rows.fresh_batch == number || rows.fresh_batch == number + kTeamWarps) {  // asked once for two
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j)
            if (number + j * kTeamWarps == rows.fresh_batch) put_fresh<true, !kValuesLate>(self, rows, batches[j]);
    }
    // Scores: rows `group` and `group + 8` of a batch, for query head `part`; of FP8 in two chains that do not wait for each other.
    Score sums[kOf][kWarpSets][kMixedBatches][kChains][4] = {};
#pragma unroll
    for (int i = 0; i < kQueryRegisters / 2; ++i)
#pragma unroll
        for (u32 j = 0; j < kMixedBatches; ++j)
#pragma unroll
            for (u32 t = 0; t < kOf; ++t)
#pragma unroll
                for (u32 s = 0; s < kWarpSets; ++s) add_products(sums[t][s][j][i % kChains], batches[j], queries[t][s], i);
    if (self.warp == 0) stamp(self.role, kScored, self.turn, self.product);
    if constexpr (kValuesLate) load_values<kWholeWindows>(self, rows, number, batches[0]);
    else
#pragma unroll
    for (u32 j = 0; j < kMixedBatches; ++j) load_keys(self, rows, kKvCoded ? or_again(rows, next + j * kTeamWarps, number) : next + j * kTeamWarps, batches[j]);
    BatchWeights weights[kOf][kWarpSets];
    weigh_batches(self, rows, sights, first_set, number, queries, sums, batches, mixed, weights);
    if constexpr (kValuesLate)
        if (number == rows.fresh_batch) put_fresh<false, true>(self, rows, batches[0]);
#pragma unroll
    for (u32 j = 0; j < kMixedBatches; ++j) {
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (u32 s = 0; s < kWarpSets; ++s)
                add_values(batches[j], j == 0 ? weights[t][s].shrink : 1, weights[t][s].first[j], weights[t][s].second[j], mixed[t][s]);
        if constexpr (kValuesLate) load_keys(self, rows, next, batches[0]);
        else load_values(self, rows, kKvCoded ? or_again(rows, next + j * kTeamWarps, number) : next + j * kTeamWarps, batches[j]);
        // Neighbours, though this warp mixes every kTeamWarps-th one: together a team's warps read what all teams' will mix. Of several tokens
        // they are asked for before (read_in_turn).
        if (kTokens == 1 && j == 0 && first_set == 0)
            read_batches_ahead(self, rows, number + share_of(self.warp) * (kMixedBatches - 1) + (kBatches + kBatchesAhead) * kAttendWarps);
    }
}
__device__ __forceinline__ void add_products(int (&sums)[4], const CacheBatch& batch, const Query& query, int i) {
    mma_bytes(sums, key_codes(batch.keys[0], batch.tops[0], 2 * i), key_codes(batch.keys[1], batch.tops[1], 2 * i),
              key_codes(batch.keys[0], batch.tops[0], 2 * i + 1), key_codes(batch.keys[1], batch.tops[1], 2 * i + 1),
              query.registers[2 * i], query.registers[2 * i + 1]);
}

}  // namespace kog
