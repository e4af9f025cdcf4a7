// The LM head's input: the last streams, one by one or agreed on by all warps.
#pragma once
#include "gather_vector.cuh"

namespace kog {

// Of the form `replicate` its input is the mean over the model's lanes of rmsnorm(h), or rmsnorm of the sum of h. The scales need whole vectors: the
// warps add up their sums of squares through shared memory. Every rank reads all lanes in the same order, hence the same bits.
// Streams lie one behind the other, those of a peer's lanes, too: its row of the mailbox has no gap (kernel_boxes.py).
constexpr u32 kStreamWords = kReplicas * (kStreamsToAll ? kStreamCopyWords : kTokens * kStreamStride);
__device__ __forceinline__ const u64* last_stream(const Gatherer& self, u32 lane_idx) {
    const u64* first = kStreamsToAll ? heap_of(self.peers, self.peers.rank) + stream_box().row(kRanks, 0, 0) + self.role.cta % kReplicas * kStreamCopyWords
                                     : reinterpret_cast<const u64*>(self.params.words_ptr) + kStreamOffset +
                                           self.role.cta % kReplicas * (kTokens * kStreamStride);
    return first + lane_idx * kStreamWords;
}
// A norm that all lanes share is multiplied into their sum. Its weights wait in x, where the sum will be, while registers are full.

// ---- forms of the LM head that multiply the last streams one by one ----
__device__ __forceinline__ Source last_source(const Gatherer& self, u32 lane_idx) {
    return {last_stream(self, lane_idx), layer_tag(self.pass.number, kLayers - 1)};
}
__device__ __forceinline__ void load_last_norm(Gatherer& self, u32 lane_idx) {
    const uint2* norm = reinterpret_cast<const uint2*>(self.params.final_norm_ptr) +
                        (kFinalNormLanes == 1 ? 0 : lane_idx) * (kHidden / 4) + self.warp * HiddenSlice::kOfVector + self.lane;
#pragma unroll
    for (int i = 0; i < HiddenSlice::kLoads; ++i)
        if (HiddenSlice::is_real(self.warp, self.lane, i)) self.scale[i] = norm[32 * i];
}
__device__ __forceinline__ void load_last_stream(Gatherer& self, u32 lane_idx) {
    load_last_norm(self, lane_idx);
    self.load_units<HiddenSlice, kStreamsToAll>(last_source(self, lane_idx).words);
}
// The same from the ranks' last sums. One thread block publishes it, for those who look at what layers have left.
__device__ __forceinline__ bool gather_last_sums(Gatherer& self, float (&squares)[kTokens]) {
    const u32 tag = last_source(self, 0).tag;
    load_last_norm(self, 0);
    if (!wait_until_near<kQkvPhase>(self.role, kLanes - 1, 4 * kLayers)) return false;
    if (!self.gather_sums(1, tag, [&](const u64* words, u32 rank) { self.note_wait(kHeadPhase, kNowhere, rank, tag, words, kHidden / 2); })) return false;
    if (self.role.cta == 0) {
        u64* words = reinterpret_cast<u64*>(self.params.words_ptr) + kStreamOffset + 2 * (self.warp * HiddenSlice::kOfVector + self.lane);
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(self.warp, self.lane, i))
                store_relaxed_x2(words + 64 * i, make_pair_word(self.stream[i].x, self.stream[i].y, tag),
                                 make_pair_word(self.stream[i].z, self.stream[i].w, tag));
    }
    self.write_units<HiddenSlice, true, HeadX>(squares);
    self.loaded = false;
    __syncwarp();
    return true;
}
__device__ __forceinline__ bool gather_last_stream(Gatherer& self, const Place& at, float (&squares)[kTokens]) {
    const u32 lane_idx = kVocabParallelHead ? vocab_lane(self.role.cta) : at.lane();
    if (kDirectSums && !kHeadOnly) return gather_last_sums(self, squares);
    if constexpr (kTokens > 1) {
        load_last_norm(self, lane_idx);
        if (!self.gather_tokens<HiddenSlice, kHeadPhase, true, HeadX>(at, squares)) return false;
        self.loaded = false;
        __syncwarp();
        return true;
    }
    if (!self.loaded) {
        if (!wait_until_near<kQkvPhase>(self.role, kVocabParallelHead ? lane_idx : kLanes - 1, 4 * kLayers)) return false;
        load_last_stream(self, lane_idx);
    }
    const Source from = last_source(self, lane_idx);
    if (!self.wait_for_units<HiddenSlice, kStreamsToAll>(from, [&] { self.note_wait(kHeadPhase, kNowhere, lane_idx, from.tag, from.words, kHidden / 2); }))
        return false;
    self.write_units<HiddenSlice, true, HeadX>(squares);
    self.loaded = false;
    __syncwarp();
    return true;
}

// ---- the form `replicate` ----
constexpr bool kParksNorm = kPreNormSum || kFinalNormLanes == 1;
struct LastStreams {
    ulonglong2 got[kTogether][HiddenSlice::kLoads];
};
__device__ __forceinline__ void load_streams(const Gatherer& self, u32 first, LastStreams& streams) {
    const u64* mine = last_stream(self, first) + 2 * (self.warp * HiddenSlice::kOfVector + self.lane);
#pragma unroll
    for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(self.warp, self.lane, i)) {
                const u64* at = mine + k * kStreamWords + 64 * i;
                streams.got[k][i] = kRanks > 1 ? load_system_x2(at) : load_relaxed_x2(at);
            }
}
__device__ __forceinline__ bool wait_for_streams(const Gatherer& self, u32 first, u32 tag, LastStreams& streams) {
#pragma unroll 1
    for (u32 rounds = 1;; ++rounds) {
        load_streams(self, first, streams);
        u32 wrong = 0;
#pragma unroll
        for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
            for (int i = 0; i < HiddenSlice::kLoads; ++i)
                if (HiddenSlice::is_real(self.warp, self.lane, i)) wrong |= tag_difference(streams.got[k][i], tag);
        if (__all_sync(kFullWarp, wrong == 0)) return true;
        if (must_leave(self.role.stopped())) return false;
        if (rounds % 1024 == 0) self.note_wait(kHeadPhase, kNowhere, first, tag, last_stream(self, first), kHidden / 2);
    }
}
// Sums over the warp of kMany values at once, each in the order of a butterfly: thread i has that of value i / (32 / kMany).
template <u32 kMany>
__device__ __forceinline__ float sums_of_warp(const Gatherer& self, float (&values)[kMany]) {
    u32 offset = 16;
#pragma unroll
    for (u32 left = kMany / 2; left > 0; left /= 2, offset /= 2) {
        const bool upper = self.lane & offset;
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
__device__ __forceinline__ void add_squares(const Gatherer& self, float (&squares)[kMany], u32 first) {
    const float sum = sums_of_warp(self, squares);
    const u32 lane_idx = first + self.lane / (32 / kMany);
    const bool is_mine = self.lane % (32 / kMany) == 0;
    if (is_mine) self.role.shared->head_squares[self.num_heads & 1][self.warp][lane_idx] = sum;
}
// Nothing read ahead is wanted: its registers were free meanwhile.
__device__ __forceinline__ void forget_words(Gatherer& self) {
#pragma unroll
    for (int i = 0; i < kMany; ++i) self.got[i] = make_ulonglong2(0, 0);
#pragma unroll
    for (int i = 0; i < kMany; ++i) self.scale[i] = make_uint2(0, 0);
}
__device__ __forceinline__ bool gather_agreed(Gatherer& self) {
    Shared& shared = *self.role.shared;
    const u32 tag = layer_tag(self.pass.number, kLayers - 1);
    using S = HiddenSlice;
    const u32 warp = self.warp;  // not read anew after each wait: the compiler cannot know that nothing writes it
    float4 sum[S::kLoads];
#pragma unroll
    for (int i = 0; i < S::kLoads; ++i) sum[i] = make_float4(0, 0, 0, 0);
    const uint2* norm = reinterpret_cast<const uint2*>(self.params.final_norm_ptr) + warp * S::kOfVector + self.lane;
    if constexpr (kParksNorm) {
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i)
            if (S::is_real(warp, self.lane, i)) store_shared(self.place_of(i * 32 + self.lane), norm[32 * i]);
    }
    // An abort ends the waits, but nobody leaves before the end: on a way around, registers would be kept for what is not there yet.
    bool alive = true;
#pragma unroll 1
    for (u32 first = 0; first < kModelLanes; first += kTogether) {
        LastStreams streams;
        alive = wait_until_near<kQkvPhase>(self.role, kLanes - 1, 4 * kLayers) && alive;
        alive = wait_for_streams(self, first, tag, streams) && alive;
        float squares[kTogether];
#pragma unroll
        for (u32 k = 0; k < kTogether; ++k) {
            squares[k] = 0;
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i) {
                if (!S::is_real(warp, self.lane, i)) continue;
                if (kPreNormSum) sum[i] = add_scaled(sum[i], 1.0f, values(streams.got[k][i]));
                else squares[k] += square_sum(values(streams.got[k][i]));
            }
        }
        if (!kPreNormSum) add_squares(self, squares, first);
    }
    if (kPreNormSum) {
        float squares[1] = {0};
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) squares[0] += square_sum(sum[i]);
        add_squares(self, squares, 0);
    }
    __syncwarp();
    if (self.lane == 0) mbar_arrive(self.role.base + KOG_OFFSET(head_squares_full));
    alive = mbar_wait(self.role.stopped(), self.role.base + KOG_OFFSET(head_squares_full), self.num_heads & 1) && alive;
    const u32 mine = self.lane < (kPreNormSum ? 1 : kModelLanes) ? self.lane : 0;
    float total = 0;
#pragma unroll 4
    for (int i = 0; i < kMatrixWarps; ++i) total += shared.head_squares[self.num_heads & 1][i][mine];
    const float factor = inverse_root_approx(total * (1.0f / kHidden) + kNormEps) * (kPreNormSum ? 1.0f : 1.0f / kModelLanes);
    if (!kPreNormSum) {  // the mean: all streams are read once more
#pragma unroll 1
        for (u32 first = 0; first < kModelLanes; first += kTogether) {
            LastStreams streams;
            load_streams(self, first, streams);
#pragma unroll
            for (u32 k = 0; k < kTogether; ++k) {
                const float lane_factor = __shfl_sync(kFullWarp, factor, first + k);
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i) {
                    if (!S::is_real(warp, self.lane, i)) continue;
                    float4 stream = values(streams.got[k][i]);
                    if (kFinalNormLanes > 1) stream = times(stream, norm_weights(norm[(first + k) * (kHidden / 4) + 32 * i]));
                    sum[i] = add_scaled(sum[i], lane_factor, stream);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::kLoads; ++i) {
        if (!S::is_mine(self.lane, i)) continue;
        float4 v = sum[i];
        if (kPreNormSum) v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        if (kParksNorm && S::is_real(warp, self.lane, i)) {
            uint2 weights;
            load_shared(self.place_of(i * 32 + self.lane), weights);
            v = times(v, norm_weights(weights));
        }
        self.write_x<HeadX>(self.place_of(i * 32 + self.lane), v);
    }
    ++self.num_heads;
    forget_words(self);
    __syncwarp();
    return alive;
}
__device__ __forceinline__ bool gather_head(Gatherer& self, const Place& at, float (&squares)[kTokens]) {
    if constexpr (kStreamHead) return gather_last_stream(self, at, squares);
    else return gather_agreed(self);
}

}  // namespace kog
