// A gated delta net in passes of several tokens. A pass takes an item's state through the steps of all of its tokens, in registers; it writes the one
// behind its first token, which alone is certain to count, and keeps what the others brought. The next pass takes the steps of those that have counted
// once more, before its own; so does the end of a launch, behind which states are where the request is. What is kept each thread reads and writes for
// itself, as it does states.
#pragma once
#include "delta_item.cuh"

namespace kog {

#ifdef KOG_DELTA_PASSES
struct DeltaPass : DeltaItem {
    using DeltaItem::DeltaItem;

    // Of all tokens but a pass's first one.
    __device__ __forceinline__ float* kept_of(u32 number) const {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kDeltaKeptOffset;
        return reinterpret_cast<float*>(words + u64{(net * kDeltaItems + item_idx) * (kTokens - 1) + number} * kDeltaKeptStride);
    }
    __device__ __forceinline__ void keep(u32 number, const Inputs& inputs) const {
        float* kept = kept_of(number);
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i)
            if (channel_of(i) < kItemChannels) kept[channel_of(i)] = inputs.channels[i];
        if (lane == 0) kept[kItemChannels + 2 * warp] = inputs.decay, kept[kItemChannels + 2 * warp + 1] = inputs.beta;
    }
    __device__ __forceinline__ void load_kept(u32 number, Inputs& inputs) const {
        const float* kept = kept_of(number);
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) inputs.channels[i] = channel_of(i) < kItemChannels ? kept[channel_of(i)] : 0.0f;
        inputs.decay = kept[kItemChannels + 2 * warp], inputs.beta = kept[kItemChannels + 2 * warp + 1];
    }
    // Steps of the last pass's tokens that have counted, `num_replayed` of them, and of `num_tokens` of this pass, the first of which is at `position`.
    // `num_met`: how often this thread block's warps have met in this launch. `product`: products up to the one that made the inputs. False: leave.
    __device__ __forceinline__ bool take(u32 position, u32 num_replayed, u32 num_tokens, u32 tag, u32 product, u32& num_met) const {
        const u32 num_steps = num_replayed + num_tokens, num_certain = num_replayed + min(num_tokens, 1u), stands_at = position - num_replayed;
        float* state = reinterpret_cast<float*>(delta.state_ptr) + u64{net * kDeltaItems + item_idx} * kDeltaItemValues;
        float4* stored = reinterpret_cast<float4*>(state) + warp * (kColumnGroups * kKeyDim) + lane;
        float* ring = state + kStateValues;
        Columns columns;
        load_columns(stored, stands_at, columns);
        float past[kThreadChannels][kConvWidth - 1], taps[kThreadChannels][kConvWidth];
        load_channels(ring, stands_at, past, taps);
        const u16* factors = reinterpret_cast<const u16*>(delta.factors_ptr) + net * (2 * kDeltaHeads) + head;
        const float rate = exp2_approx(WeightFormat::low(factors[0]) * kLog2e), dt_bias = WeightFormat::low(factors[kDeltaHeads]);
#pragma unroll 1
        for (u32 step = 0; step < num_steps; ++step) {
            const bool is_replayed = step < num_replayed, is_certain = step < num_certain;
            const u32 token = step - num_replayed;  // of this pass
            Inputs inputs = {};
            if (is_replayed) {
                load_kept(step, inputs);
            } else {
                if (token == 0 && !counter_wait<600>(role.stopped(), role.base + KOG_OFFSET(num_finalized), product)) return false;
                if (!wait_for_inputs(token, tag, inputs)) return false;
                if (warp == 0) stamp(role, kQuerySeen, turn, stamped);
                if (!is_certain) keep(token - 1, inputs);
            }
            const u32 number = num_met++;
            float* convolved = role.shared->convolved[number & 1];
#pragma unroll
            for (u32 i = 0; i < kThreadChannels; ++i) {
                if (channel_of(i) >= kItemChannels) continue;
                const float newest = inputs.channels[i], sum = convolve(past[i], newest, taps[i]);
                convolved[channel_of(i)] = sum * sigmoid(sum);
                if (is_certain) ring[(stands_at + step) % kConvWidth * kItemChannels + channel_of(i)] = newest;
#pragma unroll
                for (u32 tap = 0; tap + 1 < kConvWidth; ++tap) past[i][tap] = tap + 2 < kConvWidth ? past[i][(tap + 1) % (kConvWidth - 1)] : newest;
            }
            if (!meet(role.base + KOG_OFFSET(convolved_full) + (number & 1) * 8, number)) return false;
            if (warp == 0) stamp(role, kScored, turn, stamped);
            apply(convolved, decay_of(rate, inputs.decay + dt_bias), sigmoid(inputs.beta), inputs, token, !is_replayed, tag, columns);
            if (step + 1 == num_certain) store_columns(columns, stored);
        }
        return true;
    }
};

// Behind how many tokens the states of a thread block's items stand while a launch runs.
struct DeltaStates {
    u32 stands_at = ~0u, num_met = 0;  // before the first pass nowhere

    __device__ __forceinline__ void begin_pass(u32 turn, u32 position) { stands_at = turn == 0 ? position : stands_at; }
    // Each is written with its first token.
    __device__ __forceinline__ void end_pass(u32 position) { stands_at = position + 1; }
    // The items of a layer and a lane, in a pass of `num_tokens` tokens from `position` on. False: leave.
    __device__ __forceinline__ bool take(const DeltaRule& rule, u32 layer, u32 lane_idx, u32 position, u32 num_tokens, u32 tag, u32 product) {
#pragma unroll 1
        for (u32 item = first_delta_item(rule.role, layer, lane_idx); item < kDeltaItems; item += kNumCtas)
            if (!DeltaPass(rule, layer, lane_idx, item).take(position, position - stands_at, num_tokens, tag, product, num_met)) return false;
        return true;
    }
    // Behind the last pass: all states to behind `position` tokens.
    __device__ __forceinline__ void settle(const KogDecodeParams& params, const KogDeltaParams& delta, const Role& role, u32 warp, u32 position) {
        if (position <= stands_at) return;
#pragma unroll 1
        for (u32 i = 0; i < kLayers * kLanes; ++i) {
            const Place at(kMixerProducts[i]);
            if (has_delta_net(at.layer()) && !take({params, delta, role, warp, laneid(), 0, 0}, at.layer(), at.lane() + i % kDeltaInLanes, position, 0, 0, 0)) return;
        }
    }
};
#endif

}  // namespace kog
