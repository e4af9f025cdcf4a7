// What attention waits for in each layer: the query, which goes to registers, and K and V of the new position, which are staged (attend_row.cuh).
#pragma once
#include "attend_row.cuh"

namespace kog {

// Query heads of a set; the one whose columns a group of threads has, the last one for those left over.
__device__ __forceinline__ u32 heads_of_set(u32 set) { return kGroup % kSetHeads == 0 || set + 1 < kSets ? kSetHeads : kGroup % kSetHeads; }
__device__ __forceinline__ u32 head_of(u32 group, u32 set) { return (group >> 1) < heads_of_set(set) ? group >> 1 : heads_of_set(set) - 1; }

// The query of a set's heads, as the second factor of scores: in high and low halves of 16 bits. Of INT4 in bytes: the high and the low one
// of 16-bit integers, in the order of `key_codes`; scores are sums times 2, minus `offset`, times `scale`, for the head that scores are of.
constexpr int kQueryRegisters = kKvRotated ? kDimRegisters / 2 : kDimRegisters;
struct Query {
    u32 registers[kQueryRegisters];
    float scale = kScoreScale;
    int offset = 0;
};
constexpr int kHalf = kDimRegisters / 2, kQueryLoad = kHalf % 2 == 0 ? 2 : 1;  // registers of the query; words of a load
// Norm and rotation of pairs of a head's values, for models whose query and key heads are normed: the finaliser has no whole heads.
// They are read before the words have come.
template <int kPairs>
struct HeadNorm {
    u32 weights[kPairs];
    float2 turns[kPairs];

    __device__ __forceinline__ void load(const KogDecodeParams& params, int i, u32 layer, u32 is_key, u32 position, u32 pair) {
        weights[i] = reinterpret_cast<const u32*>(params.head_norms_ptr)[(2 * attention_layer(layer) + is_key) * (kHeadDim / 2) + pair];
        if constexpr (kRotary != kHeadDim)  // some pairs do not rotate
            if (pair >= kRotary / 2) return void(turns[i] = make_float2(1.0f, 0.0f));
        turns[i] = reinterpret_cast<const float2*>(params.rope_ptr)[position * (kRotary / 2) + pair];
    }
    __device__ __forceinline__ float2 apply(int i, float inverse_rms, float a, float b) const {
        const float x = a * inverse_rms * norm_weight(WeightFormat::low(weights[i])), y = b * inverse_rms * norm_weight(WeightFormat::high(weights[i]));
        return make_float2(sum_of_products(x, turns[i].x, -y, turns[i].y), sum_of_products(y, turns[i].x, x, turns[i].y));
    }
};
__device__ __forceinline__ float square_sum(float a, float b) { return sum_of_products(a, a, b, b); }
__device__ __forceinline__ float inverse_rms(float squares) { return inverse_root_approx(squares * (1.0f / kHeadDim) + kNormEps); }

// Register `i` of those that a thread has made, of the high and of the low parts, to where it and its neighbour need them.
__device__ __forceinline__ void put_halves(const AttendWarp& self, Query& query, int i, u32 high, u32 low) {
    const bool is_low = opaque(self.lane) & 4;
    const u32 theirs = __shfl_xor_sync(kFullWarp, is_low ? high : low, 4);
    query.registers[i] = is_low ? theirs : high;
    query.registers[kQueryRegisters / 2 + i] = is_low ? low : theirs;
}
// A rotated query as integers: the largest magnitude of a head becomes kMost. A NaN makes the scale one.
template <int kPairs>
__device__ __forceinline__ void put_integers(const AttendWarp& self, const float2 (&pairs)[kPairs], Query& query) {
    constexpr float kMost = 127 * 256;
    u32 largest = 0;  // positive floats are in the order of their bits, and a NaN is above them
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = max(largest, max(__float_as_uint(fabsf(pairs[i].x)), __float_as_uint(fabsf(pairs[i].y))));
#pragma unroll
    for (int offset = 1; offset < 8; offset <<= 1) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    const float inverse = kMost / fmaxf(__uint_as_float(largest), 1e-30f);
    int sum = 0;
    const auto integer = [&](float value) {
        const int whole = static_cast<int>(rintf(value * inverse));
        sum += whole;
        return static_cast<u32>(whole + 128);  // the high byte; the low one with its sign turned
    };
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
        const int first = i / 2 * 4 + i % 2;
        const u32 a = integer(pairs[first].x), b = integer(pairs[first + 2].x), c = integer(pairs[first].y), d = integer(pairs[first + 2].y);
        const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
        put_halves(self, query, i, __byte_perm(ab, cd, 0x7632), __byte_perm(ab, cd, 0x5410) ^ 0x80808080u);
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    const u32 of_scores = (opaque(self.lane) & 3) * 8;  // a thread of the head that this thread's scores are of
    query.scale = __shfl_sync(kFullWarp, __uint_as_float(largest) * (kScoreScale / kMost), of_scores);
    query.offset = __shfl_sync(kFullWarp, sum, of_scores) * static_cast<int>(kKvMostKey);
}
// Wait for the query of the thread's head of each set, in high and low halves, of the warp's tokens; the warp that has the batch of the new row
// stages K and V of it in shared memory. Neighbouring groups of threads need the high and the low parts of the same values: each reads half of the
// words. `row_words` and `row_position`: of the token whose row is new.
template <u32 kOf>
__device__ __forceinline__ bool wait_for_query(const AttendWarp& self, const u64* words, const u64* row_words, u32 layer, u32 kv_head, u32 first_set,
                                               const u32 (&positions)[kOf], u32 row_position, bool has_fresh, u32 tag, Query (&queries)[kOf][kWarpSets]) {
    const u32 lane = opaque(self.lane), group = lane >> 2, part = lane & 3, is_low = group & 1;
    [[maybe_unused]] HeadNorm<kQkNorm ? kHalf : 1> query_norms[kOf];
    [[maybe_unused]] HeadNorm<kQkNorm ? kNewKeys : 1> key_norm;
    if constexpr (kQkNorm) {
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (int i = 0; i < kHalf; ++i) query_norms[t].load(self.params, i, layer, 0, positions[t], key_pair(part, is_low * kHalf + i));
#pragma unroll
        for (int i = 0; i < kNewKeys; ++i)
            if (i * 32 + lane < kNewWords / 2) key_norm.load(self.params, i, layer, 1, row_position, i * 32 + lane);
    }
    if (!counter_wait<600>(self.role.stopped(), self.role.base + KOG_OFFSET(num_finalized), self.first_vector + self.product + 1)) return false;
    const u64* query_words[kWarpSets];
#pragma unroll
    for (u32 s = 0; s < kWarpSets; ++s)
        query_words[s] = words + ((kv_head * kGroup + (first_set + s) * kSetHeads + head_of(group, first_set + s)) * kHeadDim) / 2;
    const u64* new_words = row_words + (kQueryRows + kv_head * kHeadDim) / 2 + lane;
    u64 got[kOf][kWarpSets][kHalf], got_new[kNew];
    while (true) {
        bool ready = true;
        if (has_fresh) {  // first, so that they are under way together with the query's: a look takes one way to L2, not two
#pragma unroll
            for (int i = 0; i < kNew; ++i)
                if (i * 32 + lane < kNewWords)
                    got_new[i] = load_relaxed(new_words + i * 32 + (i * 32 + lane < kNewWords / 2 ? 0 : (kKvRows - kHeadDim) / 2));
        }
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (u32 s = 0; s < kWarpSets; ++s) {
#pragma unroll
                for (int i = 0; i < kHalf; i += kQueryLoad) {
                    const u64* at = query_words[s] + t * kQkvStride + key_pair(part, is_low * kHalf + i);
                    if constexpr (kQueryLoad == 2) {
                        const ulonglong2 two = load_relaxed_x2(at);
                        got[t][s][i] = two.x, got[t][s][i + 1] = two.y;
                    } else {
                        got[t][s][i] = load_relaxed(at);
                    }
                }
            }
#pragma unroll
        for (u32 t = 0; t < kOf; ++t)
#pragma unroll
            for (u32 s = 0; s < kWarpSets; ++s)
#pragma unroll
                for (int i = 0; i < kHalf; ++i) ready &= has_tag(got[t][s][i], tag);
        if (has_fresh) {
#pragma unroll
            for (int i = 0; i < kNew; ++i) ready &= i * 32 + lane >= kNewWords || has_tag(got_new[i], tag);
        }
        if (__all_sync(kFullWarp, ready)) break;
        if (must_leave(self.role.stopped())) return false;
    }
#pragma unroll
    for (u32 t = 0; t < kOf; ++t)
#pragma unroll
        for (u32 s = 0; s < kWarpSets; ++s) {
            const u64(&words_of_head)[kHalf] = got[t][s];
            [[maybe_unused]] float query_rms = 1;
            if constexpr (kQkNorm) {
                float squares = 0;
#pragma unroll
                for (int i = 0; i < kHalf; ++i) squares += square_sum(first_of(words_of_head[i]), second_of(words_of_head[i]));
#pragma unroll
                for (int offset = 1; offset < 8; offset <<= 1) squares += __shfl_xor_sync(kFullWarp, squares, offset);
                query_rms = inverse_rms(squares);
            }
            float2 turned[kHalf];
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                turned[i] = make_float2(first_of(words_of_head[i]), second_of(words_of_head[i]));
                if constexpr (kQkNorm) turned[i] = query_norms[t].apply(i, query_rms, turned[i].x, turned[i].y);
            }
            if constexpr (kKvRotated) {
                rotate_pairs<kHalf, 8>(turned, lane, kKvFactorOut);
                put_integers(self, turned, queries[t][s]);
            } else {
#pragma unroll
                for (int i = 0; i < kHalf; ++i) {
                    const u32 high = KvFormat::pack(turned[i].x, turned[i].y);
                    put_halves(self, queries[t][s], i, high, pack_rest<KvFormat>(turned[i].x, turned[i].y, high));
                }
            }
        }
    if (has_fresh) {
        [[maybe_unused]] float key_rms = 1;
        if constexpr (kQkNorm) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < kNewKeys; ++i)
                if (i * 32 + lane < kNewWords / 2)
                    squares += square_sum(first_of(got_new[i]), second_of(got_new[i]));
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) squares += __shfl_xor_sync(kFullWarp, squares, offset);
            key_rms = inverse_rms(squares);
        }
        float2 pairs[kNew];
#pragma unroll
        for (int i = 0; i < kNew; ++i) {
            if (i * 32 + lane >= kNewWords) continue;
            pairs[i] = make_float2(first_of(got_new[i]), second_of(got_new[i]));
            if constexpr (kQkNorm)
                if (i < kNewKeys && i * 32 + lane < kNewWords / 2) pairs[i] = key_norm.apply(i < kNewKeys ? i : 0, key_rms, pairs[i].x, pairs[i].y);
            stage_pair(self, i * 32 + lane, pairs[i]);
        }
        end_stage(self, pairs);
    }
    return true;
}

}  // namespace kog
