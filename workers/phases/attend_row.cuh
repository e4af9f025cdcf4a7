// K and V of the new position. They do not come back from memory: the warp that has the batch of their row stages them in shared memory (`fresh`), and
// the threads that hold the row put it into their registers and into the cache. Nothing else in attention changes these two.
#pragma once
#include "attend_cache.cuh"

namespace kog {

constexpr int kNewWords = kHeadDim, kNew = (kNewWords + 31) / 32, kNewKeys = (kNewWords / 2 + 31) / 32;  // words of the row; of a thread, and those of K

// A row times the Hadamard matrix, in `kPairs` pairs of each of the threads whose numbers differ in the lower bits of kThreads - 1.
template <int kPairs, u32 kThreads>
__device__ __forceinline__ void rotate_pairs(float2 (&pairs)[kPairs], u32 thread, float factor) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) mix_pair(pairs[i].x, pairs[i].y);
#pragma unroll
    for (int width = 1; width < kPairs; width *= 2)
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            if ((i & width) == 0) mix_pair(pairs[i].x, pairs[i + width].x), mix_pair(pairs[i].y, pairs[i + width].y);
#pragma unroll
    for (u32 mask = 1; mask < kThreads; mask *= 2)
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            pairs[i] = make_float2(mixed_with(pairs[i].x, mask, thread & mask), mixed_with(pairs[i].y, mask, thread & mask));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = make_float2(pairs[i].x * factor, pairs[i].y * factor);
}
// Bits of `kThreads` neighbouring threads together.
template <u32 kThreads>
__device__ __forceinline__ u32 with_neighbours(u32 bits) {
#pragma unroll
    for (u32 offset = 1; offset < kThreads; offset *= 2) bits |= __shfl_xor_sync(kFullWarp, bits, offset);
    return bits;
}

// Where its team's new row lies, with shared memory beginning at `base`.
__device__ __forceinline__ u32 staged_row(const AttendWarp& self, u32 base) {
    return base + KOG_OFFSET(fresh) +
           (kTokens > 1 ? token_of(opaque(self.warp)) * (kHeadDim * 4) : kTeams == 1 ? 0 : team_of(opaque(self.warp)) * (kHeadDim * 4));
}
// Codes of the new row and both of its scales, in shared memory: those of a pair of values in two bytes.
__device__ __forceinline__ void stage_codes(const AttendWarp& self, const float2 (&pairs)[kNew]) {
    const u32 lane = opaque(self.lane), staged = staged_row(self, self.role.base);
    const auto is_value = [lane](int i) { return i * 32 + lane >= kNewWords / 2; };
    u32 largest_key = 0, largest_value = 0;  // positive floats are in the order of their bits
#pragma unroll
    for (int i = 0; i < kNew; ++i) {
        if (i * 32 + lane >= kNewWords) continue;
        const u32 magnitude = __float_as_uint(fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
        if (is_value(i)) largest_value = max(largest_value, magnitude);
        else largest_key = max(largest_key, magnitude);
    }
    const float key_scale = row_scale(__uint_as_float(__reduce_max_sync(kFullWarp, largest_key)), kKvMostCode);
    const float value_scale = row_scale(__uint_as_float(__reduce_max_sync(kFullWarp, largest_value)), kKvMostCode);
    const float key_inverse = 1.0f / key_scale, value_inverse = 1.0f / value_scale;
#pragma unroll
    for (int i = 0; i < kNew; ++i) {
        const u32 codes = encode_pair(pairs[i].x, pairs[i].y, is_value(i) ? value_inverse : key_inverse);
        if (i * 32 + lane < kNewWords) store_shared(staged + (i * 32 + lane) * 2, static_cast<u16>(codes));
    }
    if (lane == 0) store_shared(staged + kNewWords * 2, Fp16::pack(key_scale, value_scale));
}
// As `stage_codes`, of INT4: words of K with the lower four bits of eight codes, behind those of V halves of words, each of four codes; then
// words of K with the upper two bits of sixteen codes.
__device__ __forceinline__ void stage_rotated(const AttendWarp& self, const float2 (&pairs)[kNew]) {
    const u32 lane = opaque(self.lane), staged = staged_row(self, self.role.base);
    constexpr int kOwn = kKvRotated ? kNew / 2 : 1;  // pairs of K, and of V, of a thread: kOwn * 32 pairs make a row
    float scales[2];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
        float2 row[kOwn];
        u32 largest = 0;  // positive floats are in the order of their bits, and a NaN is above them
#pragma unroll
        for (int i = 0; i < kOwn; ++i) row[i] = pairs[(kind * kOwn + i) % kNew];
        rotate_pairs<kOwn, 32>(row, lane, kKvFactorIn);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) largest = max(largest, max(__float_as_uint(fabsf(row[i].x)), __float_as_uint(fabsf(row[i].y))));
        const float most = most_code(kind == 0);
        scales[kind] = row_scale(__uint_as_float(__reduce_max_sync(kFullWarp, largest)), most);
        const float inverse = 0.5f / scales[kind];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const u32 pair = i * 32 + lane, a = encode_steps(row[i].x, inverse, most), b = encode_steps(row[i].y, inverse, most);
            if (kind == 0) {
                const u32 place = pair % 2 * 2 + pair / 4 % 2 * 4 + pair / 2 % 2 * 8;  // as `key_codes` wants it
                const u32 word = with_neighbours<4>(((a & 15) | (b & 15) << 16) << pair % 4 * 4), top = with_neighbours<8>((a >> 4 | b >> 4 << 16) << place);
                if (pair % 4 == 0) store_shared(staged + pair, word);
                if (pair % 8 == 0) store_shared(staged + kHeadDim + pair / 2, top);
            } else {
                const u32 word = with_neighbours<2>((a | b << 4) << pair % 2 * 8);
                if (pair % 2 == 0) store_shared(staged + kHeadDim / 2 + pair, static_cast<u16>(word));
            }
        }
    }
    if (lane == 0) store_shared(staged + kNewWords * 2, Fp16::pack(scales[0], scales[1]));
}
// Values that are no codes are staged pair by pair; pairs are K's, then V's.
__device__ __forceinline__ void stage_pair(const AttendWarp& self, u32 number, const float2& pair) {
    if constexpr (!kKvCoded) store_shared(staged_row(self, self.role.base) + number * 4, KvFormat::pack(pair.x, pair.y));
}
// Codes of all pairs, of which a thread has every 32nd, and the end of the row for both. Called by a full warp.
__device__ __forceinline__ void end_stage(const AttendWarp& self, const float2 (&pairs)[kNew]) {
    if constexpr (kKvRotated) stage_rotated(self, pairs);
    else if constexpr (kKvCoded) stage_codes(self, pairs);
    __syncwarp();
}
// Register `k` of a share of V, of even and odd positions, with those of one position from a pair of dimensions and its neighbours.
__device__ __forceinline__ u32 with_values(u32 both, u32 k, u32 own, bool is_odd) {
    if constexpr (kKvRotated) return __byte_perm(both, own, is_odd ? 0x5410 : 0x3254);
    else if constexpr (kKvCoded) return __byte_perm(both, own, is_odd ? 0x5240 : 0x3514);
    else return __byte_perm(both, k & 1 ? own >> 16 : own, is_odd ? 0x5410 : 0x3254);
}
// The staged row goes into the registers of the threads that hold its place, and into the cache: by a warp of each team, which stores
// the same, so that every thread reads later what it has stored itself. Keys and values may be there at other times.
template <bool kKeysToo = true, bool kValuesToo = true>
__device__ __forceinline__ void put_fresh(const AttendWarp& self, const CacheRows& rows, CacheBatch& batch) {
    const u32 lane = opaque(self.lane), group = lane >> 2, part = lane & 3, row = rows.last & 15, i = row >> 3;
    const u32 staged = staged_row(self, opaque(self.role.base));
    if (kKeysToo && group == (row & 7)) {
#pragma unroll
        for (int k = 0; k < kShareRegisters; ++k) {
            const u32 new_keys = load_shared_u32(staged + key_pair(part, k * kCodePairs) * (4 / kCodePairs));
            batch.keys[0][k] = i == 0 ? new_keys : batch.keys[0][k], batch.keys[1][k] = i == 0 ? batch.keys[1][k] : new_keys;
        }
        if constexpr (kKvRotated) {
#pragma unroll
            for (int k = 0; k < kTopRegisters; ++k) {
                const u32 tops = load_shared_u32(staged + kHeadDim + (part * kTopRegisters + k) * 4);
                batch.tops[0][k] = i == 0 ? tops : batch.tops[0][k], batch.tops[1][k] = i == 0 ? batch.tops[1][k] : tops;
                reinterpret_cast<u32*>(tops_at(self, rows, rows.fresh_batch) + i * 8 * kTopBytes)[k] = tops;
            }
        }
        unsigned char* at = keys_at(self, rows, rows.fresh_batch);
        if (!self.is_appended()) {}
        else if (i == 0) store_share<kKeyChunks>(at, batch.keys[0]);
        else store_share<kKeyChunks>(at + kKeysStride, batch.keys[1]);
    }
    if (kValuesToo && part == (row >> 1 & 3)) {
#pragma unroll
        for (int k = 0; k < kShareRegisters; ++k) {
            const u32 at = staged + (kNewWords / 2 + value_dim(group, k * kCodePairs) / 2) * (4 / kCodePairs);
            const u32 both = kKvCoded ? load_shared_u16(at) : load_shared_u32(at);
            const u32 mixed = with_values(i == 0 ? batch.values[0][k] : batch.values[1][k], k, both, row & 1);
            batch.values[0][k] = i == 0 ? mixed : batch.values[0][k], batch.values[1][k] = i == 0 ? batch.values[1][k] : mixed;
        }
        unsigned char* at = values_at(self, rows, rows.fresh_batch);
        if (!self.is_appended()) {}
        else if (i == 0) store_share<kValueChunks>(at, batch.values[0]);
        else store_share<kValueChunks>(at + kValuesStride, batch.values[1]);
    }
    if constexpr (kKvCoded)
        if (lane == row) {
            batch.scales = load_shared_u32(staged + kNewWords * 2);
            if (self.is_appended()) *reinterpret_cast<u32*>(scales_at(self, rows, rows.fresh_batch)) = batch.scales;
        }
    __syncwarp();
}

}  // namespace kog
