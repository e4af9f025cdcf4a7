// What a thread keeps of its rows, how partitions are merged, and where the outputs go.
#pragma once

#include "attention_items.cuh"
#include "quad.cuh"

namespace kog {

// What a thread knows of two rows, 8 apart: the largest score, the sum of exponentials (of all four threads of a row, once it is
// whole), and values: four for every 8 columns, two of the first row, two of the other.
struct State {
    float top[2], sum[2], values[kValues];

    __device__ __forceinline__ float4 part(int i) const {
        return make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
};

__device__ __forceinline__ float reference(float top) { return top == -INFINITY ? 0.0f : top; }

// One more partition behind those merged before.
__device__ __forceinline__ void merge(float (&top)[2], float (&sum)[2], float (&factor)[4], const float (&partition_top)[2],
                                      const float (&partition_sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float higher = fmaxf(top[r], partition_top[r]), zero = reference(higher);
        factor[r] = exp2_approx((top[r] - zero) * kScale);
        factor[2 + r] = exp2_approx((partition_top[r] - zero) * kScale);
        sum[r] = fmaf(sum[r], factor[r], partition_sum[r] * factor[2 + r]);
        top[r] = higher;
    }
}
__device__ __forceinline__ float merged(float total, float value, const float (&factor)[4], int row) {
    return fmaf(total, factor[row], value * factor[2 + row]);
}
__device__ __forceinline__ float4 merged_part(const float4& total, const float4& part, const float (&factor)[4]) {
    return make_float4(merged(total.x, part.x, factor, 0), merged(total.y, part.y, factor, 0), merged(total.z, part.z, factor, 1),
                       merged(total.w, part.w, factor, 1));
}

// The outputs of a group's rows. Called by whole warps.
__device__ __forceinline__ void store_rows(const KogAttentionParams& params, const Item& item, u32 group, const State& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = threadIdx.x % kGroupThreads / 32 * 16 + laneid() / 4 + 8 * r;
        const u32 place = item.first_row(params, group) + row / kPack, at = item.head * kPack + row % kPack;
        const u64 first = ((static_cast<u64>(at / kLaneHeads) * params.size + place) * kLaneHeads + at % kLaneHeads) * kHeadDim;
        unsigned char* to = reinterpret_cast<unsigned char*>(params.out_ptr) + 2 * first;
        float sum = state.sum[r];
        if (params.sinks_ptr) sum += exp2_approx(reinterpret_cast<const float*>(params.sinks_ptr)[at] * kLog2e - state.top[r] * kScale);
        const float inverse = 1.0f / sum;
#pragma unroll
        for (int unit = 0; unit + 4 <= kHeadDim / 8; unit += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[i] = Fp16::pack(state.values[4 * (unit + i) + 2 * r] * inverse, state.values[4 * (unit + i) + 2 * r + 1] * inverse);
            u32 part = laneid() % 4;
            if (params.is_ordered) part = place_of_pair(part);
            else turn(v);
            if (place < params.size) *reinterpret_cast<uint4*>(to + 16 * (unit + part)) = make_uint4(v[0], v[1], v[2], v[3]);
        }
#pragma unroll
        for (int unit = kHeadDim / 32 * 4; unit < kHeadDim / 8; ++unit) {
            const u32 v = Fp16::pack(state.values[4 * unit + 2 * r] * inverse, state.values[4 * unit + 2 * r + 1] * inverse);
            if (place < params.size) *reinterpret_cast<u32*>(to + 16 * unit + 4 * (laneid() % 4)) = v;
        }
    }
}

struct Parts {  // of rows whose units are attended to by several thread blocks
    float4 *values, *sums;

    __device__ __forceinline__ Parts(const KogAttentionParams& params, u32 index, u32 group) {
        const u64 at = static_cast<u64>(index) * params.num_groups + group;
        values = reinterpret_cast<float4*>(params.parts_ptr) + at * kGroupThreads * (kValues / 4) + threadIdx.x % kGroupThreads;
        sums = reinterpret_cast<float4*>(params.part_sums_ptr) + at * kGroupThreads + threadIdx.x % kGroupThreads;
    }
};

}  // namespace kog
