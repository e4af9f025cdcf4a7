// The LM head's input: the last streams, one by one or agreed on by all warps.
#pragma once
#include "gather_vector.cuh"

namespace kog {

struct HeadGatherer : VectorGatherer {
    // Of the form `replicate` its input is the mean over the model's lanes of rmsnorm(h), or rmsnorm of the sum of h. The scales need whole vectors: the
    // warps add up their sums of squares through shared memory. Every rank reads all lanes in the same order, hence the same bits.
    // Streams lie one behind the other, those of a peer's lanes, too: its row of the mailbox has no gap (kernel_boxes.py).
    static constexpr u32 kStreamWords = kReplicas * (kStreamsToAll ? kStreamCopyWords : kTokens * kStreamStride);
    __device__ __forceinline__ const u64* last_stream(u32 lane_idx) const {
        const u64* first = kStreamsToAll ? heap_of(peers, peers.rank) + stream_box().row(kRanks, 0, 0) + role.cta % kReplicas * kStreamCopyWords
                                         : reinterpret_cast<const u64*>(params.words_ptr) + kStreamOffset + role.cta % kReplicas * (kTokens * kStreamStride);
        return first + lane_idx * kStreamWords;
    }
    // A norm that all lanes share is multiplied into their sum. Its weights wait in x, where the sum will be, while registers are full.

    // ---- forms of the LM head that multiply the last streams one by one ----
    __device__ __forceinline__ Source last_source(u32 lane_idx) { return {last_stream(lane_idx), layer_tag(pass.number, kLayers - 1)}; }
    __device__ __forceinline__ void load_last_norm(u32 lane_idx) {
        const uint2* norm = reinterpret_cast<const uint2*>(params.final_norm_ptr) +
                            (kFinalNormLanes == 1 ? 0 : lane_idx) * (kHidden / 4) + warp * HiddenSlice::kOfVector + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) scale[i] = norm[32 * i];
    }
    __device__ __forceinline__ void load_last_stream(u32 lane_idx) {
        load_last_norm(lane_idx);
        load_units<HiddenSlice, kStreamsToAll>(last_source(lane_idx).words);
    }
    // The same from the ranks' last sums. One thread block publishes it, for those who look at what layers have left.
    __device__ __forceinline__ bool gather_last_sums(float (&squares)[kTokens]) {
        const u32 tag = last_source(0).tag;
        load_last_norm(0);
        if (!wait_until_near<kQkvPhase>(role, kLanes - 1, 4 * kLayers)) return false;
        if (!gather_sums(1, tag, [&](const u64* words, u32 rank) { note_wait(kHeadPhase, kNowhere, rank, tag, words, kHidden / 2); })) return false;
        if (role.cta == 0) {
            u64* words = reinterpret_cast<u64*>(params.words_ptr) + kStreamOffset + 2 * (warp * HiddenSlice::kOfVector + lane);
#pragma unroll
            for (int i = 0; i < HiddenSlice::kLoads; ++i)
                if (HiddenSlice::is_real(warp, lane, i))
                    store_relaxed_x2(words + 64 * i, make_pair_word(stream[i].x, stream[i].y, tag), make_pair_word(stream[i].z, stream[i].w, tag));
        }
        write_units<HiddenSlice, true, HeadX>(squares);
        loaded = false;
        __syncwarp();
        return true;
    }
    __device__ __forceinline__ bool gather_last_stream(const Place& at, float (&squares)[kTokens]) {
        const u32 lane_idx = kVocabParallelHead ? vocab_lane(role.cta) : at.lane();
        if (kDirectSums && !kHeadOnly) return gather_last_sums(squares);
        if constexpr (kTokens > 1) {
            load_last_norm(lane_idx);
            if (!gather_tokens<HiddenSlice, kHeadPhase, true, HeadX>(at, squares)) return false;
            loaded = false;
            __syncwarp();
            return true;
        }
        if (!loaded) {
            if (!wait_until_near<kQkvPhase>(role, kVocabParallelHead ? lane_idx : kLanes - 1, 4 * kLayers)) return false;
            load_last_stream(lane_idx);
        }
        const Source from = last_source(lane_idx);
        if (!wait_for_units<HiddenSlice, kStreamsToAll>(from, [&] { note_wait(kHeadPhase, kNowhere, lane_idx, from.tag, from.words, kHidden / 2); }))
            return false;
        write_units<HiddenSlice, true, HeadX>(squares);
        loaded = false;
        __syncwarp();
        return true;
    }

    // ---- the form `replicate` ----
    static constexpr bool kParksNorm = kPreNormSum || kFinalNormLanes == 1;
    struct Streams {
        ulonglong2 got[kTogether][HiddenSlice::kLoads];
    };
    __device__ __forceinline__ void load_streams(u32 first, Streams& streams) {
        const u64* mine = last_stream(first) + 2 * (warp * HiddenSlice::kOfVector + lane);
#pragma unroll
        for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
            for (int i = 0; i < HiddenSlice::kLoads; ++i)
                if (HiddenSlice::is_real(warp, lane, i)) {
                    const u64* at = mine + k * kStreamWords + 64 * i;
                    streams.got[k][i] = kRanks > 1 ? load_system_x2(at) : load_relaxed_x2(at);
                }
    }
    __device__ __forceinline__ bool wait_for_streams(u32 first, u32 tag, Streams& streams) {
#pragma unroll 1
        for (u32 rounds = 1;; ++rounds) {
            load_streams(first, streams);
            u32 wrong = 0;
#pragma unroll
            for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
                for (int i = 0; i < HiddenSlice::kLoads; ++i)
                    if (HiddenSlice::is_real(warp, lane, i)) wrong |= tag_difference(streams.got[k][i], tag);
            if (__all_sync(kFullWarp, wrong == 0)) return true;
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) note_wait(kHeadPhase, kNowhere, first, tag, last_stream(first), kHidden / 2);
        }
    }
    __device__ __forceinline__ bool gather_head(const Place& at, float (&squares)[kTokens]) {
        if constexpr (kStreamHead) return gather_last_stream(at, squares);
        else return gather_agreed();
    }
    __device__ __forceinline__ bool gather_agreed() {
        Shared& shared = *role.shared;
        const u32 tag = layer_tag(pass.number, kLayers - 1);
        using S = HiddenSlice;
        const u32 warp = this->warp;  // not read anew after each wait: the compiler cannot know that nothing writes it
        float4 sum[S::kLoads];
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) sum[i] = make_float4(0, 0, 0, 0);
        const uint2* norm = reinterpret_cast<const uint2*>(params.final_norm_ptr) + warp * S::kOfVector + lane;
        if constexpr (kParksNorm) {
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i)
                if (S::is_real(warp, lane, i)) store_shared(place_of(i * 32 + lane), norm[32 * i]);
        }
        // An abort ends the waits, but nobody leaves before the end: on a way around, registers would be kept for what is not there yet.
        bool alive = true;
#pragma unroll 1
        for (u32 first = 0; first < kModelLanes; first += kTogether) {
            Streams streams;
            alive = wait_until_near<kQkvPhase>(role, kLanes - 1, 4 * kLayers) && alive;
            alive = wait_for_streams(first, tag, streams) && alive;
            float squares[kTogether];
#pragma unroll
            for (u32 k = 0; k < kTogether; ++k) {
                squares[k] = 0;
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i) {
                    if (!S::is_real(warp, lane, i)) continue;
                    if (kPreNormSum) sum[i] = add_scaled(sum[i], 1.0f, values(streams.got[k][i]));
                    else squares[k] += square_sum(values(streams.got[k][i]));
                }
            }
            if (!kPreNormSum) add_squares(squares, first);
        }
        if (kPreNormSum) {
            float squares[1] = {0};
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i) squares[0] += square_sum(sum[i]);
            add_squares(squares, 0);
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(head_squares_full));
        alive = mbar_wait(role.stopped(), role.base + KOG_OFFSET(head_squares_full), num_heads & 1) && alive;
        const u32 mine = lane < (kPreNormSum ? 1 : kModelLanes) ? lane : 0;
        float total = 0;
#pragma unroll 4
        for (int i = 0; i < kMatrixWarps; ++i) total += shared.head_squares[num_heads & 1][i][mine];
        const float factor = inverse_root_approx(total * (1.0f / kHidden) + kNormEps) * (kPreNormSum ? 1.0f : 1.0f / kModelLanes);
        if (!kPreNormSum) {  // the mean: all streams are read once more
#pragma unroll 1
            for (u32 first = 0; first < kModelLanes; first += kTogether) {
                Streams streams;
                load_streams(first, streams);
#pragma unroll
                for (u32 k = 0; k < kTogether; ++k) {
                    const float lane_factor = __shfl_sync(kFullWarp, factor, first + k);
#pragma unroll
                    for (int i = 0; i < S::kLoads; ++i) {
                        if (!S::is_real(warp, lane, i)) continue;
                        float4 stream = values(streams.got[k][i]);
                        if (kFinalNormLanes > 1) stream = times(stream, norm_weights(norm[(first + k) * (kHidden / 4) + 32 * i]));
                        sum[i] = add_scaled(sum[i], lane_factor, stream);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            if (!S::is_mine(lane, i)) continue;
            float4 v = sum[i];
            if (kPreNormSum) v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
            if (kParksNorm && S::is_real(warp, lane, i)) {
                uint2 weights;
                load_shared(place_of(i * 32 + lane), weights);
                v = times(v, norm_weights(weights));
            }
            write_x<HeadX>(place_of(i * 32 + lane), v);
        }
        ++num_heads;
        forget();
        __syncwarp();
        return alive;
    }
    // Nothing read ahead is wanted: its registers were free meanwhile.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < kMany; ++i) got[i] = make_ulonglong2(0, 0);
#pragma unroll
        for (int i = 0; i < kMany; ++i) scale[i] = make_uint2(0, 0);
    }
    // Sums over the warp of kMany values at once, each in the order of a butterfly: thread i has that of value i / (32 / kMany).
    template <u32 kMany>
    __device__ __forceinline__ float sums_of_warp(float (&values)[kMany]) {
        u32 offset = 16;
#pragma unroll
        for (u32 left = kMany / 2; left > 0; left /= 2, offset /= 2) {
            const bool upper = lane & offset;
#pragma unroll
            for (u32 k = 0; k < left; ++k) {
                const float mine = upper ? values[k + left] : values[k], others = upper ? values[k] : values[k + left];
                values[k] = mine + __shfl_xor_sync(kFullWarp, others, offset);
            }
        }
#pragma unroll
        for (; offset > 0; offset /= 2) values[0] += __shfl_xor_sync(kFullWarp, values[0], offset);
        return values[0];
    }
    // This warp's sums of squares of the streams from `first` on, to all warps.
    template <u32 kMany>
    __device__ __forceinline__ void add_squares(float (&squares)[kMany], u32 first) {
        const float sum = sums_of_warp(squares);
        const u32 lane_idx = first + lane / (32 / kMany);
        const bool is_mine = lane % (32 / kMany) == 0;
        if (is_mine) role.shared->head_squares[num_heads & 1][warp][lane_idx] = sum;
    }
};

}  // namespace kog
