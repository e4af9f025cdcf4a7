// An item of a gated delta net in passes of several tokens, whatever these are of: what a token brings, and the rule of its step, which is that of a pass
// of one token, to the bit. What both have in common stands in both where the instructions of one token's would change.
#pragma once
#include "delta.cuh"

namespace kog {

#if defined KOG_DELTA_PASSES || defined KOG_DELTA_COMPANY
struct DeltaItem : DeltaRule {
    u32 lane_idx, item_idx, head, slice, layer_idx, net;

    __device__ __forceinline__ DeltaItem(const DeltaRule& rule, u32 layer, u32 lane_idx, u32 item_idx)
        : DeltaRule(rule), lane_idx(lane_idx), item_idx(item_idx), head(item_idx / kDeltaSlices), slice(item_idx % kDeltaSlices),
          layer_idx(delta_layers().num_before(layer)), net(layer_idx * kLanes + lane_idx) {}

    // What a token brings: inputs of this thread's channels, of the head's decay and beta, and words with gates of this warp's columns.
    struct Inputs {
        float channels[kThreadChannels], decay, beta;
        ulonglong2 gates[kColumnGroups];
    };
    // Place of channel `i` of this thread in the item, if it is below kItemChannels.
    __device__ __forceinline__ u32 channel_of(u32 i) const { return i * kAttendThreads + warp * 32 + lane; }
    // The last inputs of this thread's channels, behind `position` tokens, and the convolution's taps.
    __device__ __forceinline__ void load_channels(const float* ring, u32 position, float (&past)[kThreadChannels][kConvWidth - 1],
                                                  float (&taps)[kThreadChannels][kConvWidth]) const {
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) {
            if (channel_of(i) >= kItemChannels) continue;
            load_taps(net, row_of(channel_of(i), head, slice), taps[i]);
            load_past(ring, position, channel_of(i), past[i]);
        }
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

    // Words of a token for OUT, in this thread's copy (of so many threads as there are copies): outputs of this warp's columns, and their sum of squares.
    __device__ __forceinline__ u64* attended_of(u32 token) const {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kAttendedOffset;
        return words + ((lane_idx * kReplicas + lane) * kTokens + token) * kAttendedStride + (head * kValueDim + slice * kSliceColumns + warp * kWarpColumns) / 2;
    }
    __device__ __forceinline__ u64* squares_of(u32 token) const {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kDeltaSquaresOffset;
        return words + ((lane_idx * kReplicas + lane) * kTokens + token) * kDeltaSquaresStride + head * kSquareWords + slice * kAttendWarps + warp;
    }
    // The rule, and of a token of this pass what comes of it (`is_told`).
    __device__ __forceinline__ void apply(const float* convolved, float decay, float beta, const Inputs& inputs, u32 token, bool is_told, u32 tag,
                                          Columns& columns) const {
        const u32 first_column = warp * kWarpColumns;
        const u16* norm = reinterpret_cast<const u16*>(delta.norm_ptr) + layer_idx * kValueDim + slice * kSliceColumns + first_column;
        u64* attended = attended_of(token);
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
        if (is_published) store_relaxed(squares_of(token), make_value_word(__float_as_uint(squares[0]), tag));
        if (warp == 0) stamp(role, kMixed, turn, stamped);
    }
    static __device__ __forceinline__ void store_columns(const Columns& columns, float4* stored) {
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (u32 k = 0; k < kThreadKeys; ++k) stored[group * kKeyDim + k * 32] = columns[group][k];
    }
};
#endif

}  // namespace kog
