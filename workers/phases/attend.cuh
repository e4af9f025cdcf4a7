// Attention of one position. An item is a KV head and a split: positions p with p % kSplits == split. Items are spread over the
// thread blocks by a map that depends on layer and lane only, and the batches of an item over the warps by their number. So the
// thread that appends its share of a row of K and V is the one that reads it later, and the append needs no fence. A split keeps its
// rows in batches of 16 (K by rows, V by pairs of positions, as the matrix unit wants them); windowed layers keep a ring of batches.
// The new position does not come back from memory: its warp reads the words and passes them on in shared memory (`fresh`), and the
// threads that hold its row of the batch put it into their registers.
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
            load_global(from + i * 4, v);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kDimRegisters; i += 2) {
            uint2 v;
            load_global(from + i * 4, v);
            to[i] = v.x, to[i + 1] = v.y;
        }
    }
}

// A thread's shares of two rows that lie kStride bytes apart.
template <u32 kStride>
__device__ __forceinline__ void load_rows(const unsigned char* from, u32 (&to)[2][kDimRegisters]) {
    load_dims(from, to[0]);
    load_dims(from + kStride, to[1]);
}
__device__ __forceinline__ void store_dims(unsigned char* to, const u32 (&from)[kDimRegisters]) {
    if constexpr (kDimRegisters % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kDimRegisters; i += 4)
            *reinterpret_cast<uint4*>(to + i * 4) = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < kDimRegisters; i += 2) *reinterpret_cast<uint2*>(to + i * 4) = make_uint2(from[i], from[i + 1]);
    }
}

struct Attender {
    const KogDecodeParams& params;
    const Role& role;
    u32 warp, lane;
    u32 num_items = 0, first_vector = 0, step = 0, product = 0;  // products of earlier tokens; the token; the number of its QKV product

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

    // A pair of 16-bit values with another lower or upper one.
    static __device__ __forceinline__ u32 with_half(u32 pair, u32 value, bool upper) {
        return upper ? __byte_perm(pair, value, 0x5410) : __byte_perm(pair, value, 0x3254);
    }

    __device__ __forceinline__ unsigned char* batch_at(u32 number) const {
        return reinterpret_cast<unsigned char*>(params.kv_ptr) + static_cast<u64>(number) * kBatchBytes;
    }
    __device__ __forceinline__ bool item(u32 layer, u32 lane_idx, u32 item_idx, u32 position, u32 tag) {
        const u32 lane = opaque(this->lane), warp = opaque(this->warp), group = lane >> 2, part = lane & 3;
        const u32 kv_head = item_idx / kSplits, split = item_idx % kSplits;
        const bool windowed = in_mask(kWindowMask, layer);
        const u32 batches = windowed ? kWindowBatches : kFullBatches, capacity = batches * 16;
        const u32 windowed_before = __popcll(kWindowMask & ((1ull << layer) - 1));
        const u32 first_batch = (windowed_before * kWindowBatches + (layer - windowed_before) * kFullBatches) * (kLanes * kItems) +
                                (lane_idx * kItems + item_idx) * batches;  // of the item, in the whole cache

        // Positions of this split up to the current one, of which `num_seen` are in the window; `last` is the slot of the last one, which is
        // the current position's if it is this split's.
        const bool owner = position % kSplits == split;
        const u32 num_rows = (position + kSplits - split) / kSplits;
        u32 num_batches = (num_rows + 15) / 16;
        if (num_batches > batches) num_batches = batches;
        const u32 last = (num_rows + capacity - 1) % capacity;
        const u32 num_past = windowed && position >= kWindow + split ? (position - kWindow - split) / kSplits + 1 : 0;
        const u32 num_seen = num_rows - num_past;

        const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kQkvOffset + lane_idx * kQkvStride;
        const u32 head = (group >> 1) < kGroup ? group >> 1 : kGroup - 1;
        u32 query[kDimRegisters];
        float outputs[kHeadDim / 16][4] = {};
        float peak = -INFINITY, sum = 0;
        // K and V of two batches are on their way, or here before the query is: the one that comes is worked on, then its registers are filled
        // with the next but one.
        struct Batch {
            u32 keys[2][kDimRegisters], values[2][kDimRegisters];
        };
        Batch even, odd;
        auto keys_at = [&](u32 batch) {
            const u32 lane = opaque(this->lane);
            return batch_at(first_batch + batch) + ((lane >> 2) * kHeadDim * 2 + (lane & 3) * kDimRegisters * 4);
        };
        auto values_at = [&](u32 batch) {
            const u32 lane = opaque(this->lane);
            return batch_at(first_batch + batch) + (16 * kHeadDim * 2 + (lane & 3) * kHeadDim * 4 + (lane >> 2) * kDimRegisters * 4);
        };
        auto load_keys = [&](Batch& to, u32 batch) { if (batch < num_batches) load_rows<8 * kHeadDim * 2>(keys_at(batch), to.keys); };
        auto load_values = [&](Batch& to, u32 batch) { if (batch < num_batches) load_rows<4 * kHeadDim * 4>(values_at(batch), to.values); };
        load_keys(even, warp), load_values(even, warp), load_keys(odd, warp + kAttendWarps), load_values(odd, warp + kAttendWarps);

        // Neighbouring groups of threads need the high and the low parts of the same values: each reads half of the words. The new position's
        // K and V are read by all threads of the warp that has its batch, and spread through shared memory.
        const u32 fresh_batch = owner ? last >> 4 : ~0u;
        const bool has_fresh = owner && fresh_batch % kAttendWarps == warp;
        constexpr int kHalf = kDimRegisters / 2, kNewWords = kHeadDim, kNew = (kNewWords + 31) / 32;
        const u32 staged = role.base + KOG_OFFSET(fresh);
        {
            if (!counter_wait<600>(role.stopped(), role.base + KOG_OFFSET(num_finalized), first_vector + product + 1)) return false;
            const u32 is_low = group & 1;
            const u64* query_words = words + ((kv_head * kGroup + head) * kHeadDim) / 2 + part * kDimRegisters + is_low * kHalf;
            const u64* new_words = words + (kQueryRows + kv_head * kHeadDim) / 2 + lane;
            u64 got[kHalf], got_new[kNew];
            while (true) {
                bool ready = read(query_words, true, tag, got);
                if (has_fresh) {
#pragma unroll
                    for (int i = 0; i < kNew; ++i)
                        if (i * 32 + lane < kNewWords)
                            got_new[i] = load_relaxed(new_words + i * 32 + (i * 32 + lane < kNewWords / 2 ? 0 : (kKvRows - kHeadDim) / 2));
#pragma unroll
                    for (int i = 0; i < kNew; ++i) ready = ready && (i * 32 + lane >= kNewWords || has_tag(got_new[i], tag));
                }
                if (__all_sync(kFullWarp, ready)) break;
                if (must_leave(role.stopped())) return false;
            }
            if (warp == 0) stamp(role, kQuerySeen, step, product);
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                const float a = first_of(got[i]), b = second_of(got[i]);
                const u32 high = KvFormat::pack(a, b), low = pack_rest<KvFormat>(a, b, high);
                const u32 theirs = __shfl_xor_sync(kFullWarp, is_low ? high : low, 4);
                query[i] = is_low ? theirs : high;
                query[kHalf + i] = is_low ? low : theirs;
            }
            if (has_fresh) {
#pragma unroll
                for (int i = 0; i < kNew; ++i)
                    if (i * 32 + lane < kNewWords)
                        store_shared(staged + (i * 32 + lane) * 4, KvFormat::pack(first_of(got_new[i]), second_of(got_new[i])));
                __syncwarp();
            }
        }
        auto add_batch = [&](Batch& now, u32 batch) {
            const u32 lane = opaque(this->lane), group = lane >> 2, part = lane & 3, head = (group >> 1) < kGroup ? group >> 1 : kGroup - 1;
            if (batch == fresh_batch) {
                const u32 row = last & 15, i = row >> 3;
                if (group == (row & 7)) {
#pragma unroll
                    for (int k = 0; k < kDimRegisters; ++k) {
                        const u32 both = load_shared_u32(staged + (part * kDimRegisters + k) * 4);
                        now.keys[0][k] = i == 0 ? both : now.keys[0][k], now.keys[1][k] = i == 0 ? now.keys[1][k] : both;
                    }
                    unsigned char* at = keys_at(batch);
                    if (i == 0) store_dims(at, now.keys[0]);
                    else store_dims(at + 8 * kHeadDim * 2, now.keys[1]);
                }
                if (part == (row >> 1 & 3)) {
#pragma unroll
                    for (int k = 0; k < kDimRegisters; ++k) {
                        const u32 both = load_shared_u32(staged + (kNewWords / 2 + group * kHalf + k / 2) * 4);
                        const u32 one = k & 1 ? both >> 16 : both;
                        const u32 mixed = with_half(i == 0 ? now.values[0][k] : now.values[1][k], one, row & 1);
                        now.values[0][k] = i == 0 ? mixed : now.values[0][k], now.values[1][k] = i == 0 ? now.values[1][k] : mixed;
                    }
                    unsigned char* at = values_at(batch);
                    if (i == 0) store_dims(at, now.values[0]);
                    else store_dims(at + 4 * kHeadDim * 4, now.values[1]);
                }
                __syncwarp();
            }
            // Scores: rows `group` and `group + 8` of the batch, for query head `part`.
            float scores[4] = {};
#pragma unroll
            for (int i = 0; i < kHeadDim / 16; ++i)
                KvFormat::mma(scores, now.keys[0][2 * i], now.keys[1][2 * i], now.keys[0][2 * i + 1], now.keys[1][2 * i + 1], query[2 * i],
                              query[2 * i + 1]);
            if (warp == 0) stamp(role, kScored, step, product);
            load_keys(now, batch + 2 * kAttendWarps);
            bool seen[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 slot = batch * 16 + group + 8 * i;
                seen[i] = (last >= slot ? last - slot : last + capacity - slot) < num_seen;  // rows before the last one
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
                KvFormat::mma(outputs[i], now.values[0][2 * i], now.values[0][2 * i + 1], now.values[1][2 * i], now.values[1][2 * i + 1], first, second);
            }
            load_values(now, batch + 2 * kAttendWarps);
        };
#pragma unroll 1
        for (u32 batch = warp; batch < num_batches; batch += 2 * kAttendWarps) {
            add_batch(even, batch);
            if (batch + kAttendWarps < num_batches) add_batch(odd, batch + kAttendWarps);
        }
        if (warp == 0) stamp(role, kMixed, step, product);
        const bool ok = merge(layer, kv_head, split, lane_idx, tag, outputs, peak, sum);
        if (warp == 0) stamp(role, kAttended, step, product);
        return ok;
    }

    // The four warps' parts of an item, normalised and published with the logarithm (base 2) of their sum.
    __device__ __forceinline__ bool merge(u32 layer, u32 kv_head, u32 split, u32 lane_idx, u32 tag,
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
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(merge_full[half]));
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(merge_full[half]), (num_items - 1) >> 1 & 1)) return false;
        if (warp == 0) stamp(role, kMerged, step, product);
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
            const float inverse = top == -INFINITY ? 0.0f : reciprocal_approx(total);
            const float log_sum = top == -INFINITY ? -INFINITY : top + log2_approx(total);
            const u64 first = make_pair_word(mixed.x * inverse, mixed.y * inverse, tag);
            const u64 second = make_pair_word(mixed.z * inverse, mixed.w * inverse, tag);
            const u32 row = (kv_head * kGroup + head) * kSplits + split;
            // Every matrix warp that takes columns of this head finds the log-sum among its own words.
            constexpr u32 kWarpColumns = OutOp::kPer * 32;
            const u32 column = (kv_head * kGroup + head) * kHeadDim + dim;
#pragma unroll
            for (int replica = 0; replica < kReplicas; ++replica) {
                store_relaxed_x2(base + kAttendedOffset + (lane_idx * kReplicas + replica) * kAttendedStride +
                                     (row * kHeadUnits + dim / 4) * 2, first, second);
                if (dim == 0 || column % kWarpColumns == 0)
                    store_relaxed(base + kLogSumOffset + (lane_idx * kReplicas + replica) * kLogSumStride +
                                      column / kWarpColumns * kLogSumWords + row, make_value_word(__float_as_uint(log_sum), tag));
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
        for (u32 i = kHeadOnly ? kLayers * kLanes : 0; i < kLayers * kLanes; ++i) {
            attender.product = kQkvProducts[i];
            const Place at(attender.product);
            const u32 first_cta = ((at.layer() * kLanes + at.lane()) * kItems) % kNumCtas;
            const u32 first = role.cta >= first_cta ? role.cta - first_cta : role.cta + kNumCtas - first_cta;
#pragma unroll 1
            for (u32 item = first; item < kItems; item += kNumCtas)
                if (!attender.item(at.layer(), at.lane(), item, position, layer_tag(role.first_epoch + step, at.layer()))) return;
        }
        attender.first_vector += kTokenVectors - (has_head(role, step) ? 0 : kHeadProducts);
    }
}

}  // namespace kog
