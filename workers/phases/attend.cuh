// Attention of one position. A split is a KV head's positions p with p % kSplits == split; an item index counts those of all KV heads. A
// layer without a window has more of them far into a context: each partition takes the next kPartitionBatches batches of a split. Splits are
// spread over the thread blocks by a map that depends on layer, lane and partition only, their batches over the warps. So the thread that appends its
// share of a row of K and V is the one that reads it later, and the append needs no fence. Lanes that have the same KV head (kSharingLanes) append the same
// bits to the same place: each reads what it has written itself, and waits for none of the others. A split keeps its rows in batches of 16 (K by rows,
// V by pairs of positions, as the matrix unit wants them). Windowed layers keep a ring of batches, or all turns of it (kWholeWindows): what is
// read, by whom and in which order is the same.
#pragma once
#include "attend_parts.cuh"
#include "delta_company.cuh"
#include "delta_pass.cuh"

namespace kog {

// A batch before the query has come.
__device__ __forceinline__ void load_first_batch(const AttendWarp& self, const CacheRows& rows, u32 batch, CacheBatch& to) {
    load_keys<kWholeWindows, false>(self, rows, batch, to);
    if constexpr (!kValuesLate) load_values<kWholeWindows, false>(self, rows, batch, to);
}
// Each warp for the query heads of its sets.
__device__ __forceinline__ bool attend_split(AttendWarp& self, u32 layer, u32 lane_idx, u32 item_idx, u32 partition, u32 position) {
    const u32 warp = opaque(self.warp), kv_head = item_idx / kSplits, split = item_idx % kSplits;
    const u32 first_set = team_of(warp) * kWarpSets, first = share_of(warp);
    const CacheRows rows = rows_of(self, layer, lane_idx, item_idx, partition, position);
    // They are on their way, or here before the query is.
    CacheBatch batches[kBatches];
#pragma unroll
    for (u32 i = 0; i < kBatches; ++i)
        load_first_batch(self, rows, first + i * kTeamWarps, batches[i]);
    const u64* words = reinterpret_cast<const u64*>(self.params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
    const bool has_fresh = rows.fresh_batch != kNoBatch && rows.fresh_batch % kTeamWarps == first;
    Query queries[1][kWarpSets];
    const u32 positions[1] = {position};
    if (!wait_for_query(self, words, words, layer, kv_head, first_set, positions, position, has_fresh, self.tag_in(layer), queries)) return false;
    if (warp == 0) stamp(self.role, kQuerySeen, self.turn, self.product);
    const Sight sights[1] = {{rows.last, rows.num_seen}};
    Mixed mixed[1][kWarpSets];
#pragma unroll 1
    for (u32 batch = first; batch < rows.num_batches; batch += kBatches * kTeamWarps) {
#pragma unroll
        for (u32 i = 0; i < kBatches; i += kMixedBatches) {
            const u32 number = batch + i * kTeamWarps;
            if (i == 0 || number < rows.num_batches) mix_batches(self, rows, sights, first_set, number, number + kBatches * kTeamWarps, queries,
                                                                batches + i, mixed);
        }
    }
    if (warp == 0) stamp(self.role, kMixed, self.turn, self.product);
    return merge_split(self, layer, kv_head, split, partition, lane_idx, mixed[0]);
}

// ---- several tokens ----
// A split of all tokens of a pass, by the warps that the tokens have. Tokens of several requests have a row each, which is nobody else's.
__device__ __forceinline__ bool attend_split_of_pass(AttendWarp& self, const Pass& pass, u32 layer, u32 lane_idx, u32 item_idx) {
    const u32 warp = opaque(self.warp), kv_head = item_idx / kSplits, split = item_idx % kSplits, token = token_of(warp), first = warp % kTokenWarps;
    u32 row_token = 0;  // whose row is this split's, if any
#ifdef KOG_COMPANY
    row_token = self.position % kSplits == split ? token : kTokens;
#else
#pragma unroll 1
    while (row_token < kTokens && pass.position_of(row_token) % kSplits != split) ++row_token;
#endif
    const bool has_row = row_token < kTokens, sees_row = has_row && row_token < token + kWarpTokens;
#ifdef KOG_COMPANY
    const u32 row_position = self.position;
#else
    const u32 row_position = pass.position_of(has_row ? row_token : 0);
#endif
    u32 positions[kWarpTokens];
    Sight sights[kWarpTokens];
    CacheRows rows;
#pragma unroll
    for (u32 t = 0; t < kWarpTokens; ++t) {
#ifdef KOG_COMPANY
        positions[t] = self.position;
#else
        positions[t] = pass.position_of(token + t);
#endif
        rows = rows_of(self, layer, lane_idx, item_idx, 0, positions[t]);
        sights[t] = {rows.last, rows.num_seen};
    }
    const u32 row_batch = has_row ? row_position / kSplits % rows.capacity / 16 : kNoBatch;
    rows.fresh_batch = sees_row ? row_batch : kNoBatch;
    const bool has_fresh = has_row && row_batch % kTokenWarps == first;
    const u64* words = reinterpret_cast<const u64*>(self.params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
    const u32 half = kAttendedHalves == 1 ? 0 : self.num_items & 1;
    read_first_batches(self, rows, first);
    CacheBatch batch;
    // Sets that a single token's teams have at the same time follow each other.
#pragma unroll 1
    for (u32 team = 0; team < kTeams; ++team) {
        const u32 first_set = team * kWarpSets;
        load_first_batch(self, rows, first, batch);
        Query queries[kWarpTokens][kWarpSets];
        if (!wait_for_query(self, words + token * kQkvStride, words + (has_row ? row_token : 0) * kQkvStride, layer, kv_head, first_set, positions,
                            row_position, has_fresh && team == 0, self.tag_in(layer), queries))
            return false;
        if (warp == 0) stamp(self.role, kQuerySeen, self.turn, self.product);
        if (kMergesInTurn && team == 0 && self.num_items > 0 && !mbar_wait(self.role.stopped(), merged_at(self, token) + 8, (self.num_items - 1) & 1))
            return false;
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
                if (team == 0) read_batch_in_turn(self, rows, share, number);
                // Behind a share's last batch comes the first one of the share that follows.
                const u32 following = share + kTokenWarps < kTeamWarps ? share + kTokenWarps : kNoBatch;
                const u32 next = number + kTeamWarps < rows.num_batches ? number + kTeamWarps : following;
                mix_batches(self, rows, sights, first_set, number, next, queries, &batch, mixed);
            }
#pragma unroll
            for (u32 t = 0; t < kWarpTokens; ++t)
#pragma unroll
                for (u32 s = 0; s < kWarpSets; ++s) keep_mixed(self, half, token + t, team * kTeamWarps + share, s, mixed[t][s]);
        }
    }
    // A row of a later token: this warp's threads will read it in later passes.
    if (has_fresh && !sees_row) {
        rows = rows_of(self, layer, lane_idx, item_idx, 0, row_position);
        load_keys<kWholeWindows, false>(self, rows, row_batch, batch), load_values<kWholeWindows, false>(self, rows, row_batch, batch);
        put_fresh(self, rows, batch);
    }
    if (warp == 0) stamp(self.role, kMixed, self.turn, self.product);
    return merge_shares(self, layer, kv_head, split, 0, lane_idx, token, first);
}

// `nets`: in models with delta nets what they need, which these warps do as well.
template <class Nets>
__device__ __forceinline__ void attend(const KogDecodeParams& params, const Nets& nets, const Role& role, u32 warp) {
    AttendWarp self{params, role, warp, laneid()};
    Pass pass;
#ifdef KOG_DELTA_PASSES
    DeltaStates states;
    pass.is_none = 0;  // where warps leave before a pass is announced
#endif
#ifdef KOG_DELTA_COMPANY
    u32 num_met = 0;  // how often this thread block's warps have met over items of delta nets
#endif
    for (u32 turn = 0; begin_pass(role, turn, pass); ++turn) {
        const u32 position = pass.position;
        self.turn = turn;
#if defined KOG_COMPANY && !defined KOG_DELTA_COMPANY
        self.sit(pass);
#endif
#ifdef KOG_DELTA_PASSES
        states.begin_pass(turn, position);
#endif
        if (!kHeadOnly) keep_apart(self, position, self.tag_in(kFirstFull));
        const auto end_product = [&](u32 i) {
            if (warp == 0) stamp(role, kAttended, turn, self.product);
#ifdef KOG_AWAITS_ATTENTION
            if (i % kLanes == kLanes - 1 && self.lane == 0) mbar_arrive(role.base + KOG_OFFSET(attended_full));
#endif
        };
#pragma unroll 1
        for (u32 i = kHeadOnly ? kLayers * kLanes : 0; i < kLayers * kLanes; ++i) {
            self.product = kMixerProducts[i];
            const Place at(self.product);
#ifdef KOG_DELTA
            if (has_delta_net(at.layer())) {
                const u32 lane_idx = at.lane() + i % kDeltaInLanes;
                const DeltaRule rule{params, nets, role, warp, self.lane, turn, self.product};
#ifdef KOG_DELTA_PASSES
                if (!states.take(rule, at.layer(), lane_idx, position, kTokens, self.tag_in(at.layer()), self.first_vector + self.product + 1)) return;
#elif defined KOG_DELTA_COMPANY
                if (!take_items(rule, at.layer(), lane_idx, self.tag_in(at.layer()), self.first_vector + self.product + 1, num_met)) return;
#else
#pragma unroll 1
                for (u32 item = first_delta_item(role, at.layer(), lane_idx); item < kDeltaItems; item += kNumCtas)
                    if (!rule.item(at.layer(), lane_idx, item, position, self.tag_in(at.layer()), self.num_items++, self.first_vector + self.product + 1))
                        return;
#endif
                end_product(i);
                continue;
            }
#endif
            const u32 lane_idx = at.lane() + i % kQkvLanes;
#ifdef KOG_DELTA_COMPANY
            self.sit(role.shared->passes[turn & 1]);  // here, since a delta net's item leaves no registers to keep it in
#endif
            if constexpr (kTokens > 1) {
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                    if (!attend_split_of_pass(self, pass, at.layer(), lane_idx, item)) return;
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                    if (!mix_parts_of_pass(self, lane_idx, item, at.layer())) return;
                if (warp == 0) stamp(role, kAttended, turn, self.product);
                continue;
            }
#pragma unroll 1
            for (u32 partition = 0; partition < num_partitions(at.layer(), position); ++partition) {
#pragma unroll 1
                for (u32 item = first_item(role, at.layer(), lane_idx, partition); item < kItems; item += kNumCtas)
                    if (!attend_split(self, at.layer(), lane_idx, item, partition, position)) return;
            }
            // All that others wait for is published.
#pragma unroll 1
            for (u32 item = first_item(role, at.layer(), lane_idx, 0); item < kItems; item += kNumCtas)
                if (!mix_parts(self, at.layer(), lane_idx, item, num_partitions(at.layer(), position))) return;
            end_product(i);
        }
        self.first_vector += kTokenVectors - (has_head(role, turn) ? 0 : kHeadProducts);
#ifdef KOG_DELTA_PASSES
        states.end_pass(position);
#endif
    }
#ifdef KOG_DELTA_PASSES
    if (pass.is_none) states.settle(params, nets, role, warp, pass.position);
#endif
}

}  // namespace kog
