// The KV cache as attention reads it: where the rows of a split lie, and the share of a batch that each thread has in registers.
#pragma once
#include "kv_codes.cuh"
#include "layout.cuh"

namespace kog {

// Of a batch: 16 rows of K, of INT4 the upper two bits of their codes, 8 pairs of rows of V, and of codes the scales of each position's two rows.
constexpr u32 kRowBytes = kHeadDim * kKvBits / 8, kTopBytes = kKvRotated ? kHeadDim / 4 : 0, kBatchBytes = 16 * (2 * kRowBytes + kTopBytes + kKvScaleBytes);
constexpr int kDimRegisters = kHeadDim / 8;  // 16-bit pairs: a thread's share of a row of K, or of a pair of positions of V
constexpr int kShareRegisters = kDimRegisters / kCodePairs, kTopRegisters = kKvRotated ? kDimRegisters / 8 : 1;  // that it takes in the cache
static_assert(kHeadDim % 16 == 0 && kShareRegisters % 2 == 0, "the matrix unit takes 16 dimensions at a time, a load two registers");
// The registers of a share come in chunks of one load. Chunks of neighbouring threads lie side by side, so that a load of a warp takes whole
// sectors: four threads share a row of K, eight a pair of positions of V. The order of dimensions is the same for K and the query.
constexpr int kChunkRegisters = kShareRegisters % 4 == 0 ? 4 : 2, kChunkBytes = kChunkRegisters * 4;
constexpr int kChunk = kChunkRegisters * kCodePairs, kChunks = kShareRegisters / kChunkRegisters;  // pairs of a chunk
constexpr u32 kKeyChunks = 4 * kChunkBytes, kValueChunks = 8 * kChunkBytes;  // from a thread's chunk to its next one, in bytes
// Pair of dimensions in register `k` of a thread's share of K; dimension in that of V.
__device__ __forceinline__ constexpr u32 key_pair(u32 part, u32 k) { return k / kChunk * (4 * kChunk) + part * kChunk + k % kChunk; }
__device__ __forceinline__ constexpr u32 value_dim(u32 group, u32 k) { return k / kChunk * (8 * kChunk) + group * kChunk + k % kChunk; }

template <u32 kStride>
__device__ __forceinline__ void load_share(const unsigned char* from, u32 (&to)[kShareRegisters]) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        if constexpr (kChunkRegisters == 4) {
            uint4 v;
            load_global(from + i * kStride, v);
            to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
        } else {
            uint2 v;
            load_global(from + i * kStride, v);
            to[2 * i] = v.x, to[2 * i + 1] = v.y;
        }
    }
}
template <u32 kStride>
__device__ __forceinline__ void store_share(unsigned char* to, const u32 (&from)[kShareRegisters]) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        if constexpr (kChunkRegisters == 4)
            *reinterpret_cast<uint4*>(to + i * kStride) = make_uint4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
        else *reinterpret_cast<uint2*>(to + i * kStride) = make_uint2(from[2 * i], from[2 * i + 1]);
    }
}

// Pair `k` of the values of some registers, without their scale. Codes of V of INT4 stay integers, as binary16's subnormal numbers: times
// 2^-24, and those of odd pairs times 2^-20, which saves shifts. A code c stands for 2 c - most: what is too much comes off sums.
constexpr float kOddPairs = kKvRotated ? 16 : 1, kUnit = kKvRotated ? 0x1p25f : 1, kMiddle = 0x1p-25f;  // of INT4: 2 / 2^-24, half a code
constexpr u32 kUnitPair = 0x3c003c00u;  // ones, in binary16
template <int kRegisters>
__device__ __forceinline__ u32 expand_value(const u32 (&codes)[kRegisters], int k) {
    if constexpr (kKvBits == 16) return codes[k];
    else if constexpr (kKvBits == 8) return expand_e4m3(codes[k / 2], k % 2);
    else return (k % 4 < 2 ? codes[k / 4] : codes[k / 4] >> 8) & (k % 2 ? 0x00f000f0u : 0x000f000fu);
}
// Half `k` % 2 of register `k` / 2 of codes of K of INT4, a byte each: of dimensions 0 and 4 of its eight, or 2 and 6, and of those behind them.
template <int kRegisters, int kTops>
__device__ __forceinline__ u32 key_codes(const u32 (&codes)[kRegisters], const u32 (&tops)[kTops], int k) {
    const int left = 4 - 2 * (k % 4);
    const u32 top = (left < 0 ? tops[k / 4] >> -left : tops[k / 4] << left) & 0x30303030u;
    return ((k % 2 ? codes[k / 2] >> 4 : codes[k / 2]) & 0x0f0f0f0fu) | top;
}

// The first of the splits of a layer, a lane and a partition that this thread block has; the next one is kNumCtas further on.
__device__ __forceinline__ u32 first_item(const Role& role, u32 layer, u32 lane_idx, u32 partition) {
    const u32 first_cta = ((layer * kLanes + lane_idx) * kItems + partition * (kNumCtas / kPartitions)) % kNumCtas;
    return role.cta >= first_cta ? role.cta - first_cta : role.cta + kNumCtas - first_cta;
}

// Batches of a split that are on their way to a warp's registers, further ones to L2, and those that go through softmax together: INT4's are so
// small that a warp with one set would wait for the steps of a single one, and two of them fit. Of heads of more than 128 values registers have room
// for the keys of one, whose values come in their place (kValuesLate).
constexpr u32 kMixedBatches = kKvRotated && kWarpSets == 1 ? 2 : 1, kBatches = kKvRotated ? 2 : kHeadDim > 128 ? 1 : kKvCoded ? 3 : 2;
constexpr bool kValuesLate = kHeadDim > 128 && !kKvCoded;
constexpr u32 kBatchesAhead = kKvRotated ? 4 : kKvCoded ? 2 : 1;
static_assert(kBatches % kMixedBatches == 0);
// Of several tokens two have warps of their own, which mix the batches of all warps of a single token, share by share: a batch is read once for both.
// Each split has at most one of their rows: all tokens' warps store it, and those read it that see it. Tokens of several requests have warps and rows
// of their own.
static_assert(kTokens == 1 || (kPartitions == 1 && kMixedBatches == 1 && kTokens <= kSplits && kTokenWarps <= kTeamWarps), "passes of several tokens");
static_assert(kTokens == 1 || !kHasWindows || kWindowBatches * 16 * kSplits >= kWindow + kTokens - 1, "a token's row takes the place of none that another one sees");

struct CacheReader {
    const KogDecodeParams& params;
    const Role& role;
    u32 warp, lane;  // the warp is also the number of its team times kTeamWarps, and of its share of batches
    u32 num_items = 0, first_vector = 0, turn = 0, product = 0;  // products of earlier passes; the pass in this launch; the number of the QKV product
#ifdef KOG_COMPANY
    // Of the token that the warp has in this pass: its request's cache, its position, and whether its row goes there. A token that stands in for
    // another one appends nothing: rows are appended by the threads that read them as long as their request has this seat.
    u64 kv_ptr = 0;
    u32 position = 0;
    bool appends = true;

    __device__ __forceinline__ void sit(const Pass& pass) {
        const u32 token = token_of(warp), seat = pass.seat_of(token);
        kv_ptr = role.company.kv_ptr[seat], position = pass.position_of(token), appends = seat == token;
    }
#endif
    __device__ __forceinline__ u64 cache() const {
#ifdef KOG_COMPANY
        return kv_ptr;
#else
        return params.kv_ptr;
#endif
    }
    __device__ __forceinline__ bool is_appended() const {
#ifdef KOG_COMPANY
        return appends;
#else
        return true;
#endif
    }

    // The tag of a layer's words, computed anew each time: registers are full.
    __device__ __forceinline__ u32 tag_in(u32 layer) const {
        return layer_tag(load_shared_u32(role.base + KOG_OFFSET(passes[turn & 1].number)), layer);
    }

    // Register `k` of a share of V, of even and odd positions, with those of one position from a pair of dimensions and its neighbours.
    static __device__ __forceinline__ u32 with_values(u32 both, u32 k, u32 own, bool is_odd) {
        if constexpr (kKvRotated) return __byte_perm(both, own, is_odd ? 0x5410 : 0x3254);
        else if constexpr (kKvCoded) return __byte_perm(both, own, is_odd ? 0x5240 : 0x3514);
        else return __byte_perm(both, k & 1 ? own >> 16 : own, is_odd ? 0x5410 : 0x3254);
    }

    enum ShareKind : u32 { kKeys, kTops, kValues, kScales, kShareKinds };
    // The rows of K and V of a split.
    struct Rows {
        u32 first_batch, num_batches;  // in the whole cache; that have rows
        u32 capacity, last, num_seen;  // slots; that of the last row, the current position's if it is this split's; rows in the window
        u32 fresh_batch;               // that gets the current position's row, or none
        u32 turn_bytes;                // from a batch to the one of its number in the ring's turn before; 0 in the first turn
        unsigned char* shares[kShareKinds];  // of INT4: where this thread's shares of the first batch lie, by what they are of
    };
    // Which of them a token sees: up to a slot, and how many.
    struct Sight {
        u32 last, num_seen;
    };
    __device__ __forceinline__ Rows rows_of(u32 layer, u32 lane_idx, u32 item_idx, u32 partition, u32 position) const {
        const u32 split = item_idx % kSplits;
        const bool windowed = window_layers().has(layer);
        const u32 batches = windowed ? kWindowBatches : kFullBatches, capacity = batches * 16;
        const u32 windowed_before = window_layers().num_before(layer);
        const u32 first_batch = (windowed_before * kKeptWindowBatches + (attention_layer(layer) - windowed_before) * kFullBatches) * (kLanes / kSharingLanes * kItems) +
                                (lane_idx / kSharingLanes * kItems + item_idx) * (kWholeWindows ? kFullBatches : batches);
        const u32 num_rows = (position + kSplits - split) / kSplits, last = (num_rows + capacity - 1) % capacity;
        const u32 num_past = windowed && position >= kWindow + split ? (position - kWindow - split) / kSplits + 1 : 0;
        Rows rows{first_batch, min((num_rows + 15) / 16, batches), capacity, last, num_rows - num_past,
                  position % kSplits == split ? last >> 4 : kNoBatch, 0};
        if constexpr (kWholeWindows) {  // the turns of a ring lie one behind the other
            const u32 turn = num_rows > capacity ? (num_rows - 1) / capacity : 0;
            rows.first_batch += turn * batches, rows.turn_bytes = turn > 0 ? batches * kBatchBytes : 0;
        }
        if (kPartitions > 1 && !windowed) {  // batches and slots are counted from the partition's first ones
            const u32 skipped = partition * kPartitionBatches;
            rows.first_batch += skipped, rows.last -= skipped * 16;
            rows.num_batches = rows.num_batches > skipped ? min(rows.num_batches - skipped, static_cast<u32>(kPartitionBatches)) : 0;
            if (rows.fresh_batch != kNoBatch) rows.fresh_batch = rows.fresh_batch / kPartitionBatches == partition ? rows.fresh_batch - skipped : kNoBatch;
        }
        if constexpr (kKvRotated) {
#pragma unroll
            for (u32 kind = 0; kind < kShareKinds; ++kind) rows.shares[kind] = opaque(batch_at(rows, 0) + share_offset(kind, lane));
        }
        return rows;
    }
    static constexpr u32 kNoBatch = ~0u;
    __device__ __forceinline__ u32 team_of(u32 warp) const { return kTeams == 1 ? 0 : warp / kTeamWarps; }
    // The first of its tokens.
    __device__ __forceinline__ u32 token_of(u32 warp) const { return kTokens == 1 ? 0 : warp / kTokenWarps * kWarpTokens; }
    // Of its team's warps: which batches are its.
    __device__ __forceinline__ u32 share_of(u32 warp) const { return kTeams == 1 ? warp : warp % kTeamWarps; }
    // Where its team's new row lies, with shared memory beginning at `base`.
    __device__ __forceinline__ u32 staged_row(u32 base) const {
        return base + KOG_OFFSET(fresh) + (kTokens > 1 ? token_of(opaque(warp)) * (kHeadDim * 4) : kTeams == 1 ? 0 : team_of(opaque(warp)) * (kHeadDim * 4));
    }

    // This thread's share of a batch: of the rows `group` and `group + 8` of K, and of the pairs of positions `part` and `part + 4` of V. Where
    // they are coded, threads 0 to 15 also have the scales of K and V of one position each.
    struct Batch {
        u32 keys[2][kShareRegisters], tops[2][kTopRegisters], values[2][kShareRegisters], scales = 0;
    };
    static constexpr u32 kKeysStride = 8 * kRowBytes, kValuesStride = 4 * 2 * kRowBytes;
    // Where the first of two shares lies in a batch.
    static __device__ __forceinline__ u32 share_offset(u32 kind, u32 lane) {
        if (kind == kKeys) return (lane >> 2) * kRowBytes + (lane & 3) * kChunkBytes;
        if (kind == kTops) return 16 * kRowBytes + (lane >> 2) * kTopBytes + (lane & 3) * (kTopRegisters * 4);
        if (kind == kValues) return 16 * (kRowBytes + kTopBytes) + (lane & 3) * (2 * kRowBytes) + (lane >> 2) * kChunkBytes;
        return 16 * (2 * kRowBytes + kTopBytes) + lane * kKvScaleBytes;
    }
    // But for INT4 computed anew each time: registers are full.
    __device__ __forceinline__ unsigned char* share_at(const Rows& rows, u32 batch, ShareKind kind) const {
        if constexpr (kKvRotated) return rows.shares[kind] + static_cast<u64>(batch) * kBatchBytes;
        else return batch_at(rows, batch) + share_offset(kind, opaque(lane));
    }
    __device__ __forceinline__ unsigned char* keys_at(const Rows& rows, u32 batch) const { return share_at(rows, batch, kKeys); }
    __device__ __forceinline__ unsigned char* tops_at(const Rows& rows, u32 batch) const { return share_at(rows, batch, kTops); }
    __device__ __forceinline__ unsigned char* values_at(const Rows& rows, u32 batch) const { return share_at(rows, batch, kValues); }
    __device__ __forceinline__ unsigned char* scales_at(const Rows& rows, u32 batch) const { return share_at(rows, batch, kScales); }
    // How far back row `row` of a batch lies: rows behind the last one are of the turn before. Called only where all turns are kept, of the
    // batches that a warp loads first (kTurns), and of further ones where windows have so many: it would hold up those of other layers.
    static __device__ __forceinline__ u32 turn_back(const Rows& rows, u32 batch, u32 row) {
        return batch * 16 + row > rows.last ? rows.turn_bytes : 0;
    }
    __device__ __forceinline__ unsigned char* batch_at(const Rows& rows, u32 batch) const {
        return reinterpret_cast<unsigned char*>(cache()) + static_cast<u64>(rows.first_batch + batch) * kBatchBytes;
    }
    static constexpr bool kTurnsFurtherOn = kWholeWindows && (kTokens > 1 || kWindowBatches > static_cast<int>(kBatches) * kTeamWarps);
    // `kIsThere`: there is such a batch.
    template <bool kTurns = kTurnsFurtherOn, bool kIsThere = kKvCoded>
    __device__ __forceinline__ void load_keys(const Rows& rows, u32 batch, Batch& to) const {
        if (!kIsThere && batch >= rows.num_batches) return;
        u32 back[2] = {};
        if constexpr (kTurns) {
            const u32 row = opaque(lane) >> 2;
            back[0] = turn_back(rows, batch, row), back[1] = turn_back(rows, batch, row + 8);
        }
        const unsigned char *first = keys_at(rows, batch), *second = first + kKeysStride;
        if constexpr (kTurns) first -= back[0], second -= back[1];
        load_share<kKeyChunks>(first, to.keys[0]), load_share<kKeyChunks>(second, to.keys[1]);
        if constexpr (kKvRotated) {
            const unsigned char *first_tops = tops_at(rows, batch), *second_tops = first_tops + 8 * kTopBytes;
            if constexpr (kTurns) first_tops -= back[0], second_tops -= back[1];
            load_tops(first_tops, to.tops[0]), load_tops(second_tops, to.tops[1]);
        }
    }
    template <int kRegisters>
    static __device__ __forceinline__ void load_tops(const unsigned char* from, u32 (&to)[kRegisters]) {
        if constexpr (kRegisters == 2) {
            uint2 v;
            load_global(from, v);
            to[0] = v.x, to[1] = v.y;
        } else {
            load_global(from, to[0]);
        }
    }
    template <bool kTurns = kTurnsFurtherOn, bool kIsThere = kKvCoded>
    __device__ __forceinline__ void load_values(const Rows& rows, u32 batch, Batch& to) const {
        if (!kIsThere && batch >= rows.num_batches) return;
        if constexpr (kKvCoded)
            if (opaque(this->lane) < 16) {
                const unsigned char* scales = scales_at(rows, batch);
                if constexpr (kTurns) scales -= turn_back(rows, batch, opaque(lane));
                load_global(scales, to.scales);
            }
        const unsigned char *first = values_at(rows, batch), *second = first + kValuesStride;
        if constexpr (kTurns) {  // of a pair both rows: the later one does not count where it is behind the last
            const u32 row = (opaque(lane) & 3) * 2;
            first -= turn_back(rows, batch, row), second -= turn_back(rows, batch, row + 8);
        }
        load_share<kValueChunks>(first, to.values[0]), load_share<kValueChunks>(second, to.values[1]);
    }
    // A batch is brought into the L2 cache where there are many of them: registers have room for few on their way, and memory can do with
    // more. Where there are few it comes no earlier, and weights do not (docs/history/geometry.md).
    static constexpr u32 kMany = 64;
    // `kMixedBatches` from `batch` on.
    __device__ __forceinline__ void read_ahead(const Rows& rows, u32 batch) const {
        if (rows.num_batches < kMany || batch >= rows.num_batches || opaque(this->lane) != 0) return;
        bring_to_l2(rows, batch, kMixedBatches == 1 ? 1 : min(rows.num_batches - batch, kMixedBatches));
    }
    // Of several tokens a warp has the batches of several shares, one share after the other, and brings them into L2 in the order in which it mixes them:
    // at the beginning first ones of all shares, and those of its next steps; then one in each step, kStepsAhead steps before. Warps of the same
    // cache mix the same batches: one for each of the shares brings them.
    static constexpr u32 kStepsAhead = 2, kFirstShares = kTeamWarps / kTokenWarps;
    __device__ __forceinline__ bool brings() const { return (kCompany || warp < kTokenWarps) && opaque(lane) == 0; }
    __device__ __forceinline__ void read_first(const Rows& rows, u32 first) const {
        if (!brings()) return;
#pragma unroll
        for (u32 i = 0; i < kFirstShares; ++i)
            if (first + i * kTokenWarps < rows.num_batches) bring_to_l2(rows, first + i * kTokenWarps, 1);
#pragma unroll 1
        for (u32 batch = first + kTeamWarps; batch < min(rows.num_batches, first + kStepsAhead * kTeamWarps); batch += kTeamWarps) bring_to_l2(rows, batch, 1);
    }
    __device__ __forceinline__ void read_in_turn(const Rows& rows, u32 share, u32 number) const {
        if (!brings()) return;
        u32 batch = number + kStepsAhead * kTeamWarps;
        if (batch >= rows.num_batches) {  // behind this share's last one: in the share that follows
            if (share + kTokenWarps >= kTeamWarps) return;
            batch += kTokenWarps - (rows.num_batches - share + kTeamWarps - 1) / kTeamWarps * kTeamWarps;
        }
        if (batch < rows.num_batches) bring_to_l2(rows, batch, 1);
    }
    // So many batches from `batch` on. Called by one thread.
    __device__ __forceinline__ void bring_to_l2(const Rows& rows, u32 batch, u32 num_batches) const {
        unsigned char* at = batch_at(rows, batch);
        if constexpr (kTurnsFurtherOn) at -= turn_back(rows, batch, 0);
        prefetch_l2(at, num_batches * kBatchBytes);
    }
};

}  // namespace kog
