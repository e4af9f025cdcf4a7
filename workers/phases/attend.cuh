// Attention of one position. An item is a KV head and a split: positions p with p % kSplits == split. Items are spread over the
// thread blocks by a map that depends on layer and lane only, so the thread block that appends a row of K and V is the one that
// reads it later: no K or V crosses thread blocks, and the append needs no fence beyond the group's barrier. A split keeps its rows
// in batches of 16 (K by rows, V by pairs of positions, as the matrix unit wants them); windowed layers keep a ring of batches.
// The new position itself does not come back from memory: it is a batch of one row in shared memory.
#pragma once
#include "layout.cuh"

namespace kog {

constexpr u32 kBatchBytes = 2 * 16 * kHeadDim * 2;
constexpr int kDimRegisters = kHeadDim / 8;  // 16-bit pairs: a thread's share of a row of K, or of a pair of positions of V
static_assert(kHeadDim % 16 == 0, "the matrix unit takes 16 dimensions at a time");

__device__ __forceinline__ void load_dims(const unsigned char* from, u32 (&to)[kDimRegisters]) {
    if constexpr (kDimRegisters % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kDimRegisters; i += 4) {
            uint4 v;
            load_generic(from + i * 4, v);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kDimRegisters; i += 2) {
            uint2 v;
            load_generic(from + i * 4, v);
            to[i] = v.x, to[i + 1] = v.y;
        }
    }
}

struct Attender {
    const KogDecodeParams& params;
    const Role& role;
    u32 warp, lane;
    u32 num_items = 0, first_vector = 0, step = 0;  // products of earlier tokens; the token

    // Read kCount words, if this thread wants them; true when all carry the tag.
    template <int kCount>
    static __device__ __forceinline__ bool read(const u64* words, bool wanted, u32 tag, u64 (&got)[kCount]) {
        if (!wanted) return true;
        bool ready = true;
        if constexpr (kCount % 2 == 0) {
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                const ulonglong2 two = load_relaxed_x2(words + i);
                got[i] = two.x, got[i + 1] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) got[i] = load_relaxed(words + i);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) ready = ready && has_tag(got[i], tag);
        return ready;
    }

    // Wait for the new position's K and V. They go to their place in the cache, and into the first row of a batch of their own in
    // shared memory, where this warp reads them at once (its other rows are never written and count for nothing).
    __device__ __forceinline__ bool stage_fresh(const u64* words, unsigned char* cache, u32 capacity, u32 layer, u32 lane_idx,
                                                u32 kv_head, u32 position, u32 tag) {
        constexpr u32 kWords = kHeadDim / 2;  // of K, and of V
        constexpr int kMany = (2 * kWords + 31) / 32;
        if (!counter_wait(role.shared->note, role.shared->num_finalized, first_vector + 4 * layer * kLanes + lane_idx + 1)) return false;
        const u64* key_words = words + kQueryRows / 2 + kv_head * kWords;
        u64 got[kMany];
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < kMany; ++i) {
                const u32 word = i * 32 + lane;
                if (word < 2 * kWords) got[i] = load_relaxed(key_words + (word < kWords ? word : word + kKvRows / 2 - kWords));
            }
#pragma unroll
            for (int i = 0; i < kMany; ++i)
                if (i * 32 + lane < 2 * kWords) ready = ready && has_tag(got[i], tag);
            if (__all_sync(kFullWarp, ready)) break;
            if (role.shared->note.stopped) return false;
        }
        const u32 slot = (position / kSplits) % capacity, row = slot & 15;
        unsigned char* home = cache + (slot >> 4) * kBatchBytes;
        unsigned char* values = home + 16 * kHeadDim * 2 + (row >> 1) * kHeadDim * 4 + (row & 1) * 2;
#pragma unroll
        for (int i = 0; i < kMany; ++i) {
            const u32 word = i * 32 + lane;
            const u32 both = KvFormat::pack(first_of(got[i]), second_of(got[i]));
            if (word < kWords) {
                *reinterpret_cast<u32*>(home + row * kHeadDim * 2 + word * 4) = both;
                *reinterpret_cast<u32*>(role.shared->fresh + word * 4) = both;
            } else if (word < 2 * kWords) {
                const u32 at = (word - kWords) * 8;
                *reinterpret_cast<u16*>(values + at) = static_cast<u16>(both);
                *reinterpret_cast<u16*>(values + at + 4) = static_cast<u16>(both >> 16);
                *reinterpret_cast<uint2*>(role.shared->fresh + 16 * kHeadDim * 2 + at) = make_uint2(both & 0xffffu, both >> 16);
            }
        }
        __syncwarp();
        return true;
    }

    __device__ __forceinline__ bool item(u32 layer, u32 lane_idx, u32 item_idx, u32 position, u32 tag) {
        const u32 lane = opaque(this->lane), warp = opaque(this->warp), group = lane >> 2, part = lane & 3;
        const u32 kv_head = item_idx / kSplits, split = item_idx % kSplits;
        const bool windowed = in_mask(kWindowMask, layer);
        const u32 batches = windowed ? kWindowBatches : kFullBatches, capacity = batches * 16;
        const u32 windowed_before = __popcll(kWindowMask & ((1ull << layer) - 1));
        const u64 first_batch = static_cast<u64>(windowed_before * kWindowBatches + (layer - windowed_before) * kFullBatches) * kLanes *
                                    kItems + static_cast<u64>(lane_idx * kItems + item_idx) * batches;
        unsigned char* cache = reinterpret_cast<unsigned char*>(params.kv_ptr) + first_batch * kBatchBytes;

        // Positions of this split before the current one, and the batches that they fill.
        const u32 num_old = (position + kSplits - 1 - split) / kSplits;
        u32 num_batches = (num_old + 15) / 16;
        if (num_batches > batches) num_batches = batches;
        const bool owner = position % kSplits == split;
        const u32 newest = (num_old + capacity - 1) % capacity;  // slot of the last old position
        const u32 window = windowed ? kWindow : kMaxContext;

        const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kQkvOffset + lane_idx * kQkvStride;
        const u32 head = (group >> 1) < kGroup ? group >> 1 : kGroup - 1;
        u32 query[kDimRegisters];
        float outputs[kHeadDim / 16][4] = {};
        float peak = -INFINITY, sum = 0;
        bool ok = true, have_query = false;
#pragma unroll 1
        for (u32 batch = warp; batch < num_batches + (owner ? 1 : 0) || !have_query; batch += 4) {
            const bool old = batch < num_batches, fresh = !old && owner && batch == num_batches;
            u32 keys[2][kDimRegisters], values[2][kDimRegisters];
            unsigned char* at = cache + batch * kBatchBytes;
            if (fresh) {
                ok = stage_fresh(words, cache, capacity, layer, lane_idx, kv_head, position, tag);
                if (!ok) break;
                at = role.shared->fresh;
            }
            if (old || fresh) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load_dims(at + (group + 8 * i) * kHeadDim * 2 + part * kDimRegisters * 4, keys[i]);
                    load_dims(at + 16 * kHeadDim * 2 + (part + 4 * i) * kHeadDim * 4 + group * kDimRegisters * 4, values[i]);
                }
            }
            if (!have_query) {
                have_query = true;
                ok = counter_wait(role.shared->note, role.shared->num_finalized, first_vector + 4 * layer * kLanes + lane_idx + 1);
                if (!ok) break;
                // Neighbouring groups of threads need the high and the low parts of the same values: each reads half of the words.
                constexpr int kHalf = kDimRegisters / 2;
                u64 got[kHalf];
                const u32 is_low = group & 1;
                const u64* query_words = words + ((kv_head * kGroup + head) * kHeadDim) / 2 + part * kDimRegisters + is_low * kHalf;
                while (!__all_sync(kFullWarp, read(query_words, true, tag, got)) && ok) ok = !role.shared->note.stopped;
                if (!ok) break;
                if (warp == 0) stamp(role, kQuerySeen, step, 4 * layer * kLanes + lane_idx);
#pragma unroll
                for (int i = 0; i < kHalf; ++i) {
                    const float a = first_of(got[i]), b = second_of(got[i]);
                    const u32 high = KvFormat::pack(a, b), low = pack_rest<KvFormat>(a, b, high);
                    const u32 theirs = __shfl_xor_sync(kFullWarp, is_low ? high : low, 4);
                    query[i] = is_low ? theirs : high;
                    query[kHalf + i] = is_low ? low : theirs;
                }
            }
            if (!old && !fresh) break;
            // Scores: rows `group` and `group + 8` of the batch, for query head `part`.
            float scores[4] = {};
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i)
                KvFormat::mma(scores, keys[0][2 * i], keys[1][2 * i], keys[0][2 * i + 1], keys[1][2 * i + 1], query[2 * i],
                              query[2 * i + 1]);
            if (warp == 0) stamp(role, kScored, step, 4 * layer * kLanes + lane_idx);
            bool seen[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (fresh) {
                    seen[i] = i == 0 && group == 0;
                } else {
                    const u32 slot = batch * 16 + group + 8 * i;
                    const u32 back = newest >= slot ? newest - slot : newest + capacity - slot;  // rows before the last old one
                    seen[i] = back < num_old && (num_old - 1 - back) * kSplits + split + window > position;
                }
            }
            const float score0 = seen[0] ? (scores[0] + scores[1]) * kScoreScale : -INFINITY;
            const float score1 = seen[1] ? (scores[2] + scores[3]) * kScoreScale : -INFINITY;
            float next_peak = fmaxf(peak, fmaxf(score0, score1));
#pragma unroll
            for (int offset = 4; offset < 32; offset <<= 1) next_peak = fmaxf(next_peak, __shfl_xor_sync(kFullWarp, next_peak, offset));
            const float base = next_peak == -INFINITY ? 0.0f : next_peak;
            const float shrink = exp2_approx(peak - base);
            const float weight0 = exp2_approx(score0 - base), weight1 = exp2_approx(score1 - base);
            sum = sum * shrink + (weight0 + weight1);
            peak = next_peak;
            const int from = part * 8 + head;  // the thread that holds this head's weight of position 2 * part
            const float a = __shfl_sync(kFullWarp, weight0, from), b = __shfl_sync(kFullWarp, weight0, from + 4);
            const float c = __shfl_sync(kFullWarp, weight1, from), d = __shfl_sync(kFullWarp, weight1, from + 4);
            u32 first = KvFormat::pack(a, b), second = KvFormat::pack(c, d);
            if (group & 1) first = pack_rest<KvFormat>(a, b, first), second = pack_rest<KvFormat>(c, d, second);
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) outputs[i][k] *= shrink;
                KvFormat::mma(outputs[i], values[0][2 * i], values[0][2 * i + 1], values[1][2 * i], values[1][2 * i + 1], first, second);
            }
        }
        if (warp == 0) stamp(role, kMixed, step, 4 * layer * kLanes + lane_idx);
        ok = merge(ok, layer, kv_head, split, lane_idx, tag, outputs, peak, sum);
        if (warp == 0) stamp(role, kAttended, step, 4 * layer * kLanes + lane_idx);
        return ok;
    }

    // The four warps' parts of an item, normalised and published with the logarithm (base 2) of their sum.
    __device__ __forceinline__ bool merge(bool ok, u32 layer, u32 kv_head, u32 split, u32 lane_idx, u32 tag,
                                          const float (&outputs)[kHeadDim / 16][4], float peak, float sum) {
        Shared& shared = *role.shared;
        const u32 lane = opaque(this->lane), warp = opaque(this->warp), group = lane >> 2, part = lane & 3;
        const u32 half = num_items++ & 1;
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        if (part < kGroup) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i)
                *reinterpret_cast<float2*>(&shared.attended[half][warp][part][group * kDimRegisters + 2 * i]) =
                    make_float2(outputs[i][0] + outputs[i][1], outputs[i][2] + outputs[i][3]);
            if (group == 0) {
                shared.attended_max[half][warp][part] = peak;
                shared.attended_sum[half][warp][part] = sum;
            }
        }
        if (!group_all(kAttendBarrier, kAttendThreads, ok)) return false;
        if (warp == 0) stamp(role, kMerged, step, 4 * layer * kLanes + lane_idx);
        constexpr int kHeadUnits = kHeadDim / 4;
        u64* base = reinterpret_cast<u64*>(params.words_ptr);
#pragma unroll 1
        for (u32 unit = warp * 32 + lane; unit < kGroup * kHeadUnits; unit += kAttendThreads) {
            const u32 head = unit / kHeadUnits, dim = (unit % kHeadUnits) * 4;
            float top = shared.attended_max[half][0][head];
#pragma unroll
            for (int i = 1; i < 4; ++i) top = fmaxf(top, shared.attended_max[half][i][head]);
            const float safe_top = top == -INFINITY ? 0.0f : top;
            float total = 0;
            float4 mixed = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float weight = exp2_approx(shared.attended_max[half][i][head] - safe_top);
                const float4 v = *reinterpret_cast<const float4*>(&shared.attended[half][i][head][dim]);
                total += weight * shared.attended_sum[half][i][head];
                mixed = make_float4(mixed.x + weight * v.x, mixed.y + weight * v.y, mixed.z + weight * v.z, mixed.w + weight * v.w);
            }
            const float inverse = top == -INFINITY ? 0.0f : __fdividef(1.0f, total);
            const float log_sum = top == -INFINITY ? -INFINITY : top + log2_approx(total);
            const u64 first = make_pair_word(mixed.x * inverse, mixed.y * inverse, tag);
            const u64 second = make_pair_word(mixed.z * inverse, mixed.w * inverse, tag);
            const u32 row = (kv_head * kGroup + head) * kSplits + split;
#pragma unroll
            for (int replica = 0; replica < kReplicas; ++replica) {
                store_relaxed_x2(base + kAttendedOffset + (lane_idx * kReplicas + replica) * kAttendedStride +
                                     (row * kHeadUnits + dim / 4) * 2, first, second);
                if (dim == 0)
                    store_relaxed(base + kLogSumOffset + (lane_idx * kReplicas + replica) * kLogSumStride + row,
                                  make_value_word(__float_as_uint(log_sum), tag));
            }
        }
        return true;
    }
};

__device__ __forceinline__ void attend(const KogDecodeParams& params, const Role& role, u32 warp) {
    Attender attender{params, role, warp, laneid()};
    u32 token;
    for (u32 step = 0; begin_token(role, step, token); ++step) {
        const u32 position = role.first_position + step;
        attender.step = step;
#pragma unroll 1
        for (u32 layer = 0; layer < kLayers; ++layer)
#pragma unroll 1
            for (u32 lane = 0; lane < kLanes; ++lane) {
                const u32 first_cta = ((layer * kLanes + lane) * kItems) % kNumCtas;
                const u32 first = role.cta >= first_cta ? role.cta - first_cta : role.cta + kNumCtas - first_cta;
#pragma unroll 1
                for (u32 item = first; item < kItems; item += kNumCtas)
                    if (!attender.item(layer, lane, item, position, layer_tag(role.first_epoch + step, layer))) return;
            }
        attender.first_vector += kTokenVectors - (has_head(role, step) ? 0 : 1);
    }
}

}  // namespace kog
