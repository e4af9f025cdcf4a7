// A group of four warps: products of its rows with the tiles of an item, and what is made of them.
#pragma once

#include "attention_rows.cuh"

namespace kog {

struct Consumer {
    const KogAttentionParams& params;
    Memory memory;
    u32 group;
    bool in_turn;
    Ring ring{0, 0};
    State state;

    __device__ __forceinline__ void release(u32 slot) {
        if (laneid() == 0) mbar_arrive(memory.empty(slot));
    }
    // Scores of a tile: queued.
    __device__ __forceinline__ void queue_scores(float (&scores)[kScores], u32 slot) {
        const u64 query = rows_at<kPanel>(memory.query(group)), keys = rows_at<kPanel>(memory.slot(slot));
#pragma unroll
        for (u32 k = 0; k < kHeadDim / 16; ++k) {
            const u32 panel = k * 16 / kPanel, within = k * 16 % kPanel * 2;
            multiply_rows(scores, query + ((panel * kQueryPanelBytes + within) >> 4), keys + ((panel * kPanelBytes + within) >> 4), k > 0);
        }
        products_commit();
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
    __device__ __forceinline__ void attend(int from, int until, const int (&position)[2], int lowest, int highest, bool is_last) {
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
            if (in_turn) group_sync(1 + group, 2 * kGroupThreads);
            __syncwarp();
            settle(scores);
            settle(state.values);
            products_begin();
            queue_scores(scores, keys);
            mbar_wait(memory.full(values), ring.parity);
            ring.advance();
            __syncwarp();
            queue_values(chances, values);
            if (in_turn) group_arrive(2 - group, 2 * kGroupThreads);
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
        if (is_last && laneid() == 0) mbar_arrive(memory.query_empty(group));
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
        const u32 thread = threadIdx.x % kGroupThreads, warp_row = thread / 32 * 16;
        const u32 totals = memory.base + kTotalsFrom + group * kTotalBytes + 16 * thread;
        u32 query_parity = 0;
        if (in_turn && group == 1) group_arrive(1, 2 * kGroupThreads);  // the other one begins
        for (u32 pass = 0; pass * gridDim.x < params.num_items; ++pass) {
            const u32 index = item_index(pass);
            if (index >= params.num_items) continue;
            const Item item(params, index, start);
            if (item.first >= item.end) continue;
            const int origin = start + item.first_row(params, group);
            const int lowest = origin + warp_row / kPack, highest = origin + (warp_row + 15) / kPack;
            const int position[2] = {static_cast<int>(origin + (warp_row + laneid() / 4) / kPack),
                                     static_cast<int>(origin + (warp_row + laneid() / 4 + 8) / kPack)};
            mbar_wait(memory.query_full(group), query_parity);
            query_parity ^= 1;
            __syncwarp();
            float top[2], sum[2];
            for (int from = item.first; from < item.end;) {
                const int until = item.run_end(params, from);
                attend(from, until, position, lowest, highest, until == item.end);
                if (from == item.first) {
                    top[0] = state.top[0], top[1] = state.top[1], sum[0] = state.sum[0], sum[1] = state.sum[1];
                } else {
                    float factor[4];
                    merge(top, sum, factor, state.top, state.sum);
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) {
                        const float4 total = load_shared_float4(totals + i * 16 * kGroupThreads);
                        float* values = &state.values[4 * i];
                        values[0] = merged(total.x, values[0], factor, 0), values[1] = merged(total.y, values[1], factor, 0);
                        values[2] = merged(total.z, values[2], factor, 1), values[3] = merged(total.w, values[3], factor, 1);
                    }
                }
                if (until < item.end) {
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) store_shared_float4(totals + i * 16 * kGroupThreads, state.part(i));
                }
                from = until;
            }
            state.sum[0] = sum[0], state.sum[1] = sum[1], state.top[0] = top[0], state.top[1] = top[1];
            if (params.num_partitions == 0) {
                store_rows(params, item, group, state);
                continue;
            }
            const Parts parts(params, index, group);
            parts.sums[0] = make_float4(top[0], top[1], sum[0], sum[1]);
#pragma unroll
            for (int i = 0; i < kValues / 4; ++i)
                parts.values[i * kGroupThreads] = state.part(i);
        }
    }
};

}  // namespace kog
