// The fetch warps: poll the next vector's words, apply the norm's weights, and write x into shared memory in the order in which the
// matrix warps read it. Two groups take turns, each with its half of the shared memory, so that one polls while the other writes. The RMS scale is applied to the product, so nothing waits for the sum of squares.
#pragma once
#include "layout.cuh"

namespace kog {

// Four neighbouring values of a vector: the unit of polling (two words) and of writing x.
struct Fetcher {
    const KogDecodeParams& params;
    const Role& role;
    u32 tid, group;
    u32 num_vectors = 0, step = 0, first_vector = 0;  // vectors of this launch; the token, and vectors before it

    static constexpr int kMany = (kMaxPer * kMatrixWarps * 8 + kFetchThreads - 1) / kFetchThreads;  // units of a thread

    // x of unit `unit`: values 4 * unit .. 4 * unit + 3.
    __device__ __forceinline__ void write_x(u32 unit, const float4& value) {
        const float4 v = make_float4(value.x * kXScale, value.y * kXScale, value.z * kXScale, value.w * kXScale);
        const u32 high0 = WeightFormat::pack(v.x, v.y), high1 = WeightFormat::pack(v.z, v.w);
        const u32 low0 = pack_rest<WeightFormat>(v.x, v.y, high0), low1 = pack_rest<WeightFormat>(v.z, v.w, high1);
        unsigned char* at = role.shared->x[num_vectors & 1] + (unit >> 3) * 128 + (unit & 1) * 64 + ((unit & 7) >> 1) * 8;
        *reinterpret_cast<uint2*>(at) = make_uint2(high0, high1);
        *reinterpret_cast<uint2*>(at + 32) = make_uint2(low0, low1);
    }

    // Is the next vector this group's? If not, it counts it and goes on.
    __device__ __forceinline__ bool is_mine() {
        if (kFetchGroups == 1 || (num_vectors & 1) == group) return true;
        ++num_vectors;
        return false;
    }
    __device__ __forceinline__ bool wait_for_room() {
        return mbar_wait(role.shared->note, bar(role.shared->x_empty[num_vectors & 1]), ((num_vectors >> 1) & 1) ^ 1);
    }
    // Say where these warps stand; see WaitNote.
    __device__ __forceinline__ void note(u32 phase, u32 layer, u32 lane, u32 tag, const u64* words, u32 num_words) {
        if (tid != 0) return;
        WaitNote& note = role.shared->note;
        note.phase = phase, note.layer = layer, note.lane = lane;
        note.wanted = tag, note.words = words, note.num_words = num_words;
        note.num_waits = num_vectors + 1;
    }
    __device__ __forceinline__ void hand_over() {
        __syncwarp();
        if (laneid() == 0) mbar_arrive(bar(role.shared->x_full[num_vectors & 1]));
        if (tid < 32) stamp(role, kFetched, step, num_vectors - first_vector);
    }
    __device__ __forceinline__ void hand_over_squares(float squares) {
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) squares += __shfl_xor_sync(kFullWarp, squares, offset);
        if (laneid() == 0) {
            role.shared->squares[num_vectors & 3][tid >> 5] = squares;
            mbar_arrive(bar(role.shared->squares_full[num_vectors & 3]));
        }
        ++num_vectors;
    }

    // Poll this thread's units, of `num_units` in all, until all carry the tag. Whole warps; only missing ones are read again.
    __device__ __forceinline__ bool poll(const u64* words, u32 num_units, u32 tag, ulonglong2 (&got)[kMany]) {
        const u32 tid = opaque(this->tid);
        u32 missing = 0;
#pragma unroll
        for (int i = 0; i < kMany; ++i)
            if (i * kFetchThreads + tid < num_units) missing |= 1u << i;
        const u64* mine = words + 2 * tid;
        while (true) {
#pragma unroll
            for (int i = 0; i < kMany; ++i)
                if (missing >> i & 1) got[i] = load_relaxed_x2(mine + 2 * i * kFetchThreads);
#pragma unroll
            for (int i = 0; i < kMany; ++i)
                if ((missing >> i & 1) && have_tag(got[i], tag)) missing &= ~(1u << i);
            if (__all_sync(kFullWarp, missing == 0)) return true;
            if (role.shared->note.stopped) return false;
        }
    }

    static __device__ __forceinline__ float payload(u64 word) { return __uint_as_float(static_cast<u32>(word)); }
    static __device__ __forceinline__ float4 values(const ulonglong2& words) {
        return make_float4(first_of(words.x), second_of(words.x), first_of(words.y), second_of(words.y));
    }
    static __device__ __forceinline__ float4 widen(uint2 packed) {
        return make_float4(WeightFormat::low(packed.x), WeightFormat::high(packed.x), WeightFormat::low(packed.y),
                           WeightFormat::high(packed.y));
    }
    static __device__ __forceinline__ float4 times(const float4& a, const float4& b) {
        return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
    }
    static __device__ __forceinline__ float square_sum(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

    // A vector of `num_units` units, filled up with zeros to `num_padded`: a residual stream times the norm's weights, or the FFN's
    // activations (no `norm`). `embedding` (16-bit) replaces the words in layer 0.
    __device__ __forceinline__ bool vector(const u64* words, const uint2* embedding, const uint2* norm, u32 num_units, u32 num_padded,
                                           u32 tag, u32 lane_idx, u32 index) {
        const u32 tid = opaque(this->tid);
        uint2 scale[kMany];
        ulonglong2 got[kMany];
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
            scale[i] = make_uint2(WeightFormat::pack(1, 1), WeightFormat::pack(1, 1));
            if (norm != nullptr && i * kFetchThreads + tid < num_units) scale[i] = norm[i * kFetchThreads + tid];
        }
        if (embedding != nullptr) {
#pragma unroll
            for (int i = 0; i < kMany; ++i)
                if (i * kFetchThreads + tid < num_units) {
                    const float4 v = widen(embedding[i * kFetchThreads + tid]);
                    got[i] = make_ulonglong2(make_pair_word(v.x, v.y, 0), make_pair_word(v.z, v.w, 0));
                }
        } else if (!wait_until_near(role, lane_idx, index) || !poll(words, num_units, tag, got)) {
            return false;
        }
        if (!wait_for_room()) return false;
        float squares = 0;
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
            const u32 unit = i * kFetchThreads + tid;
            if (unit < num_padded) {
                const float4 v = unit < num_units ? values(got[i]) : make_float4(0, 0, 0, 0);
                squares += square_sum(v);
                write_x(unit, times(v, widen(scale[i])));
            }
        }
        hand_over();
        hand_over_squares(squares);
        return true;
    }

    // What the attention items of a lane published, merged: each split gives a normalised output and its log2-sum-exp2.
    __device__ __forceinline__ bool attended(const u64* outputs, const u64* log_sums, u32 tag, u32 lane_idx, u32 index) {
        constexpr int kUnits = kQueryRows / 4, kPadded = OutOp::kPer * kMatrixWarps * 8, kHeadUnits = kHeadDim / 4;
        if (!wait_until_near(role, lane_idx, index)) return false;
        const u32 tid = opaque(this->tid);
#pragma unroll 1
        for (u32 first = 0; first < kPadded; first += kFetchThreads) {
            const u32 unit = first + tid;
            const bool real = unit < kUnits;
            const u32 head = real ? unit / kHeadUnits : 0, place_in_head = real ? unit % kHeadUnits : 0;
            const u64* output = outputs + (head * kSplits * kHeadUnits + place_in_head) * 2;
            const u64* log_sum = log_sums + head * kSplits;
            ulonglong2 got[kSplits], logs[kSplits / 2];
            while (true) {
                u32 wrong = 0;
#pragma unroll
                for (int i = 0; i < kSplits / 2; ++i) logs[i] = load_relaxed_x2(log_sum + 2 * i);
#pragma unroll
                for (int i = 0; i < kSplits; ++i) got[i] = load_relaxed_x2(output + i * kHeadUnits * 2);
#pragma unroll
                for (int i = 0; i < kSplits / 2; ++i)
                    wrong |= (static_cast<u32>(logs[i].x >> 32) ^ tag) | (static_cast<u32>(logs[i].y >> 32) ^ tag);
#pragma unroll
                for (int i = 0; i < kSplits; ++i) wrong |= tag_difference(got[i], tag);
                if (__all_sync(kFullWarp, wrong == 0)) break;
                if (role.shared->note.stopped) return false;
            }
            float peak = -INFINITY, total = 0;
#pragma unroll
            for (int i = 0; i < kSplits; ++i) peak = fmaxf(peak, payload(i & 1 ? logs[i / 2].y : logs[i / 2].x));
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < kSplits; ++i) {
                const float weight = exp2_approx(payload(i & 1 ? logs[i / 2].y : logs[i / 2].x) - peak);
                const float4 v = values(got[i]);
                total += weight;
                sum = make_float4(sum.x + weight * v.x, sum.y + weight * v.y, sum.z + weight * v.z, sum.w + weight * v.w);
            }
            const float inverse = real ? __fdividef(1.0f, total) : 0.0f;
            if (first == 0 && !wait_for_room()) return false;
            if (unit < kPadded) write_x(unit, make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse));
        }
        hand_over();
        hand_over_squares(0);
        return true;
    }

    // Sum over the four fetch warps; `half` alternates between calls. False: a warp of the group gave up.
    __device__ __forceinline__ bool group_sum(bool ok, float value, u32 half, float& total) {
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(kFullWarp, value, offset);
        float* parts = role.shared->mean_squares[half & 1];
        if (laneid() == 0) parts[tid >> 5] = value;
        if (!group_all(kFetchBarrier + group, kFetchThreads, ok)) return false;
        total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        return true;
    }
    __device__ __forceinline__ float inverse_rms(float squares) { return rsqrtf(squares * (1.0f / kHidden) + kNormEps); }

    // Input of the LM head: the mean over lanes of rmsnorm(h), or rmsnorm of the sum of h.
    __device__ __forceinline__ bool head(const u64* streams, const uint2* norm, u32 tag) {
        constexpr int kUnits = kHidden / 4, kPadded = HeadOp::kPer * kMatrixWarps * 8;
        const u32 tid = opaque(this->tid);
        float4 sum[kMany];
#pragma unroll
        for (int i = 0; i < kMany; ++i) sum[i] = make_float4(0, 0, 0, 0);
        float total;
        bool ok = wait_until_near(role, 0, 4 * kLayers);
#pragma unroll 1
        for (u32 lane_idx = 0; lane_idx < kLanes; ++lane_idx) {
            ulonglong2 got[kMany];
            ok = ok && poll(streams + lane_idx * kReplicas * kStreamStride, kUnits, tag, got);
            float factor = 1.0f;
            if (!kPreNormSum) {
                float squares = 0;
#pragma unroll
                for (int i = 0; i < kMany; ++i)
                    if (i * kFetchThreads + tid < kUnits) squares += square_sum(values(got[i]));
                if (!group_sum(ok, squares, lane_idx, total)) return false;
                factor = inverse_rms(total) * (1.0f / kLanes);
            } else if (!group_all(kFetchBarrier + group, kFetchThreads, ok)) {
                return false;
            }
            const uint2* lane_norm = norm + (kFinalNormLanes == 1 ? 0 : lane_idx * kUnits);
#pragma unroll
            for (int i = 0; i < kMany; ++i)
                if (i * kFetchThreads + tid < kUnits) {
                    float4 v = values(got[i]);
                    if (!kPreNormSum) v = times(v, widen(lane_norm[i * kFetchThreads + tid]));
                    sum[i] = make_float4(sum[i].x + factor * v.x, sum[i].y + factor * v.y, sum[i].z + factor * v.z,
                                         sum[i].w + factor * v.w);
                }
        }
        float factor = 1.0f;
        if (kPreNormSum) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < kMany; ++i) squares += square_sum(sum[i]);
            if (!group_sum(true, squares, 0, total)) return false;
            factor = inverse_rms(total);
        }
        if (!wait_for_room()) return false;
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
            const u32 unit = i * kFetchThreads + tid;
            float4 v = make_float4(sum[i].x * factor, sum[i].y * factor, sum[i].z * factor, sum[i].w * factor);
            if (kPreNormSum && unit < kUnits) v = times(v, widen(norm[unit]));
            if (unit < kPadded) write_x(unit, v);
        }
        hand_over();
        hand_over_squares(0);
        return true;
    }
};

__device__ __forceinline__ void fetch(const KogDecodeParams& params, const Role& role, u32 tid, u32 group) {
    Fetcher fetcher{params, role, tid, group};
    constexpr int kUnits = kHidden / 4;
    u32 token;
    for (u32 step = 0; begin_token(role, step, token); ++step) {
        fetcher.step = step, fetcher.first_vector = fetcher.num_vectors;
        // Half a layer each time: attention, then MLP.
#pragma unroll 1
        for (u32 half = 0; half < 2 * kLayers; ++half) {
#pragma unroll 1
            for (u32 i = 0; i < 2 * kLanes; ++i) {
                const u32 layer = half >> 1, is_mlp = half & 1, index = 2 * half + i / kLanes;
                if (!fetcher.is_mine()) {
                    // A barrier tells the last phase from the one before, no more: with one lane both groups follow each.
                    if (kLanes == 1 && !wait_until_near(role, 0, index)) return;
                    continue;
                }
                const u32 tag = layer_tag(role.first_epoch + step, layer);
                const bool second = i >= kLanes;
                const u32 lane = second ? i - kLanes : i, copy = opaque(lane * kReplicas + role.cta % kReplicas);
                const u64* words = reinterpret_cast<const u64*>(params.words_ptr);
                if (second && !is_mlp) {
                    const u64* outputs = words + kAttendedOffset + copy * kAttendedStride;
                    fetcher.note(kOutPhase, layer, lane, tag, outputs, kSplits * kQueryRows / 2);
                    if (!fetcher.attended(outputs, words + kLogSumOffset + copy * kLogSumStride, tag, lane, index)) return;
                    continue;
                }
                const bool embedded = half == 0 && !second;
                const uint2* embedding = reinterpret_cast<const uint2*>(params.embedding_ptr) + static_cast<u64>(token) * kUnits;
                const u64* from = second ? words + kActivationOffset + copy * kActivationStride
                                         : words + (is_mlp ? kMiddleOffset : kStreamOffset) + copy * kStreamStride;
                const uint2* norms = reinterpret_cast<const uint2*>(params.norms_ptr);
                const uint2* norm = second ? nullptr : norms + (half * kNormLanes + (kNormLanes == 1 ? 0 : lane)) * kUnits;
                const u32 from_tag = second || is_mlp ? tag : (tag - 1) & 0xffffu;
                const u32 num_units = second ? kFfn / 4 : kUnits;
                fetcher.note(second ? kDownPhase : is_mlp ? kGateUpPhase : kQkvPhase, layer, lane, from_tag, from,
                             embedded ? 0 : 2 * num_units);
                if (!fetcher.vector(from, embedded ? embedding : nullptr, norm, num_units,
                                    (second ? DownOp::kPer : QkvOp::kPer) * kMatrixWarps * 8, from_tag, lane, index))
                    return;
            }
        }
        if (has_head(role, step) && fetcher.is_mine()) {
            const u32 tag = layer_tag(role.first_epoch + step, kLayers - 1);
            const u64* streams = reinterpret_cast<const u64*>(params.words_ptr) + kStreamOffset + role.cta % kReplicas * kStreamStride;
            fetcher.note(kHeadPhase, 0, 0, tag, streams, kHidden / 2);
            if (!fetcher.head(streams, reinterpret_cast<const uint2*>(params.final_norm_ptr), tag)) return;
        }
    }
}

}  // namespace kog
