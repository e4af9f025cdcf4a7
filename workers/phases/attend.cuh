// Attention of one position. A split is a KV head's positions p with p % kSplits == split; an item index counts those of all KV heads. A
// layer without a window has more of them far into a context: each partition takes the next kPartitionBatches batches of a split. Splits are
// spread over the thread blocks by a map that depends on layer, lane and partition only, their batches over the warps. So the thread that appends its
// share of a row of K and V is the one that reads it later, and the append needs no fence. Lanes that have the same KV head (kSharingLanes) append the same
// bits to the same place: each reads what it has written itself, and waits for none of the others. A split keeps its rows in batches of 16 (K by rows,
// V by pairs of positions, as the matrix unit wants them). Windowed layers keep a ring of batches, or all turns of it (kWholeWindows): what is
// read, by whom and in which order is the same.
#pragma once
#include "attend_batches.cuh"
#include "delta_pass.cuh"

namespace kog {

struct Attender : BatchMixer {
    // A batch before the query has come.
    __device__ __forceinline__ void load_first(const Rows& rows, u32 batch, Batch& to) const {
        load_keys<kWholeWindows, false>(rows, batch, to);
        if constexpr (!kValuesLate) load_values<kWholeWindows, false>(rows, batch, to);
    }
    // Each warp for the query heads of its sets.
    __device__ __forceinline__ bool item(u32 layer, u32 lane_idx, u32 item_idx, u32 partition, u32 position) {
        const u32 warp = opaque(this->warp), kv_head = item_idx / kSplits, split = item_idx % kSplits;
        const u32 first_set = team_of(warp) * kWarpSets, first = share_of(warp);
        const Rows rows = rows_of(layer, lane_idx, item_idx, partition, position);
        // They are on their way, or here before the query is.
        Batch batches[kBatches];
#pragma unroll
        for (u32 i = 0; i < kBatches; ++i)
            load_first(rows, first + i * kTeamWarps, batches[i]);
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
        const bool has_fresh = rows.fresh_batch != kNoBatch && rows.fresh_batch % kTeamWarps == first;
        Query queries[1][kWarpSets];
        const u32 positions[1] = {position};
        if (!wait_for_query(words, words, layer, kv_head, first_set, positions, position, has_fresh, tag_in(layer), queries)) return false;
        if (warp == 0) stamp(role, kQuerySeen, turn, product);
        const Sight sights[1] = {{rows.last, rows.num_seen}};
        Mixed mixed[1][kWarpSets];
#pragma unroll 1
        for (u32 batch = first; batch < rows.num_batches; batch += kBatches * kTeamWarps) {
#pragma unroll
            for (u32 i = 0; i < kBatches; i += kMixedBatches) {
                const u32 number = batch + i * kTeamWarps;
                if (i == 0 || number < rows.num_batches) mix(rows, sights, first_set, number, number + kBatches * kTeamWarps, queries, batches + i, mixed);
            }
        }
        if (warp == 0) stamp(role, kMixed, turn, product);
        return merge(layer, kv_head, split, partition, lane_idx, mixed[0]);
    }

    // ---- several tokens ----
    // A split of all tokens of a pass, by the warps that the tokens have. Tokens of several requests have a row each, which is nobody else's.
    __device__ __forceinline__ bool item_of_pass(const Pass& pass, u32 layer, u32 lane_idx, u32 item_idx) {
        const u32 warp = opaque(this->warp), kv_head = item_idx / kSplits, split = item_idx % kSplits, token = token_of(warp), first = warp % kTokenWarps;
        u32 row_token = 0;  // whose row is this split's, if any
#ifdef KOG_COMPANY
        row_token = position % kSplits == split ? token : kTokens;
#else
#pragma unroll 1
        while (row_token < kTokens && pass.position_of(row_token) % kSplits != split) ++row_token;
#endif
        const bool has_row = row_token < kTokens, sees_row = has_row && row_token < token + kWarpTokens;
#ifdef KOG_COMPANY
        const u32 row_position = position;
#else
        const u32 row_position = pass.position_of(has_row ? row_token : 0);
#endif
        u32 positions[kWarpTokens];
        Sight sights[kWarpTokens];
        Rows rows;
#pragma unroll
        for (u32 t = 0; t < kWarpTokens; ++t) {
#ifdef KOG_COMPANY
            positions[t] = position;
#else
            positions[t] = pass.position_of(token + t);
#endif
            rows = rows_of(layer, lane_idx, item_idx, 0, positions[t]);
            sights[t] = {rows.last, rows.num_seen};
        }
        const u32 row_batch = has_row ? row_position / kSplits % rows.capacity / 16 : kNoBatch;
        rows.fresh_batch = sees_row ? row_batch : kNoBatch;
        const bool has_fresh = has_row && row_batch % kTokenWarps == first;
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
        const u32 half = kAttendedHalves == 1 ? 0 : num_items & 1;
        read_first(rows, first);
        Batch batch;
        // Sets that a single token's teams have at the same time follow each other.
#pragma unroll 1
        for (u32 team = 0; team < kTeams; ++team) {
            const u32 first_set = team * kWarpSets;
            load_first(rows, first, batch);
            Query queries[kWarpTokens][kWarpSets];
            if (!wait_for_query(words + token * kQkvStride, words + (has_row ? row_token : 0) * kQkvStride, layer, kv_head, first_set, positions, row_position,
                                has_fresh && team == 0, tag_in(layer), queries))
                return false;
            if (warp == 0) stamp(role, kQuerySeen, turn, product);
            if (kMergesInTurn && team == 0 && num_items > 0 && !mbar_wait(role.stopped(), merged_at(token) + 8, (num_items - 1) & 1)) return false;
#pragma unroll 1
            for (u32 share = first; share < kTeamWarps; share += kTokenWarps) {
                Mixed mixed[kWarpTokens][kWarpSets];
                // Said again, since nvcc 13 gives rows behind the first of an array of arrays zeros in place of their members' defaults.
#pragma unroll
                for (u32 t = 0; t < kWarpTokens; ++t)
#pragma unroll
                    for (u32 s = 0; s < kWarpSets; ++s) mixed[t][s] = Mixed{};
#pragma unroll 1
                for (u32 number = share; number < rows.num_batches; number += kTeamWarps) {
                    if (team == 0) read_in_turn(rows, share, number);
                    // Behind a share's last batch comes the first one of the share that follows.
                    const u32 following = share + kTokenWarps < kTeamWarps ? share + kTokenWarps : kNoBatch;
                    mix(rows, sights, first_set, number, number + kTeamWarps < rows.num_batches ? number + kTeamWarps : following, queries, &batch, mixed);
                }
#pragma unroll
                for (u32 t = 0; t < kWarpTokens; ++t)
#pragma unroll
                    for (u32 s = 0; s < kWarpSets; ++s) keep_mixed(half, token + t, team * kTeamWarps + share, s, mixed[t][s]);
            }
        }
        // A row of a later token: this warp's threads will read it in later passes.
        if (has_fresh && !sees_row) {
            rows = rows_of(layer, lane_idx, item_idx, 0, row_position);
            load_keys<kWholeWindows, false>(rows, row_batch, batch), load_values<kWholeWindows, false>(rows, row_batch, batch);
            put_fresh(rows, batch);
        }
        if (warp == 0) stamp(role, kMixed, turn, product);
        return merge_shares(layer, kv_head, split, 0, lane_idx, token, first);
    }

    // Four values of unit `unit` of a split's outputs, and with a head's first ones the log-sum. `row`: head and split.
    __device__ __forceinline__ void publish(u32 row, u32 partition, u32 lane_idx, u32 unit, u64 first, u64 second, float log_sum, u32 tag, u32 token = 0) const {
        u64* base = reinterpret_cast<u64*>(params.words_ptr);
        const u32 place = unit % kHeadUnits;
        store_relaxed_x2(base + kPartOffset + (lane_idx * kTokens + token) * kPartStride + partition * kPartitionWords + (row * kHeadUnits + place) * 2, first, second);
        if (place == 0)
            store_relaxed(base + kLogSumOffset + (lane_idx * kTokens + token) * kLogSumStride + partition * kLogSumWords + row,
                          make_value_word(__float_as_uint(log_sum), tag));
    }
    static constexpr int kHeadUnits = kHeadDim / 4;

    // Nobody reads the words of a partition that the context has not come to. They are written all the same, once in a token, since their
    // tags come again after thousands of tokens; by the threads that write them when the first layer with this partition has come to it.
    __device__ __forceinline__ void keep_apart(u32 position, u32 tag) const {
#pragma unroll 1
        for (u32 i = num_partitions(kFirstFull, position) * kLanes; i < kPartitions * kLanes; ++i) {
            const u32 partition = i / kLanes, lane_idx = i % kLanes;
#pragma unroll 1
            for (u32 item = first_item(role, kFirstFull, lane_idx, partition); item < kItems; item += kNumCtas) {
#pragma unroll 1
                for (u32 unit = warp * 32 + lane; unit < kGroup * kHeadUnits; unit += kAttendThreads) {
                    const u64 nothing = make_pair_word(0, 0, tag);
                    const u32 row = (item / kSplits * kGroup + unit / kHeadUnits) * kSplits + item % kSplits;
                    publish(row, partition, lane_idx, unit, nothing, nothing, -INFINITY, tag);
                }
            }
        }
    }

    // The outputs of a KV head's splits, mixed: the thread block that has split i of them does that for the i-th share of the head's values, and
    // publishes them as OUT's input. A thread has one split of a unit, or two where experts' warps would else have two units one after the other;
    // neighbouring threads have the others. Where splits are no power of two, the last threads have one less.
    static constexpr u32 kUnits = kGroup * kHeadUnits, kShareUnits = (kUnits + kSplits - 1) / kSplits;
    static constexpr u32 kRoundSplits = kSplits > 16 ? 32 : kSplits > 8 ? 16 : 8, kMissingSplits = kRoundSplits - kSplits;
    static constexpr u32 kSplitsOfThread = kExperts && kShareUnits > kAttendWarps * (32 / kRoundSplits) ? 2 : 1;
    static constexpr u32 kMixThreads = kRoundSplits / kSplitsOfThread, kUnitsOfWarp = 32 / kMixThreads;
    static_assert(kMissingSplits <= kMixThreads, "a thread has one less, or none");
    static_assert(32 % kMixThreads == 0 && kReplicas <= kMixThreads, "the splits of a unit are in one warp");
    struct Part {
        ulonglong2 values;
        u64 log_sum;
    };
    static __device__ __forceinline__ bool is_part(const Part& got, u32 tag) {
        return (tag_difference(got.values, tag) | (static_cast<u32>(got.log_sum >> 32) ^ tag)) == 0;
    }
    __device__ __forceinline__ bool wait_for_parts(const u64* values, const u64* log_sum, u32 num_mine, u32 tag, Part (&got)[1]) const {
        bool ready = num_mine == 0;
        if (kMissingSplits > 0) got[0] = {};
        while (true) {
            if (kOneStream ? !ready : num_mine > 0) {
                got[0] = {load_relaxed_x2(values), load_relaxed(log_sum)};
                ready = is_part(got[0], tag);
            }
            if (__all_sync(kFullWarp, ready)) return true;
            if (must_leave(role.stopped())) return false;
        }
    }
    // Of two splits at once: their looks are under way together. What is not asked for is empty: else registers would be kept for it.
    __device__ __forceinline__ bool wait_for_parts(const u64* values, const u64* log_sums, u32 num_mine, u32 tag, Part (&got)[2]) const {
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
            if (must_leave(role.stopped())) return false;
        }
    }
    __device__ __forceinline__ bool mix_parts(u32 layer, u32 lane_idx, u32 item_idx, u32 partitions) const {
        const u32 lane = opaque(this->lane), warp = opaque(this->warp), kv_head = item_idx / kSplits, share = item_idx % kSplits, split = lane % kMixThreads, tag = tag_in(layer);
        u64* words = reinterpret_cast<u64*>(params.words_ptr);
#pragma unroll 1
        for (u32 first = warp * kUnitsOfWarp; first < kShareUnits; first += kAttendWarps * kUnitsOfWarp) {
            const u32 of_share = first + lane / kMixThreads, unit = share * kShareUnits + of_share;
            const bool is_mine = of_share < kShareUnits && unit < kUnits;
            const u32 head = kv_head * kGroup + (is_mine ? unit / kHeadUnits : 0), place = is_mine ? unit % kHeadUnits : 0, row = head * kSplits + split;
            const u64* values = words + kPartOffset + lane_idx * kPartStride + (row * kHeadUnits + place) * 2;
            const u64* log_sums = words + kLogSumOffset + lane_idx * kLogSumStride + row;
            const u32 num_mine = is_mine ? kSplitsOfThread - (split >= kMixThreads - kMissingSplits) : 0;
            float peak = -INFINITY, total = 0;
            float4 sum = make_float4(0, 0, 0, 0);
            [[maybe_unused]] float sink = 0;  // one more logit of the head, of which nothing is mixed
            if constexpr (kSinks) sink = WeightFormat::low(reinterpret_cast<const u16*>(params.sinks_ptr)[(layer * kLanes + lane_idx) * kHeads + head]) * kLog2e;
#pragma unroll 1
            for (u32 partition = 0; partition < partitions; ++partition) {
                Part got[kSplitsOfThread];
                if (!wait_for_parts(values, log_sums, num_mine, tag, got)) return false;
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
                if (!wait_for_gates(words, lane_idx, 0, head, place, is_mine && split < kReplicas, tag, gates)) return false;
            publish_mixed(words, lane_idx, 0, head, place, split, is_mine, peak, total, sum, sink, gates, tag);
        }
        return true;
    }
    // What the four values of a unit are multiplied with: the sigmoid of its gate rows, which may come later than the splits. False: leave.
    __device__ __forceinline__ bool wait_for_gates(const u64* words, u32 lane_idx, u32 token, u32 head, u32 place, bool is_mine, u32 tag, float4& gates) const {
        const u64* at = words + kQkvOffset + (lane_idx * kTokens + token) * kQkvStride + (kGateRow + head * kHeadDim) / 2 + place * 2;
        ulonglong2 got = {};
        while (true) {
            if (is_mine) got = load_relaxed_x2(at);
            if (__all_sync(kFullWarp, !is_mine || tag_difference(got, tag) == 0)) break;
            if (must_leave(role.stopped())) return false;
        }
        gates = make_float4(sigmoid(first_of(got.x)), sigmoid(second_of(got.x)), sigmoid(first_of(got.y)), sigmoid(second_of(got.y)));
        return true;
    }
    // What neighbouring threads have of a unit's splits, mixed. `sink`: one more logit of the head. `gates`: of gated heads.
    __device__ __forceinline__ void publish_mixed(u64* words, u32 lane_idx, u32 token, u32 head, u32 place, u32 split, bool is_mine, float peak, float total,
                                                  float4 sum, float sink, const float4& gates, u32 tag) const {
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

    // sum * shrink + weight * value as the device's compiler makes it in mix_parts, where it chooses itself which product is rounded (the second);
    // a host's rounds both.
    static __device__ __forceinline__ float in_mix(float sum, float shrink, float weight, float value) {
#ifdef __CUDA_ARCH__
        return sum_of_products(sum, shrink, weight, value);
#else
        return sum * shrink + weight * value;
#endif
    }
    // The same of all tokens of a pass: their looks are under way together.
    __device__ __forceinline__ bool mix_parts_of_pass(u32 lane_idx, u32 item_idx, u32 layer) const {
        const u32 lane = opaque(this->lane), warp = opaque(this->warp), kv_head = item_idx / kSplits, share = item_idx % kSplits, split = lane % kMixThreads, tag = tag_in(layer);
        u64* words = reinterpret_cast<u64*>(params.words_ptr);
#pragma unroll 1
        for (u32 first = warp * kUnitsOfWarp; first < kShareUnits; first += kAttendWarps * kUnitsOfWarp) {
            const u32 of_share = first + lane / kMixThreads, unit = share * kShareUnits + of_share;
            const bool is_mine = of_share < kShareUnits && unit < kUnits;
            const u32 num_mine = is_mine ? kSplitsOfThread - (split >= kMixThreads - kMissingSplits) : 0;
            const u32 head = kv_head * kGroup + (is_mine ? unit / kHeadUnits : 0), place = is_mine ? unit % kHeadUnits : 0, row = head * kSplits + split;
            const u64* values = words + kPartOffset + lane_idx * (kTokens * kPartStride) + (row * kHeadUnits + place) * 2;
            const u64* log_sums = words + kLogSumOffset + lane_idx * (kTokens * kLogSumStride) + row;
            [[maybe_unused]] float sink = 0;
            if constexpr (kSinks) sink = WeightFormat::low(reinterpret_cast<const u16*>(params.sinks_ptr)[(layer * kLanes + lane_idx) * kHeads + head]) * kLog2e;
            Part got[kSplitsOfThread][kTokens] = {};
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
                if (must_leave(role.stopped())) return false;
            }
#pragma unroll 1
            for (u32 token = 0; token < kTokens; ++token) {
                float peak = -INFINITY, total = 0;
                float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
                for (u32 i = 0; i < kSplitsOfThread; ++i) {  // as in mix_parts
                    const Part part = of_token(got[i], token);
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
                    if (!wait_for_gates(words, lane_idx, token, head, place, is_mine && split < kReplicas, tag, gates)) return false;
                publish_mixed(words, lane_idx, token, head, place, split, is_mine, peak, total, sum, sink, gates, tag);
            }
        }
        return true;
    }

    // What a team's warps have of a split, normalised and published with the logarithm (base 2) of their sum.
    __device__ __forceinline__ bool merge(u32 layer, u32 kv_head, u32 split, u32 partition, u32 lane_idx, const Mixed (&mixed)[kWarpSets]) {
        const u32 warp = opaque(this->warp), half = num_items & 1;
#pragma unroll
        for (u32 s = 0; s < kWarpSets; ++s) keep_mixed(half, 0, warp, s, mixed[s]);
        return merge_shares(layer, kv_head, split, partition, lane_idx, 0, warp);
    }
    // What a share of a split's batches has become, for set `s` of a team's. `share`: the warp of a single token that has it.
    __device__ __forceinline__ void keep_mixed(u32 half, u32 token, u32 share, u32 s, const Mixed& own) {
        Shared& shared = *role.shared;
        const u32 lane = opaque(this->lane), group = lane >> 2, head = lane & 3;
        float sum = own.sum;
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        const float offset = kKvRotated ? (own.weights[0] + own.weights[1]) * (kKvMostValue * kMiddle) : 0.0f;
        if (head < num_heads(team_of(share) * kWarpSets + s)) {
            const u32 place = s * kSetHeads + head;
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i)
                *reinterpret_cast<float2*>(&shared.attended[half][token][share][place][value_dim(group, 2 * i)]) =
                    make_float2((own.outputs[i][0] + own.outputs[i][1] - offset) * kUnscale,
                                (own.outputs[i][2] + own.outputs[i][3] - offset * kOddPairs) * (kUnscale / kOddPairs));
            if (group == 0) {
                shared.attended_max[half][token][share][place] = own.peak;
                shared.attended_sum[half][token][share][place] = sum;
            }
        }
    }
    // The barrier of a token's shares in half 0 of `attended`.
    __device__ __forceinline__ u32 merged_at(u32 token) const { return role.base + KOG_OFFSET(merge_full) + token * 8; }
    // All shares of a split of the tokens from `first_token` on, by warp `own` of their warps.
    __device__ __forceinline__ bool merge_shares(u32 layer, u32 kv_head, u32 split, u32 partition, u32 lane_idx, u32 first_token, u32 own) {
        const u32 lane = opaque(this->lane), number = num_items++, half = kAttendedHalves == 1 ? 0 : number & 1;
        Shared& shared = *role.shared;
        const u32 full = merged_at(half * kTokens + first_token);
        __syncwarp();
        if (lane == 0) mbar_arrive(full);
        if (!mbar_wait(role.stopped(), full, number / kAttendedHalves & 1)) return false;
        if (warp == 0) stamp(role, kMerged, turn, product);
        const u32 tag = tag_in(layer);
#pragma unroll 1
        for (u32 token = first_token; token < first_token + kWarpTokens; ++token) {
#pragma unroll 1
            for (u32 unit = own * 32 + lane; unit - lane < kUnits; unit += kTokenWarps * 32) {  // whole warps: rows are rotated
                const bool is_mine = unit < kUnits;
                const u32 query_head = is_mine ? unit / kHeadUnits : 0, dim = (unit % kHeadUnits) * 4;
                const u32 first_warp = query_head / kWarpHeads * kTeamWarps, head = query_head % kWarpHeads;
                float top = shared.attended_max[half][token][first_warp][head];
#pragma unroll
                for (int i = 1; i < kTeamWarps; ++i) top = fmaxf(top, shared.attended_max[half][token][first_warp + i][head]);
                const float safe_top = top == -INFINITY ? 0.0f : top;
                float total = 0;
                float4 outputs = make_float4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < kTeamWarps; ++i) {
                    const float weight = exp2_approx(shared.attended_max[half][token][first_warp + i][head] - safe_top);
                    const float4 v = *reinterpret_cast<const float4*>(&shared.attended[half][token][first_warp + i][head][dim]);
                    total += weight * shared.attended_sum[half][token][first_warp + i][head];
                    outputs = make_float4(outputs.x + weight * v.x, outputs.y + weight * v.y, outputs.z + weight * v.z, outputs.w + weight * v.w);
                }
                if constexpr (kKvRotated) outputs = rotated_row<kHeadUnits>(outputs, lane, kKvFactorOut);
                const float inverse = top == -INFINITY ? 0.0f : reciprocal_approx(total);
                const float log_sum = top == -INFINITY ? -INFINITY : top + log2_approx(total);
                const u64 first = make_pair_word(outputs.x * inverse, outputs.y * inverse, tag);
                const u64 second = make_pair_word(outputs.z * inverse, outputs.w * inverse, tag);
                if (is_mine) publish((kv_head * kGroup + query_head) * kSplits + split, partition, lane_idx, unit, first, second, log_sum, tag, token);
            }
        }
        if constexpr (kMergesInTurn) {
            __syncwarp();
            if (lane == 0) mbar_arrive(full + 8);
        } else if constexpr (kAttendedHalves == 1) {
            __syncwarp();
        }
        return true;
    }
};

// `nets`: in models with delta nets what they need, which these warps do as well.
template <class Nets>
__device__ __forceinline__ void attend(const KogDecodeParams& params, const Nets& nets, const Role& role, u32 warp) {
    Attender attender{params, role, warp, laneid()};
    Pass pass;
#ifdef KOG_DELTA_PASSES
    DeltaStates states;
    pass.is_none = 0;  // where warps leave before a pass is announced
#endif
    for (u32 turn = 0; begin_pass(role, turn, pass); ++turn) {
        const u32 position = pass.position;
        attender.turn = turn;
#ifdef KOG_COMPANY
        attender.sit(pass);
#endif
#ifdef KOG_DELTA_PASSES
        states.begin_pass(turn, position);
#endif
        if (!kHeadOnly) attender.keep_apart(position, attender.tag_in(kFirstFull));
        const auto end_product = [&](u32 i) {
            if (warp == 0) stamp(role, kAttended, turn, attender.product);
#ifdef KOG_AWAITS_ATTENTION
            if (i % kLanes == kLanes - 1 && attender.lane == 0) mbar_arrive(role.base + KOG_OFFSET(attended_full));
#endif
        };
#pragma unroll 1
        for (u32 i = kHeadOnly ? kLayers * kLanes : 0; i < kLayers * kLanes; ++i) {
            attender.product = kMixerProducts[i];
            const Place at(attender.product);
#ifdef KOG_DELTA
            if (has_delta_net(at.layer())) {
                const u32 lane_idx = at.lane() + i % kDeltaInLanes;
                const DeltaRule rule{params, nets, role, warp, attender.lane, turn, attender.product};
#ifdef KOG_DELTA_PASSES
                if (!states.take(rule, at.layer(), lane_idx, position, kTokens, attender.tag_in(at.layer()), attender.first_vector + attender.product + 1)) return;
#else
#pragma unroll 1
                for (u32 item = first_delta_item(role, at.layer(), lane_idx); item < kDeltaItems; item += kNumCtas)
                    if (!rule.item(at.layer(), lane_idx, item, position, attender.tag_in(at.layer()), attender.num_items++, attender.first_vector + attender.product + 1))
                        return;
#endif
                end_product(i);
                continue;
            }
#endif
            const u32 lane_idx = at.lane() + i % kQkvLanes;
            if constexpr (kTokens > 1) {
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                    if (!attender.item_of_pass(pass, at.layer(), lane_idx, item)) return;
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                    if (!attender.mix_parts_of_pass(lane_idx, item, at.layer())) return;
                if (warp == 0) stamp(role, kAttended, turn, attender.product);
                continue;
            }
#pragma unroll 1
            for (u32 partition = 0; partition < num_partitions(at.layer(), position); ++partition) {
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, partition); item < kItems; item += kNumCtas)
                    if (!attender.item(at.layer(), lane_idx, item, partition, position)) return;
            }
            // All that others wait for is published.
#pragma unroll 1
            for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                if (!attender.mix_parts(at.layer(), lane_idx, item, num_partitions(at.layer(), position))) return;
            end_product(i);
        }
        attender.first_vector += kTokenVectors - (has_head(role, turn) ? 0 : kHeadProducts);
#ifdef KOG_DELTA_PASSES
        states.end_pass(position);
#endif
    }
#ifdef KOG_DELTA_PASSES
    if (pass.is_none) states.settle(params, nets, role, warp, pass.position);
#endif
}

}  // namespace kog
