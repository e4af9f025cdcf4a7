// The row of the prompt's last token, which goes on alone, in exact values.
#pragma once

#include "prefill_residual.cuh"

namespace kog {

// The prompt's last token out of its block: a thread block for each lane. What goes on is exact, of one row.
template <Form kForm>
__device__ __forceinline__ void take_row(const KogPrefillParams& params) {
    constexpr bool kExact = kForm == Form::kExact;
    constexpr u32 kQueryPairs = kHeads * kPairs;
    using Streams = Kept<kForm != Form::kPlain>;
    using Results = Kept<kExact>;
    const u32 size = params.size, lane = blockIdx.x, rest = size * kUnits;
    const int position = *reinterpret_cast<const int*>(params.last_position_ptr);
    const u32 row = position - *reinterpret_cast<const int*>(params.place_ptr);
    const uint4* stream = reinterpret_cast<const uint4*>(params.stream_ptr) + Streams::at(lane, row, size, kUnits);
    uint4* last_stream = reinterpret_cast<uint4*>(params.last_stream_ptr) + lane * 2 * kUnits;
    const u64 partials[] = {params.partial_ptr, params.past_ptr}, last_partials[] = {params.last_partial_ptr, params.last_past_ptr};
    for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
        last_stream[unit] = stream[unit];
        last_stream[kUnits + unit] = Streams::kPlanes > 1 ? stream[rest + unit] : uint4{};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!last_partials[i]) continue;
            const u32 from = Results::at(lane, row, size, kUnits) + unit;
            float* to = reinterpret_cast<float*>(last_partials[i]) + (lane * 2 * kUnits + unit) * kUnit;
            if constexpr (kExact) {
                const float* results = reinterpret_cast<const float*>(partials[i]);
                store_unit(to, float_unit(results + static_cast<u64>(from) * kUnit));
                store_unit(to + kHidden, float_unit(results + static_cast<u64>(from + rest) * kUnit));
            } else {
                store_unit(to, widened(reinterpret_cast<const uint4*>(partials[i])[from]));
                store_unit(to + kHidden, Unit{});
            }
        }
    }
    const u32* query = reinterpret_cast<const u32*>(params.query_ptr) + static_cast<u64>(row) * kLanes * kQueryPairs;
    u32* last_query = reinterpret_cast<u32*>(params.last_query_ptr);
    for (u32 i = lane * kQueryPairs + threadIdx.x; i < (lane + 1) * kQueryPairs; i += blockDim.x) last_query[i] = query[i];
    if (threadIdx.x) return;
    const float* inverse_rms = reinterpret_cast<const float*>(params.inverse_rms_ptr);
    reinterpret_cast<float*>(params.last_inverse_rms_ptr)[lane] = inverse_rms[lane * size + row];
    if (lane) return;
    int* place = reinterpret_cast<int*>(params.last_place_ptr);
    place[0] = position, place[2] = position + 1;
}

// A thread block for each lane of an exact block of one row.
__device__ __forceinline__ void give_row(const KogPrefillParams& params) {
    const u32 lane = blockIdx.x;
    const uint4* stream = reinterpret_cast<const uint4*>(params.stream_ptr) + lane * 2 * kUnits;
    float* to = reinterpret_cast<float*>(params.last_streams_ptr) + lane * kHidden;
    for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
        const Unit value = Kept<true>::operand(stream + unit, kUnits);
        store_unit(to + unit * kUnit, value);
        bool finite = true;
#pragma unroll
        for (int k = 0; k < kUnit; ++k) finite = finite && value.v[k] - value.v[k] == 0;
        if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
    }
}

}  // namespace kog
