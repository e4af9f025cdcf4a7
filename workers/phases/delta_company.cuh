// A gated delta net in passes whose tokens are of several requests: an item takes the step of each request that goes on, one after the other, from a state
// and last inputs of its own. A thread has the same values of every request's state, so requests may change seats between launches. A token that stands in
// for another one takes no step: what comes of that one's is published as its own, too.
#pragma once
#include "delta_item.cuh"

namespace kog {

#ifdef KOG_DELTA_COMPANY
struct DeltaCompany : DeltaItem {
    using DeltaItem::DeltaItem;

    // Of the request in a seat: this item's columns, and behind them its last inputs.
    __device__ __forceinline__ float* state_of(u32 seat) const {
        return reinterpret_cast<float*>(role.states.state_ptr[seat]) + u64{net * kDeltaItems + item_idx} * kDeltaItemValues;
    }
    // Those of all seats that follow the first one: who comes to one finds it in the L2 cache.
    __device__ __forceinline__ void read_ahead(const Pass& pass) const {
        if (warp != 0 || lane != 0) return;
#pragma unroll 1
        for (u32 seat = 1; seat < kTokens; ++seat)
            if (pass.seat_of(seat) == seat && pass.positions[seat] > 0) prefetch_l2(state_of(seat), kDeltaItemValues * sizeof(float));
    }
    // What this thread has published of a token, as that of one that stands in for it.
    __device__ __forceinline__ void publish_again(u32 token, u32 other) const {
        if (lane >= kReplicas) return;
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group) {
            const ulonglong2 outputs = load_relaxed_x2(attended_of(token) + 2 * group);
            store_relaxed_x2(attended_of(other) + 2 * group, outputs.x, outputs.y);
        }
        store_relaxed(squares_of(other), load_relaxed(squares_of(token)));
    }
    // The step of the request in a seat, behind `position` tokens. `number`: how often this thread block's warps have met in this launch. `product`:
    // products up to the one that made the inputs. False: leave.
    __device__ __forceinline__ bool step(u32 seat, u32 position, u32 tag, u32 product, u32 number) const {
        float* state = state_of(seat);
        float4* stored = reinterpret_cast<float4*>(state) + warp * (kColumnGroups * kKeyDim) + lane;
        float* ring = state + kStateValues;
        Columns columns;
        load_columns(stored, position, columns);
        float past[kThreadChannels][kConvWidth - 1], taps[kThreadChannels][kConvWidth];
        load_channels(ring, position, past, taps);
        const u16* factors = reinterpret_cast<const u16*>(delta.factors_ptr) + net * (2 * kDeltaHeads) + head;
        const float rate = exp2_approx(WeightFormat::low(factors[0]) * kLog2e), dt_bias = WeightFormat::low(factors[kDeltaHeads]);
        if (!counter_wait<600>(role.stopped(), role.base + KOG_OFFSET(num_finalized), product)) return false;
        Inputs inputs;
        if (!wait_for_inputs(seat, tag, inputs)) return false;
        if (warp == 0) stamp(role, kQuerySeen, turn, stamped);
        float* convolved = role.shared->convolved[number & 1];
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) {
            if (channel_of(i) >= kItemChannels) continue;
            const float newest = inputs.channels[i], sum = convolve(past[i], newest, taps[i]);
            convolved[channel_of(i)] = sum * sigmoid(sum);
            ring[position % kConvWidth * kItemChannels + channel_of(i)] = newest;
        }
        if (!meet(role.base + KOG_OFFSET(convolved_full) + (number & 1) * 8, number)) return false;
        if (warp == 0) stamp(role, kScored, turn, stamped);
        apply(convolved, decay_of(rate, inputs.decay + dt_bias), sigmoid(inputs.beta), inputs, seat, true, tag, columns);
        store_columns(columns, stored);
        return true;
    }
    // Those of all requests that go on. False: leave.
    __device__ __forceinline__ bool take(const Pass& pass, u32 tag, u32 product, u32& num_met) const {
        read_ahead(pass);
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            const u32 seat = pass.seat_of(token);
            if (seat == token && !step(seat, pass.positions[seat], tag, product, num_met++)) return false;
        }
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token)
            if (pass.seat_of(token) != token) publish_again(pass.seat_of(token), token);
        return true;
    }
};

// The items of a layer and a lane for the pass's requests. False: leave.
__device__ __forceinline__ bool take_items(const DeltaRule& rule, u32 layer, u32 lane_idx, u32 tag, u32 product, u32& num_met) {
    const Pass& pass = rule.role.shared->passes[rule.turn & 1];
#pragma unroll 1
    for (u32 item = first_delta_item(rule.role, layer, lane_idx); item < kDeltaItems; item += kNumCtas)
        if (!DeltaCompany(rule, layer, lane_idx, item).take(pass, tag, product, num_met)) return false;
    return true;
}
#endif

}  // namespace kog
