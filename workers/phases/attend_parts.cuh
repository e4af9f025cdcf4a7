// Attention's output, OUT's input, from the parts that splits and partitions have published. What is here waits for them, and changes nothing but the
// words that it publishes.
#pragma once
#include "attend_merge.cuh"

namespace kog {

// The outputs of a KV head's splits, mixed: the thread block that has split i of them does that for the i-th share of the head's values, and
// publishes them as OUT's input. A thread has one split of a unit, or two where experts' warps would else have two units one after the other;
// neighbouring threads have the others. Where splits are no power of two, the last threads have one less.
constexpr u32 kShareUnits = (kGroupUnits + kSplits - 1) / kSplits;
constexpr u32 kRoundSplits = kSplits > 16 ? 32 : kSplits > 8 ? 16 : 8, kMissingSplits = kRoundSplits - kSplits;
constexpr u32 kSplitsOfThread = kExperts && kShareUnits > kAttendWarps * (32 / kRoundSplits) ? 2 : 1;
constexpr u32 kMixThreads = kRoundSplits / kSplitsOfThread, kUnitsOfWarp = 32 / kMixThreads;
static_assert(kMissingSplits <= kMixThreads, "a thread has one less, or none");
static_assert(32 % kMixThreads == 0 && kReplicas <= kMixThreads, "the splits of a unit are in one warp");
struct SplitPart {
    ulonglong2 values;
    u64 log_sum;
};
__device__ __forceinline__ bool is_part(const SplitPart& got, u32 tag) {
    return (tag_difference(got.values, tag) | (static_cast<u32>(got.log_sum >> 32) ^ tag)) == 0;
}
__device__ __forceinline__ bool wait_for_parts(const AttendWarp& self, const u64* values, const u64* log_sum, u32 num_mine, u32 tag, SplitPart (&got)[1]) {
    bool ready = num_mine == 0;
    if (kMissingSplits > 0) got[0] = {};
    while (true) {
        if (kOneStream ? !ready : num_mine > 0) {
            got[0] = {load_relaxed_x2(values), load_relaxed(log_sum)};
            ready = is_part(got[0], tag);
        }
        if (__all_sync(kFullWarp, ready)) return true;
        if (must_leave(self.role.stopped())) return false;
    }
}
// Of two splits at once: their looks are under way together. What is not asked for is empty: else registers would be kept for it.
__device__ __forceinline__ bool wait_for_parts(const AttendWarp& self, const u64* values, const u64* log_sums, u32 num_mine, u32 tag, SplitPart (&got)[2]) {
    bool ready[2] = {num_mine < 1, num_mine < 2};
    got[0] = got[1] = {};
    while (true) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            if (!ready[i]) got[i] = {load_relaxed_x2(values + i * (kMixThreads * kHeadUnits * 2)), load_relaxed(log_sums + i * kMixThreads)};
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            if (!ready[i]) ready[i] = is_part(got[i], tag);
        if (__all_sync(kFullWarp, ready[0] && ready[1])) return true;
        if (must_leave(self.role.stopped())) return false;
    }
}
// sum * shrink + weight * value as the device's compiler makes it in mix_parts, where it chooses itself which product is rounded (the second);
// a host's rounds both.
__device__ __forceinline__ float in_mix(float sum, float shrink, float weight, float value) {
#ifdef __CUDA_ARCH__
    return sum_of_products(sum, shrink, weight, value);
#else
    return sum * shrink + weight * value;
#endif
}
// What the four values of a unit are multiplied with: the sigmoid of its gate rows, which may come later than the splits. False: leave.
__device__ __forceinline__ bool wait_for_gates(const AttendWarp& self, const u64* words, u32 lane_idx, u32 token, u32 head, u32 place, bool is_mine, u32 tag,
                                               float4& gates) {
    const u64* at = words + kQkvOffset + (lane_idx * kTokens + token) * kQkvStride + (kGateRow + head * kHeadDim) / 2 + place * 2;
    ulonglong2 got = {};
    while (true) {
        if (is_mine) got = load_relaxed_x2(at);
        if (__all_sync(kFullWarp, !is_mine || tag_difference(got, tag) == 0)) break;
        if (must_leave(self.role.stopped())) return false;
    }
    gates = make_float4(sigmoid(first_of(got.x)), sigmoid(second_of(got.x)), sigmoid(first_of(got.y)), sigmoid(second_of(got.y)));
    return true;
}
// What neighbouring threads have of a unit's splits, mixed. `sink`: one more logit of the head. `gates`: of gated heads.
__device__ __forceinline__ void publish_mixed(const AttendWarp& self, u64* words, u32 lane_idx, u32 token, u32 head, u32 place, u32 split, bool is_mine,
                                              float peak, float total, float4 sum, float sink, const float4& gates, u32 tag) {
    float top = peak;
#pragma unroll
    for (int offset = 1; offset < kMixThreads; offset <<= 1) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
    if constexpr (kSinks) top = fmaxf(top, sink);
    const float weight = exp2_approx(peak - (top == -INFINITY ? 0.0f : top));
    total *= weight;
    sum = make_float4(sum.x * weight, sum.y * weight, sum.z * weight, sum.w * weight);
#pragma unroll
    for (int offset = 1; offset < kMixThreads; offset <<= 1) {
        total += __shfl_xor_sync(kFullWarp, total, offset);
        sum.x += __shfl_xor_sync(kFullWarp, sum.x, offset), sum.y += __shfl_xor_sync(kFullWarp, sum.y, offset);
        sum.z += __shfl_xor_sync(kFullWarp, sum.z, offset), sum.w += __shfl_xor_sync(kFullWarp, sum.w, offset);
    }
    if constexpr (kSinks) total += exp2_approx(sink - top);
    const float inverse = reciprocal_approx(total);
    if constexpr (kGated) sum = make_float4(sum.x * gates.x, sum.y * gates.y, sum.z * gates.z, sum.w * gates.w);
    if (is_mine && split < kReplicas)
        store_relaxed_x2(words + kAttendedOffset + ((lane_idx * kReplicas + split) * kTokens + token) * kAttendedStride + (head * kHeadUnits + place) * 2,
                         make_pair_word(sum.x * inverse, sum.y * inverse, tag), make_pair_word(sum.z * inverse, sum.w * inverse, tag));
}
__device__ __forceinline__ bool mix_parts(const AttendWarp& self, u32 layer, u32 lane_idx, u32 item_idx, u32 partitions) {
    const u32 lane = opaque(self.lane), warp = opaque(self.warp), kv_head = item_idx / kSplits, share = item_idx % kSplits, split = lane % kMixThreads, tag = self.tag_in(layer);
    u64* words = reinterpret_cast<u64*>(self.params.words_ptr);
#pragma unroll 1
    for (u32 first = warp * kUnitsOfWarp; first < kShareUnits; first += kAttendWarps * kUnitsOfWarp) {
        const u32 of_share = first + lane / kMixThreads, unit = share * kShareUnits + of_share;
        const bool is_mine = of_share < kShareUnits && unit < kGroupUnits;
        const u32 head = kv_head * kGroup + (is_mine ? unit / kHeadUnits : 0), place = is_mine ? unit % kHeadUnits : 0, row = head * kSplits + split;
        const u64* values = words + kPartOffset + lane_idx * kPartStride + (row * kHeadUnits + place) * 2;
        const u64* log_sums = words + kLogSumOffset + lane_idx * kLogSumStride + row;
        const u32 num_mine = is_mine ? kSplitsOfThread - (split >= kMixThreads - kMissingSplits) : 0;
        float peak = -INFINITY, total = 0;
        float4 sum = make_float4(0, 0, 0, 0);
        [[maybe_unused]] float sink = 0;  // one more logit of the head, of which nothing is mixed
        if constexpr (kSinks) sink = WeightFormat::low(reinterpret_cast<const u16*>(self.params.sinks_ptr)[(layer * kLanes + lane_idx) * kHeads + head]) * kLog2e;
#pragma unroll 1
        for (u32 partition = 0; partition < partitions; ++partition) {
            SplitPart got[kSplitsOfThread];
            if (!wait_for_parts(self, values, log_sums, num_mine, tag, got)) return false;
#pragma unroll
            for (u32 i = 0; i < kSplitsOfThread; ++i) {
                const float own = i < num_mine ? __uint_as_float(static_cast<u32>(got[i].log_sum)) : -INFINITY, next = fmaxf(peak, own);
                const float base = next == -INFINITY ? 0.0f : next, shrink = exp2_approx(peak - base), weight = exp2_approx(own - base);
                const ulonglong2 pairs = got[i].values;
                const float4 v = make_float4(first_of(pairs.x), second_of(pairs.x), first_of(pairs.y), second_of(pairs.y));
                sum = make_float4(sum.x * shrink + weight * v.x, sum.y * shrink + weight * v.y, sum.z * shrink + weight * v.z,
                                  sum.w * shrink + weight * v.w);
                total = total * shrink + weight, peak = next;
            }
            values += kPartitionWords, log_sums += kLogSumWords;
        }
        [[maybe_unused]] float4 gates;
        if constexpr (kGated)
            if (!wait_for_gates(self, words, lane_idx, 0, head, place, is_mine && split < kReplicas, tag, gates)) return false;
        publish_mixed(self, words, lane_idx, 0, head, place, split, is_mine, peak, total, sum, sink, gates, tag);
    }
    return true;
}

// The same of all tokens of a pass: their looks are under way together.
__device__ __forceinline__ bool mix_parts_of_pass(const AttendWarp& self, u32 lane_idx, u32 item_idx, u32 layer) {
    const u32 lane = opaque(self.lane), warp = opaque(self.warp), kv_head = item_idx / kSplits, share = item_idx % kSplits, split = lane % kMixThreads, tag = self.tag_in(layer);
    u64* words = reinterpret_cast<u64*>(self.params.words_ptr);
#pragma unroll 1
    for (u32 first = warp * kUnitsOfWarp; first < kShareUnits; first += kAttendWarps * kUnitsOfWarp) {
        const u32 of_share = first + lane / kMixThreads, unit = share * kShareUnits + of_share;
        const bool is_mine = of_share < kShareUnits && unit < kGroupUnits;
        const u32 num_mine = is_mine ? kSplitsOfThread - (split >= kMixThreads - kMissingSplits) : 0;
        const u32 head = kv_head * kGroup + (is_mine ? unit / kHeadUnits : 0), place = is_mine ? unit % kHeadUnits : 0, row = head * kSplits + split;
        const u64* values = words + kPartOffset + lane_idx * (kTokens * kPartStride) + (row * kHeadUnits + place) * 2;
        const u64* log_sums = words + kLogSumOffset + lane_idx * (kTokens * kLogSumStride) + row;
        [[maybe_unused]] float sink = 0;
        if constexpr (kSinks) sink = WeightFormat::low(reinterpret_cast<const u16*>(self.params.sinks_ptr)[(layer * kLanes + lane_idx) * kHeads + head]) * kLog2e;
        SplitPart got[kSplitsOfThread][kTokens] = {};
        bool is_here[kSplitsOfThread][kTokens];
#pragma unroll
        for (u32 i = 0; i < kSplitsOfThread; ++i)
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) is_here[i][token] = i >= num_mine;
        while (true) {
            bool ready = true;
#pragma unroll
            for (u32 i = 0; i < kSplitsOfThread; ++i)
#pragma unroll
                for (u32 token = 0; token < kTokens; ++token)
                    if (!is_here[i][token])
                        got[i][token] = {load_relaxed_x2(values + i * (kMixThreads * kHeadUnits * 2) + token * kPartStride),
                                         load_relaxed(log_sums + i * kMixThreads + token * kLogSumStride)};
#pragma unroll
            for (u32 i = 0; i < kSplitsOfThread; ++i)
#pragma unroll
                for (u32 token = 0; token < kTokens; ++token) {
                    if (!is_here[i][token]) is_here[i][token] = is_part(got[i][token], tag);
                    ready = ready && is_here[i][token];
                }
            if (__all_sync(kFullWarp, ready)) break;
            if (must_leave(self.role.stopped())) return false;
        }
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            float peak = -INFINITY, total = 0;
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (u32 i = 0; i < kSplitsOfThread; ++i) {  // as in mix_parts
                const SplitPart part = of_token(got[i], token);
                const float own = num_mine > i ? __uint_as_float(static_cast<u32>(part.log_sum)) : -INFINITY, next = fmaxf(peak, own);
                const float base = next == -INFINITY ? 0.0f : next, shrink = exp2_approx(peak - base), weight = exp2_approx(own - base);
                const ulonglong2 pairs = part.values;
                const float4 v = make_float4(first_of(pairs.x), second_of(pairs.x), first_of(pairs.y), second_of(pairs.y));
                // Before the first one there is nothing: it does not matter which product is rounded.
                if (i == 0) sum = make_float4(sum.x * shrink + weight * v.x, sum.y * shrink + weight * v.y, sum.z * shrink + weight * v.z,
                                              sum.w * shrink + weight * v.w);
                else sum = make_float4(in_mix(sum.x, shrink, weight, v.x), in_mix(sum.y, shrink, weight, v.y), in_mix(sum.z, shrink, weight, v.z),
                                       in_mix(sum.w, shrink, weight, v.w));
                total = total * shrink + weight, peak = next;
            }
            [[maybe_unused]] float4 gates;
            if constexpr (kGated)
                if (!wait_for_gates(self, words, lane_idx, token, head, place, is_mine && split < kReplicas, tag, gates)) return false;
            publish_mixed(self, words, lane_idx, token, head, place, split, is_mine, peak, total, sum, sink, gates, tag);
        }
    }
    return true;
}

}  // namespace kog
