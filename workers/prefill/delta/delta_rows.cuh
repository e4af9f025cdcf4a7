// Where values of a delta net stand: rows of the input of a lane, items of the monokernel's states. Behind a header with the net's sizes.
#pragma once

#include "ptx.cuh"

namespace kog {

using DeltaParams = KogDeltaPrefillParams;
constexpr u32 kKeys = kKeyHeads * kKeyDim, kValues = kHeads * kValueDim, kChannels = 2 * kKeys + kValues;  // of a lane
constexpr u32 kSharers = kHeads / kKeyHeads;  // value heads that have the same query and key
constexpr u32 kSliceColumns = kValueDim / kSlices, kSliceValues = kKeyDim * kSliceColumns;
static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0 && kSliceColumns % 16 == 0, "operands of products");

__device__ __forceinline__ int start_of(const DeltaParams& params) { return *reinterpret_cast<const int*>(params.place_ptr); }
__device__ __forceinline__ int num_tokens(const DeltaParams& params) {  // of the chunk; the rows behind them are padding
    const int left = *reinterpret_cast<const int*>(params.last_position_ptr) + 1 - start_of(params);
    return min(left, static_cast<int>(params.size));
}
__device__ __forceinline__ u32 num_blocks(const DeltaParams& params) { return (params.size + kBlock - 1) / kBlock; }

// The input of a lane in a row of the chunk.
__device__ __forceinline__ float* projected_at(const DeltaParams& params, u32 row, u32 lane) {
    return reinterpret_cast<float*>(params.projected_ptr) + (static_cast<u64>(row) * kLanes + lane) * kRows;
}
__device__ __forceinline__ const float* own_states(const DeltaParams& params) {
    return reinterpret_cast<const float*>(params.states_ptr) + *reinterpret_cast<const int*>(params.cache_number_ptr) * kSequenceValues;
}
// From the first value of a sequence's states to those of an item; `head`: of all lanes.
__device__ __forceinline__ u64 item_at(const DeltaParams& params, u32 head, u32 slice) {
    return (static_cast<u64>(params.net * kLanes * kHeads + head) * kSlices + slice) * kItemValues;
}
// The same to the input of a channel of a lane's convolution at a position. Neighbouring channels of a head, or of a slice of one, are neighbours.
__device__ __forceinline__ u64 input_at(const DeltaParams& params, u32 lane, u32 channel, u32 position) {
    u32 head, slice = 0, place;
    if (channel < 2 * kKeys) {
        const u32 of_part = channel % kKeys;
        head = of_part / kKeyDim * kSharers, place = channel / kKeys * kKeyDim + of_part % kKeyDim;
    } else {
        const u32 of_head = (channel - 2 * kKeys) % kValueDim;
        head = (channel - 2 * kKeys) / kValueDim, slice = of_head / kSliceColumns, place = 2 * kKeyDim + of_head % kSliceColumns;
    }
    return item_at(params, lane * kHeads + head, slice) + kSliceValues + position % kConvWidth * kItemChannels + place;
}

__device__ __forceinline__ bool is_finite(float value) { return value - value == 0; }

// Four neighbouring values of the input of a lane, which begins at an even number of values.
__device__ __forceinline__ float4 four_of_input(const float* from) {
    if constexpr (kRows % 4 == 0) return *reinterpret_cast<const float4*>(from);
    const float2 a = reinterpret_cast<const float2*>(from)[0], b = reinterpret_cast<const float2*>(from)[1];
    return make_float4(a.x, a.y, b.x, b.y);
}

}  // namespace kog
