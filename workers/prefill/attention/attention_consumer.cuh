// A group of four warps: products of its rows with the tiles of an item, and what is made of them.
#pragma once

#include "attention_rows.cuh"

namespace kog {

template <u32 kCluster>
struct Consumer {
    const KogAttentionParams& params;
    Memory memory;
    u32 group;  // among those of the thread block
    Ring ring{0, 0};
    State state;
    u32 query[kHeadDim / 4];

    __device__ __forceinline__ u32 of_item() const {  // this group among those of the item
        return kCluster > 1 ? cluster_rank() * (params.num_groups / kCluster) + group : group;
    }
    __device__ __forceinline__ bool in_turn() const { return params.num_groups > kCluster; }
    __device__ __forceinline__ u32 totals() const {  // where this thread keeps what partitions gave
        return memory.base + kTotalsFrom + group * kTotalBytes + threadIdx.x % kGroupThreads * 16;
    }
    __device__ __forceinline__ void release(u32 slot) {  // to all that copy into it
        if constexpr (kCluster == 1) {
            if (laneid() == 0) mbar_arrive(memory.empty(slot));
        } else {
            if (laneid() < kCluster) mbar_arrive_cluster(cluster_address(memory.empty(slot), laneid()));
        }
    }
    // Scores of a tile: queued.
    __device__ __forceinline__ void queue_scores(float (&scores)[kScores], u32 slot) {
        const u64 keys = rows_at<kPanel>(memory.slot(slot));
#pragma unroll
        for (u32 k = 0; k < kHeadDim / 16; ++k) {
            const u32 panel = k * 16 / kPanel, within = k * 16 % kPanel * 2;
            multiply_rows(scores, query[4 * k], query[4 * k + 1], query[4 * k + 2], query[4 * k + 3],
                          keys + ((panel * kPanelBytes + within) >> 4), k > 0);
        }
        products_commit();
    }
    // This thread's part of its group's queries, which are in the next slot, as a product takes it.
    __device__ __forceinline__ void take_query() {
        mbar_wait(memory.full(ring.slot), ring.parity);
        const u32 row = threadIdx.x % kGroupThreads / 32 * 16 + laneid() / 4;
        const u32 rows = memory.slot(ring.slot) + group * kQueryBytes + row * kPanel * 2;
#pragma unroll
        for (u32 i = 0; i < kHeadDim / 4; ++i) {
            const u32 k = i / 4 * 16 + i % 4 / 2 * 8 + laneid() % 4 * 2;
            const u32 address = rows + k / kPanel * kQueryPanelBytes + i % 2 * 8 * kPanel * 2 + k % kPanel * 2;
            query[i] = load_shared_u32(address ^ (address >> 7 & (kPanel / 8 - 1)) << 4);  // swizzled over as many bytes as a row has
        }
        __syncwarp();
        release(ring.slot);
        ring.advance();
    }
    // values += the tile's values, times `chances`: queued.
    __device__ __forceinline__ void queue_values(const u32 (&chances)[kScores / 2], u32 slot) {
        const u64 values = columns_at<kPanel>(memory.slot(slot), kPanelBytes);
#pragma unroll
        for (u32 k = 0; k < kKeys / 16; ++k)
            multiply_columns(state.values, chances[4 * k], chances[4 * k + 1], chances[4 * k + 2], chances[4 * k + 3],
                             values + (k * 16 * kPanel * 2 >> 4));
        products_commit();
    }
    // What a row does not see is -infinity. `position`: of this thread's first row.
    __device__ __forceinline__ void mask(float (&scores)[kScores], int tile, const int (&position)[2], int lowest, int highest) {
        const int first = tile * static_cast<int>(kKeys);
        const int window = params.window ? static_cast<int>(params.window) : 1 << 30;
        if (first + static_cast<int>(kKeys) - 1 <= lowest && first > highest - window) return;  // all rows of the warp see all
        const int column = first + 2 * (laneid() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 seen = first_columns(position[r] - column) & ~first_columns(position[r] - window - column);
#pragma unroll
            for (int i = 0; i < kScores / 2; ++i) {
                float& score = scores[i / 2 * 4 + 2 * r + i % 2];
                score = seen >> i & 1 ? score : -INFINITY;
            }
        }
    }
    // A bit for each score of a row that this thread has (columns 0, 1, 8, 9, 16, ...), set up to column `last`.
    static __device__ __forceinline__ u32 first_columns(int last) {
        const int count = last < 0 ? 0 : 2 * (last / 8) + min(last % 8 + 1, 2);
        return count >= 32 ? 0xffffffffu : (1u << count) - 1;
    }
    // Scores become exponentials; what was added up before is to be multiplied by `factor`.
    __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = scores[2 * r];
#pragma unroll
            for (int i = 0; i < kScores / 4; ++i) top = fmaxf(top, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
            top = fmaxf(state.top[r], fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)));
            const float zero = reference(top), offset = -zero * kScale;
            factor[r] = exp2_approx((state.top[r] - zero) * kScale);
            state.top[r] = top;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[4 * i + 2 * r + e];
                    score = exp2_approx(fmaf(score, kScale, offset));
                    sum += score;
                }
            }
            state.sum[r] = fmaf(state.sum[r], factor[r], sum);
        }
    }
    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
        if (!__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kValues; ++i) state.values[i] *= factor[i / 2 % 2];
    }
    static __device__ __forceinline__ void pack(const float (&scores)[kScores], u32 (&chances)[kScores / 2]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) chances[i] = Fp16::pack(scores[2 * i], scores[2 * i + 1]);
    }

    // Tiles `from` to `until` - 1, from nothing.
    __device__ __forceinline__ void attend(int from, int until, const int (&position)[2], int lowest, int highest) {
        float scores[kScores], factor[2];
        u32 chances[kScores / 2];
        state.top[0] = state.top[1] = -INFINITY, state.sum[0] = state.sum[1] = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) state.values[i] = 0;

        mbar_wait(memory.full(ring.slot), ring.parity);
        __syncwarp();
        settle(scores);
        products_begin();
        queue_scores(scores, ring.slot);
        products_wait<0>();
        settle(scores);
        release(ring.slot);
        ring.advance();
        mask(scores, from, position, lowest, highest);
        exponentiate(scores, factor);
        pack(scores, chances);
        mbar_wait(memory.full(ring.slot), ring.parity);
        for (int tile = from + 1; tile < until; ++tile) {
            const u32 keys = ring.slot;
            ring.advance();
            const u32 values = ring.slot;
            if (in_turn()) group_sync(1 + group, 2 * kGroupThreads);
            __syncwarp();
            settle(scores);
            settle(state.values);
            products_begin();
            queue_scores(scores, keys);
            mbar_wait(memory.full(values), ring.parity);
            ring.advance();
            __syncwarp();
            queue_values(chances, values);
            if (in_turn()) group_arrive(2 - group, 2 * kGroupThreads);
            products_wait<1>();
            settle(scores);
            release(keys);
            mask(scores, tile, position, lowest, highest);
            exponentiate(scores, factor);
            settle(scores);
            mbar_wait(memory.full(ring.slot), ring.parity);  // of the next products; keeps what is above before what is below
            products_wait<0>();
            settle(state.values);
            release(values);
            rescale(factor);
            pack(scores, chances);
        }
        const u32 values = ring.slot;
        ring.advance();
        __syncwarp();
        settle(state.values);
        products_begin();
        queue_values(chances, values);
        products_wait<0>();
        settle(state.values);
        release(values);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 1);
            state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 2);
        }
    }

    __device__ __forceinline__ void run() {
        const int start = *reinterpret_cast<const int*>(params.place_ptr);
        const u32 warp_row = threadIdx.x % kGroupThreads / 32 * 16;
        if (in_turn() && group == 1) group_arrive(1, 2 * kGroupThreads);  // the other one begins
        for (u32 pass = 0; pass * (gridDim.x / kCluster) < params.num_items; ++pass) {
            const u32 index = item_index<kCluster>(pass);
            if (index >= params.num_items) continue;
            const Item item(params, index, start);
            if (item.first >= item.end) continue;
            const int origin = start + item.first_row(params, of_item());
            const int lowest = origin + warp_row / kPack, highest = origin + (warp_row + 15) / kPack;
            const int position[2] = {static_cast<int>(origin + (warp_row + laneid() / 4) / kPack),
                                     static_cast<int>(origin + (warp_row + laneid() / 4 + 8) / kPack)};
            take_query();
            float top[2], sum[2];
            for (int from = item.first; from < item.end;) {
                const int until = item.run_end(params, from);
                attend(from, until, position, lowest, highest);
                if (from == item.first) {
                    top[0] = state.top[0], top[1] = state.top[1], sum[0] = state.sum[0], sum[1] = state.sum[1];
                } else {
                    float factor[4];
                    merge(top, sum, factor, state.top, state.sum);
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) {
                        const float4 total = merged_part(load_shared_float4(totals() + i * 16 * kGroupThreads), state.part(i), factor);
                        float* values = &state.values[4 * i];
                        values[0] = total.x, values[1] = total.y, values[2] = total.z, values[3] = total.w;
                    }
                }
                if (until < item.end) {
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) store_shared_float4(totals() + i * 16 * kGroupThreads, state.part(i));
                }
                from = until;
            }
            state.sum[0] = sum[0], state.sum[1] = sum[1], state.top[0] = top[0], state.top[1] = top[1];
            if (item.is_whole) {
                store_rows(params, item, of_item(), state);
                continue;
            }
            const Parts parts(params, item.part_index(params, item.unit), of_item());
            parts.sums[0] = make_float4(state.top[0], state.top[1], state.sum[0], state.sum[1]);
#pragma unroll
            for (int i = 0; i < kValues / 4; ++i)
                parts.values[i * kGroupThreads] = state.part(i);
        }
    }
};

}  // namespace kog
