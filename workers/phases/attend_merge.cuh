// What a thread block's warps have of a split, put together: each leaves its outputs in shared memory (`attended`), and publishes a share of what they
// make as words of a part of attention's output.
#pragma once
#include "attend_batches.cuh"

namespace kog {

// Units, of four values, of a head's output, and of a KV head's query heads.
constexpr int kHeadUnits = kHeadDim / 4;
constexpr u32 kGroupUnits = kGroup * kHeadUnits;

// What a share of a split's batches has become, for set `s` of a team's. `share`: the warp of a single token that has it.
__device__ __forceinline__ void keep_mixed(const AttendWarp& self, u32 half, u32 token, u32 share, u32 s, const Mixed& own) {
    Shared& shared = *self.role.shared;
    const u32 lane = opaque(self.lane), group = lane >> 2, head = lane & 3;
    float sum = own.sum;
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    const float offset = kKvRotated ? (own.weights[0] + own.weights[1]) * (kKvMostValue * kMiddle) : 0.0f;
    if (head < heads_of_set(team_of(share) * kWarpSets + s)) {
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
// Four values of unit `unit` of a split's outputs, and with a head's first ones the log-sum. `row`: head and split.
__device__ __forceinline__ void publish_part(const AttendWarp& self, u32 row, u32 partition, u32 lane_idx, u32 unit, u64 first, u64 second, float log_sum,
                                             u32 tag, u32 token = 0) {
    u64* base = reinterpret_cast<u64*>(self.params.words_ptr);
    const u32 place = unit % kHeadUnits;
    store_relaxed_x2(base + kPartOffset + (lane_idx * kTokens + token) * kPartStride + partition * kPartitionWords + (row * kHeadUnits + place) * 2, first,
                     second);
    if (place == 0)
        store_relaxed(base + kLogSumOffset + (lane_idx * kTokens + token) * kLogSumStride + partition * kLogSumWords + row,
                      make_value_word(__float_as_uint(log_sum), tag));
}
// The barrier of a token's shares in half 0 of `attended`.
__device__ __forceinline__ u32 merged_at(const AttendWarp& self, u32 token) { return self.role.base + KOG_OFFSET(merge_full) + token * 8; }
// All shares of a split of the tokens from `first_token` on, by warp `own` of their warps. It is one more item of `self`.
__device__ __forceinline__ bool merge_shares(AttendWarp& self, u32 layer, u32 kv_head, u32 split, u32 partition, u32 lane_idx, u32 first_token, u32 own) {
    const u32 lane = opaque(self.lane), number = self.num_items++, half = kAttendedHalves == 1 ? 0 : number & 1;
    Shared& shared = *self.role.shared;
    const u32 full = merged_at(self, half * kTokens + first_token);
    __syncwarp();
    if (lane == 0) mbar_arrive(full);
    if (!mbar_wait(self.role.stopped(), full, number / kAttendedHalves & 1)) return false;
    if (self.warp == 0) stamp(self.role, kMerged, self.turn, self.product);
    const u32 tag = self.tag_in(layer);
#pragma unroll 1
    for (u32 token = first_token; token < first_token + kWarpTokens; ++token) {
#pragma unroll 1
        for (u32 unit = own * 32 + lane; unit - lane < kGroupUnits; unit += kTokenWarps * 32) {  // whole warps: rows are rotated
            const bool is_mine = unit < kGroupUnits;
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
            if (is_mine) publish_part(self, (kv_head * kGroup + query_head) * kSplits + split, partition, lane_idx, unit, first, second, log_sum, tag, token);
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
// What a team's warps have of a split, normalised and published with the logarithm (base 2) of their sum.
__device__ __forceinline__ bool merge_split(AttendWarp& self, u32 layer, u32 kv_head, u32 split, u32 partition, u32 lane_idx, const Mixed (&mixed)[kWarpSets]) {
    const u32 warp = opaque(self.warp), half = self.num_items & 1;
#pragma unroll
    for (u32 s = 0; s < kWarpSets; ++s) keep_mixed(self, half, 0, warp, s, mixed[s]);
    return merge_shares(self, layer, kv_head, split, partition, lane_idx, 0, warp);
}
// Nobody reads the words of a partition that the context has not come to. They are written all the same, once in a token, since their
// tags come again after thousands of tokens; by the threads that write them when the first layer with this partition has come to it.
__device__ __forceinline__ void keep_apart(const AttendWarp& self, u32 position, u32 tag) {
#pragma unroll 1
    for (u32 i = num_partitions(kFirstFull, position) * kLanes; i < kPartitions * kLanes; ++i) {
        const u32 partition = i / kLanes, lane_idx = i % kLanes;
#pragma unroll 1
        for (u32 item = first_item(self.role, kFirstFull, lane_idx, partition); item < kItems; item += kNumCtas) {
#pragma unroll 1
            for (u32 unit = self.warp * 32 + self.lane; unit < kGroup * kHeadUnits; unit += kAttendThreads) {
                const u64 nothing = make_pair_word(0, 0, tag);
                const u32 row = (item / kSplits * kGroup + unit / kHeadUnits) * kSplits + item % kSplits;
                publish_part(self, row, partition, lane_idx, unit, nothing, nothing, -INFINITY, tag);
            }
        }
    }
}

}  // namespace kog
