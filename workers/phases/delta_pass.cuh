// A gated delta net in passes of several tokens. A pass takes an item's state through the steps of all of its tokens, in registers; it writes the one
// behind its first token, which alone is certain to count, and keeps what the others brought. The next pass takes the steps of those that have counted
// once more, before its own; so does the end of a launch, behind which states are where the request is. Each step is that of a pass of one token, to the
// bit. What is kept each thread reads and writes for itself, as it does states. What both have in common stands in both where the instructions of
// one token's would change.
#pragma once
#include "delta.cuh"

namespace kog {

#ifdef KOG_DELTA_PASSES
struct DeltaPass : DeltaRule {
    u32 lane_idx, item_idx, head, slice, layer_idx, net;

    __device__ __forceinline__ DeltaPass(const DeltaRule& rule, u32 layer, u32 lane_idx, u32 item_idx)
        : DeltaRule(rule), lane_idx(lane_idx), item_idx(item_idx), head(item_idx / kDeltaSlices), slice(item_idx % kDeltaSlices),
          layer_idx(delta_layers().num_before(layer)), net(layer_idx * kLanes + lane_idx) {}

    // What a token brings: inputs of this thread's channels, of the head's decay and beta, and words with gates of this warp's columns.
    struct Inputs {
        float channels[kThreadChannels], decay, beta;
        ulonglong2 gates[kColumnGroups];
    };
    // Place of channel `i` of this thread in the item, if it is below kItemChannels.
    __device__ __forceinline__ u32 channel_of(u32 i) const { return i * kAttendThreads + warp * 32 + lane; }
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
    // Until those of a token of this pass have come. False: leave.
    __device__ __forceinline__ bool wait_for_inputs(u32 token, u32 tag, Inputs& inputs) const {
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kDeltaInOffset + (lane_idx * kTokens + token) * kDeltaInStride;
        const u32 decay_row = 2 * kDeltaKeys + 2 * kDeltaValues + head, beta_row = decay_row + kDeltaHeads;
        const u64* gate_words = words + (2 * kDeltaKeys + kDeltaValues + head * kValueDim + slice * kSliceColumns + warp * kWarpColumns) / 2;
        u64 got[kThreadChannels], of_decay, of_beta;
        while (true) {
            of_decay = load_relaxed(words + decay_row / 2), of_beta = load_relaxed(words + beta_row / 2);
            bool ready = has_tag(of_decay, tag) && has_tag(of_beta, tag);
#pragma unroll
            for (u32 i = 0; i < kThreadChannels; ++i) {
                got[i] = 0;
                if (channel_of(i) >= kItemChannels) continue;
                got[i] = load_relaxed(words + row_of(channel_of(i), head, slice) / 2);
                ready = ready && has_tag(got[i], tag);
            }
#pragma unroll
            for (u32 group = 0; group < kColumnGroups; ++group) {
                inputs.gates[group] = load_relaxed_x2(gate_words + 2 * group);
                ready = ready && tag_difference(inputs.gates[group], tag) == 0;
            }
            if (__all_sync(kFullWarp, ready)) break;
            if (must_leave(role.stopped())) return false;
        }
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) inputs.channels[i] = half_of(got[i], row_of(channel_of(i), head, slice));
        inputs.decay = half_of(of_decay, decay_row), inputs.beta = half_of(of_beta, beta_row);
        return true;
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
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) {
            if (channel_of(i) >= kItemChannels) continue;
            load_taps(net, row_of(channel_of(i), head, slice), taps[i]);
            load_past(ring, stands_at, channel_of(i), past[i]);
        }
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

private:
    // The rule, and of a token of this pass what comes of it (`is_told`).
    __device__ __forceinline__ void apply(const float* convolved, float decay, float beta, const Inputs& inputs, u32 token, bool is_told, u32 tag,
                                          Columns& columns) const {
        const u32 first_column = warp * kWarpColumns, lane_copy = lane_idx * kReplicas + lane;
        const u16* norm = reinterpret_cast<const u16*>(delta.norm_ptr) + layer_idx * kValueDim + slice * kSliceColumns + first_column;
        u64* words = reinterpret_cast<u64*>(params.words_ptr);
        u64* attended = words + kAttendedOffset + (lane_copy * kTokens + token) * kAttendedStride + (head * kValueDim + slice * kSliceColumns + first_column) / 2;
        const bool is_published = is_told && lane < kReplicas;
        float query[kThreadKeys], key[kThreadKeys], squares[kColumnGroups];
        const float both = take_heads(convolved, query, key);
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group) {
            float out[4] = {}, change[4];
            take_outputs(columns[group], query, key, both, convolved + 2 * kKeyDim + first_column + group * 4, decay, beta, out, change);
#pragma unroll
            for (u32 k = 0; k < kThreadKeys; ++k) columns[group][k] = advanced(columns[group][k], key[k], change, decay);
            squares[group] = __fadd_rn(sum_of_products(out[0], out[0], out[1], out[1]), sum_of_products(out[2], out[2], out[3], out[3]));
            gate(norm + group * 4, inputs.gates[group], out);
            if (is_published) store_relaxed_x2(attended + 2 * group, make_pair_word(out[0], out[1], tag), make_pair_word(out[2], out[3], tag));
        }
        add_up(squares);
        if (is_published)
            store_relaxed(words + kDeltaSquaresOffset + (lane_copy * kTokens + token) * kDeltaSquaresStride + head * kSquareWords + slice * kAttendWarps + warp,
                          make_value_word(__float_as_uint(squares[0]), tag));
        if (warp == 0) stamp(role, kMixed, turn, stamped);
    }
    static __device__ __forceinline__ void store_columns(const Columns& columns, float4* stored) {
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (u32 k = 0; k < kThreadKeys; ++k) stored[group * kKeyDim + k * 32] = columns[group][k];
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
