// A gated delta net for one token, by attention's warps. An item is a slice of a value head's columns, spread over the thread blocks by a map that
// depends on layer and lane only. A warp has a quarter of its columns, and of each a thread every 32nd key: a load brings four columns of a key.
// Sums over keys are a tree over a warp's threads, so bits do not depend on slices. What an item keeps of a sequence (its columns of the state, and
// the last inputs of its channels of the convolution) each thread reads and writes for itself: so that needs no fence. Its warps share what comes of
// the convolution in shared memory. The norm behind the rule is of a whole head: sums of squares are published beside its values, and who multiplies
// them scales them (gather_delta.cuh).
#pragma once
#include "activation.cuh"

namespace kog {

#ifdef KOG_DELTA
constexpr u32 kWarpColumns = kSliceColumns / kAttendWarps, kColumnGroups = kWarpColumns / 4, kThreadKeys = kKeyDim / 32;
constexpr u32 kThreadChannels = (kItemChannels + kAttendThreads - 1) / kAttendThreads;
constexpr u32 kStateValues = kKeyDim * kSliceColumns, kDeltaItemValues = kStateValues + kConvWidth * kItemChannels;
static_assert(kColumnGroups >= 1 && (kColumnGroups & (kColumnGroups - 1)) == 0 && kThreadKeys >= 1, "shapes");

// The first item of a layer and a lane that this thread block has; the next one is kNumCtas further on.
__device__ __forceinline__ u32 first_delta_item(const Role& role, u32 layer, u32 lane_idx) {
    const u32 first_cta = (layer * kLanes + lane_idx) * kDeltaItems % kNumCtas;
    return role.cta >= first_cta ? role.cta - first_cta : role.cta + kNumCtas - first_cta;
}

struct DeltaRule {
    const KogDecodeParams& params;
    const KogDeltaParams& delta;
    const Role& role;
    u32 warp, lane, turn, stamped;  // `stamped`: the product that made the inputs, whose stamps are this item's

    // log(1 + exp(x)): the larger of x and 0, and 2 artanh(t / (2 + t)) of t = exp(-|x|), whose series is cut at 1e-9.
    static __device__ __forceinline__ float softplus(float x) {
        const float t = exp2_approx(-fabsf(x) * kLog2e), s = t * reciprocal_approx(t + 2.0f), square = s * s;
        float series = 1.0f / 15;
#pragma unroll
        for (int odd = 13; odd > 0; odd -= 2) series = __fmaf_rn(series, square, 1.0f / odd);
        return __fmaf_rn(2.0f * s, series, fmaxf(x, 0.0f));
    }
    static __device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) value += __shfl_xor_sync(kFullWarp, value, offset);
        return value;
    }
    // Row of a channel of an item among the lane's inputs.
    static __device__ __forceinline__ u32 row_of(u32 channel, u32 head, u32 slice) {
        const u32 key_head = head / (kDeltaHeads / kDeltaKeyHeads);
        if (channel < 2 * kKeyDim) return channel / kKeyDim * kDeltaKeys + key_head * kKeyDim + channel % kKeyDim;
        return 2 * kDeltaKeys + head * kValueDim + slice * kSliceColumns + channel - 2 * kKeyDim;
    }
    static __device__ __forceinline__ float half_of(u64 word, u32 row) { return row & 1 ? second_of(word) : first_of(word); }

    // Until all warps have left what they have convolved. False: leave.
    __device__ __forceinline__ bool meet(u32 barrier, u32 number) const {
        __syncwarp();
        if (lane == 0) mbar_arrive(barrier);
        return mbar_wait(role.stopped(), barrier, number / 2 & 1);
    }

    // Of this thread's keys four columns at a time.
    using Columns = float4[kColumnGroups][kThreadKeys];
    // A state behind `position` tokens. Before the first one there is nothing.
    static __device__ __forceinline__ void load_columns(const float4* stored, u32 position, Columns& columns) {
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group)
#pragma unroll
            for (u32 k = 0; k < kThreadKeys; ++k) {
                columns[group][k] = make_float4(0, 0, 0, 0);
                if (position > 0) columns[group][k] = stored[group * kKeyDim + k * 32];
            }
    }
    // A tree over the groups of this warp, whose sum is the first one's.
    static __device__ __forceinline__ void add_up(float (&squares)[kColumnGroups]) {
#pragma unroll
        for (u32 width = 1; width < kColumnGroups; width *= 2)
#pragma unroll
            for (u32 group = 0; group < kColumnGroups; group += 2 * width) squares[group] = __fadd_rn(squares[group], squares[group + width]);
    }
    // Outputs of four columns times the norm's weights and SiLU of their gates.
    static __device__ __forceinline__ void gate(const u16* norm, const ulonglong2& gates, float (&out)[4]) {
        const float z[4] = {first_of(gates.x), second_of(gates.x), first_of(gates.y), second_of(gates.y)};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) out[i] *= WeightFormat::low(norm[i]) * (z[i] * sigmoid(z[i]));
    }
    __device__ __forceinline__ void load_taps(u32 net, u32 row, float (&taps)[kConvWidth]) const {
        const u16* of_channel = reinterpret_cast<const u16*>(delta.taps_ptr) + u64{net * kDeltaChannels + row} * kConvWidth;
#pragma unroll
        for (u32 tap = 0; tap < kConvWidth; ++tap) taps[tap] = WeightFormat::low(of_channel[tap]);
    }
    // The last inputs of a channel, the oldest first.
    static __device__ __forceinline__ void load_past(const float* inputs, u32 position, u32 channel, float (&past)[kConvWidth - 1]) {
#pragma unroll
        for (u32 tap = 0; tap + 1 < kConvWidth; ++tap) {
            const u32 back = kConvWidth - 1 - tap;
            past[tap] = position >= back ? inputs[(position - back) % kConvWidth * kItemChannels + channel] : 0.0f;
        }
    }
    // The convolution of a channel, from the oldest input to the newest; SiLU follows.
    static __device__ __forceinline__ float convolve(const float (&past)[kConvWidth - 1], float newest, const float (&taps)[kConvWidth]) {
        float sum = 0;
#pragma unroll
        for (u32 tap = 0; tap + 1 < kConvWidth; ++tap) sum = __fmaf_rn(past[tap], taps[tap], sum);
        return __fmaf_rn(newest, taps[kConvWidth - 1], sum);
    }
    // Query and key, normalised, of which a thread has every 32nd value; returns their product.
    __device__ __forceinline__ float take_heads(const float* convolved, float (&query)[kThreadKeys], float (&key)[kThreadKeys]) const {
        float query_squares = 0, key_squares = 0, both = 0;
#pragma unroll
        for (u32 k = 0; k < kThreadKeys; ++k) {
            query[k] = convolved[k * 32 + lane], key[k] = convolved[kKeyDim + k * 32 + lane];
            query_squares = __fmaf_rn(query[k], query[k], query_squares), key_squares = __fmaf_rn(key[k], key[k], key_squares);
        }
        const float query_scale = inverse_root_approx(sum_of_warp(query_squares) + kUnitEps) * kDeltaQueryScale;
        const float key_scale = inverse_root_approx(sum_of_warp(key_squares) + kUnitEps);
#pragma unroll
        for (u32 k = 0; k < kThreadKeys; ++k) {
            query[k] *= query_scale, key[k] *= key_scale;
            both = __fmaf_rn(key[k], query[k], both);
        }
        return sum_of_warp(both);
    }
    // The rule, four columns at a time: S = decay S; S += k u^T with u = beta (v - S^T k); out = S^T q, which is decay S^T q + (k q) u of the old S.
    // u and `out`, which is zeros before.
    static __device__ __forceinline__ void take_outputs(const float4 (&old)[kThreadKeys], const float (&query)[kThreadKeys], const float (&key)[kThreadKeys],
                                                        float both, const float* values, float decay, float beta, float (&out)[4], float (&change)[4]) {
        float kept[4] = {};
#pragma unroll
        for (u32 k = 0; k < kThreadKeys; ++k) {
            const float before[4] = {old[k].x, old[k].y, old[k].z, old[k].w};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) kept[i] = __fmaf_rn(key[k], before[i], kept[i]), out[i] = __fmaf_rn(query[k], before[i], out[i]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float value = values[i];
            change[i] = beta * __fmaf_rn(-decay, sum_of_warp(kept[i]), value);
            out[i] = sum_of_products(both, change[i], decay, sum_of_warp(out[i]));
        }
    }
    // What becomes of a key's four values.
    static __device__ __forceinline__ float4 advanced(const float4& before, float key, const float (&change)[4], float decay) {
        return make_float4(sum_of_products(key, change[0], decay, before.x), sum_of_products(key, change[1], decay, before.y),
                           sum_of_products(key, change[2], decay, before.z), sum_of_products(key, change[3], decay, before.w));
    }
    static __device__ __forceinline__ float decay_of(float rate, float input) { return exp2_approx(-rate * softplus(input) * kLog2e); }

    // The item of a pass of one token. `number`: of all items that this thread block had in this launch, attention's too. `product`: products up to the one that made the inputs.
    __device__ __forceinline__ bool item(u32 layer, u32 lane_idx, u32 item_idx, u32 position, u32 tag, u32 number, u32 product) const {
        const u32 head = item_idx / kDeltaSlices, slice = item_idx % kDeltaSlices, layer_idx = delta_layers().num_before(layer);
        const u32 net = layer_idx * kLanes + lane_idx, thread = warp * 32 + lane, first_column = warp * kWarpColumns;
        float* state = reinterpret_cast<float*>(delta.state_ptr) + u64{net * kDeltaItems + item_idx} * kDeltaItemValues;
        float4* columns = reinterpret_cast<float4*>(state) + warp * (kColumnGroups * kKeyDim) + lane;
        float* inputs = state + kStateValues;
        // All that is known before the inputs come is on its way.
        Columns old;
        load_columns(columns, position, old);
        float past[kThreadChannels][kConvWidth - 1], taps[kThreadChannels][kConvWidth];
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) {
            const u32 channel = i * kAttendThreads + thread;
            if (channel >= kItemChannels) continue;
            load_taps(net, row_of(channel, head, slice), taps[i]);
            load_past(inputs, position, channel, past[i]);
        }
        const u16* factors = reinterpret_cast<const u16*>(delta.factors_ptr) + net * (2 * kDeltaHeads) + head;
        const float rate = exp2_approx(WeightFormat::low(factors[0]) * kLog2e), dt_bias = WeightFormat::low(factors[kDeltaHeads]);

        // The inputs.
        if (!counter_wait<600>(role.stopped(), role.base + KOG_OFFSET(num_finalized), product)) return false;
        u64* base = reinterpret_cast<u64*>(params.words_ptr);
        const u64* words = base + kDeltaInOffset + lane_idx * (kTokens * kDeltaInStride);
        const u32 decay_row = 2 * kDeltaKeys + 2 * kDeltaValues + head, beta_row = decay_row + kDeltaHeads;
        const u64* gate_words = words + (2 * kDeltaKeys + kDeltaValues + head * kValueDim + slice * kSliceColumns + first_column) / 2;
        u64 got[kThreadChannels], of_decay, of_beta;
        ulonglong2 gates[kColumnGroups];
        while (true) {
            of_decay = load_relaxed(words + decay_row / 2), of_beta = load_relaxed(words + beta_row / 2);
            bool ready = has_tag(of_decay, tag) && has_tag(of_beta, tag);
#pragma unroll
            for (u32 i = 0; i < kThreadChannels; ++i) {
                const u32 channel = i * kAttendThreads + thread;
                if (channel >= kItemChannels) continue;
                got[i] = load_relaxed(words + row_of(channel, head, slice) / 2);
                ready = ready && has_tag(got[i], tag);
            }
#pragma unroll
            for (u32 group = 0; group < kColumnGroups; ++group) {
                gates[group] = load_relaxed_x2(gate_words + 2 * group);
                ready = ready && tag_difference(gates[group], tag) == 0;
            }
            if (__all_sync(kFullWarp, ready)) break;
            if (must_leave(role.stopped())) return false;
        }

        if (warp == 0) stamp(role, kQuerySeen, turn, stamped);

        float* convolved = role.shared->convolved[number & 1];
#pragma unroll
        for (u32 i = 0; i < kThreadChannels; ++i) {
            const u32 channel = i * kAttendThreads + thread;
            if (channel >= kItemChannels) continue;
            const float newest = half_of(got[i], row_of(channel, head, slice));
            const float sum = convolve(past[i], newest, taps[i]);
            inputs[position % kConvWidth * kItemChannels + channel] = newest;
            convolved[channel] = sum * sigmoid(sum);
        }
        if (!meet(role.base + KOG_OFFSET(merge_full) + (number & 1) * 8, number)) return false;
        if (warp == 0) stamp(role, kScored, turn, stamped);

        float query[kThreadKeys], key[kThreadKeys];
        const float both = take_heads(convolved, query, key);
        const float decay = decay_of(rate, half_of(of_decay, decay_row) + dt_bias), beta = sigmoid(half_of(of_beta, beta_row));

        const u16* norm = reinterpret_cast<const u16*>(delta.norm_ptr) + layer_idx * kValueDim + slice * kSliceColumns + first_column;
        u64* attended = base + kAttendedOffset + (lane_idx * kReplicas + lane) * (kTokens * kAttendedStride) +
                        (head * kValueDim + slice * kSliceColumns + first_column) / 2;
        float squares[kColumnGroups];
#pragma unroll
        for (u32 group = 0; group < kColumnGroups; ++group) {
            float out[4] = {}, change[4];
            take_outputs(old[group], query, key, both, convolved + 2 * kKeyDim + first_column + group * 4, decay, beta, out, change);
#pragma unroll
            for (u32 k = 0; k < kThreadKeys; ++k) columns[group * kKeyDim + k * 32] = advanced(old[group][k], key[k], change, decay);
            squares[group] = __fadd_rn(sum_of_products(out[0], out[0], out[1], out[1]), sum_of_products(out[2], out[2], out[3], out[3]));
            gate(norm + group * 4, gates[group], out);
            if (lane < kReplicas) store_relaxed_x2(attended + 2 * group, make_pair_word(out[0], out[1], tag), make_pair_word(out[2], out[3], tag));
        }
        add_up(squares);
        if (lane < kReplicas)
            store_relaxed(base + kDeltaSquaresOffset + (lane_idx * kReplicas + lane) * (kTokens * kDeltaSquaresStride) + head * kSquareWords +
                              slice * kAttendWarps + warp,
                          make_value_word(__float_as_uint(squares[0]), tag));
        if (warp == 0) stamp(role, kMixed, turn, stamped);
        return true;
    }
    static constexpr float kUnitEps = 1e-6f;  // under the root of the norms of queries and keys
};
#endif

}  // namespace kog
