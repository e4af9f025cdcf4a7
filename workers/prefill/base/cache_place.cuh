// Keys and values of a layer between the monokernel's KV cache and plain arrays (positions, KV heads, head_dim) of binary16.
// Behind a header with the model's sizes.
#pragma once

#include "kv_codes.cuh"

namespace kog {

constexpr u32 kRowBytes = kHeadDim * kKvBits / 8, kTopBytes = kKvRotated ? kHeadDim / 4 : 0;  // of K of INT4: the upper two bits of codes
constexpr u32 kBatchBytes = kBatch * (2 * kRowBytes + kTopBytes + kKvScaleBytes);
constexpr u32 kCachedHeads = kLanes * kKvHeads;  // of plain arrays; in the cache kSharingLanes have one, which the first of them stores
static_assert(kSharingLanes == 1 || kKvHeads == 1, "lanes share whole heads");
#ifdef KOG_WHOLE_WINDOWS
constexpr u32 kKeptWindowBatches = kFullBatches;
#else
constexpr u32 kKeptWindowBatches = kWindowBatches;
#endif

// The KV cache that the prompt goes to, of those that lie one behind the other.
__device__ __forceinline__ u64 cache_of(u64 caches, u64 number_ptr) {
    return caches + static_cast<u64>(*reinterpret_cast<const int*>(number_ptr)) * kCacheBytes;
}

__device__ __forceinline__ bool is_finite_pair(u32 packed) {
    return (packed & 0x7c00u) != 0x7c00u && (packed & 0x7c000000u) != 0x7c000000u;
}

// Where a position stands in the monokernel's cache (see cache_layout.py and coded_rows.py): K and V of its pair, and the scales of both.
struct CachePlace {
    unsigned char *key_row, *key_tops, *value_pair, *scales;

    __device__ __forceinline__ CachePlace(u64 cache, u32 layer, u32 kv_head, u32 position) {
        const u32 batches = kIsWindowed[layer] ? kKeptWindowBatches : kFullBatches;
        const u32 slot = position / kSplits % (batches * kBatch), row = slot % kBatch;
        const u64 batch = kFirstBatches[layer] + (static_cast<u64>(kv_head / kSharingLanes) * kSplits + position % kSplits) * batches + slot / kBatch;
        unsigned char* at = reinterpret_cast<unsigned char*>(cache) + batch * kBatchBytes;
        key_row = at + row * kRowBytes;
        key_tops = at + kBatch * kRowBytes + row * kTopBytes;
        value_pair = at + kBatch * (kRowBytes + kTopBytes) + (row >> 1) * 2 * kRowBytes;
        scales = at + kBatch * (2 * kRowBytes + kTopBytes) + row * kKvScaleBytes;
    }
};

// Positions that a layer keeps, and how far back from the next one they are of use.
__device__ __forceinline__ u32 capacity_of(u32 layer) {
    return (kIsWindowed[layer] ? kKeptWindowBatches : kFullBatches) * kBatch * kSplits;
}
__device__ __forceinline__ u32 reach_of(u32 layer) { return (kIsWindowed[layer] ? kWindowBatches : kFullBatches) * kBatch * kSplits; }

// Of the positions `first` to `last` - 1 of a layer the newest `capacity`. Positions `kSplits` apart lie side by side in the cache, two by two: an
// item is four neighbouring dimensions of both of a head.
struct CachedItems {
    static constexpr u32 kFours = kHeadDim / 4, kOfPair = kSplits * kCachedHeads * kFours, kStep = 2 * kSplits;
    u64 cache;
    u32 layer, first, last, capacity;

    __device__ __forceinline__ u32 begin() const { return first / kStep * kOfPair; }
    __device__ __forceinline__ u32 end() const { return first < last ? (last + kStep - 1) / kStep * kOfPair : begin(); }

    struct Item {
        bool wanted[2];
        u64 plain[2];   // in fours
        u32 four;       // of a head
        CachePlace place;  // of the first of both

        __device__ __forceinline__ uint2* key(u32 odd) const { return reinterpret_cast<uint2*>(place.key_row + odd * kHeadDim * 2) + four; }
        __device__ __forceinline__ uint4* values() const { return reinterpret_cast<uint4*>(place.value_pair) + four; }
        // Of codes, a byte each, of whole heads: all threads of a warp make these calls with items.
        __device__ __forceinline__ u32 key_codes(u32 odd) const {
            if constexpr (!kKvRotated) return *(reinterpret_cast<const u32*>(place.key_row + odd * kRowBytes) + four);
            const unsigned char* row = place.key_row + odd * kRowBytes + four / 2 * 4 + four % 2;
            const unsigned char* tops = place.key_tops + odd * kTopBytes + four / 4 * 4 + four % 2;
            const u32 shift = four % 4 / 2 * 4, evens = tops[0] >> shift, odds = tops[2] >> shift;
            return (row[0] & 15) | (evens & 3) << 4 | ((row[2] & 15) | (odds & 3) << 4) << 8 | (row[0] >> 4 | (evens >> 2 & 3) << 4) << 16 |
                   (row[2] >> 4 | (odds >> 2 & 3) << 4) << 24;
        }
        __device__ __forceinline__ void store_key_codes(u32 odd, u32 codes) const {
            if constexpr (!kKvRotated) {
                if (wanted[odd]) *(reinterpret_cast<u32*>(place.key_row + odd * kRowBytes) + four) = codes;
                return;
            }
            const u32 half = four % 4 / 2;
            u32 evens = ((codes >> 4 & 3) | (codes >> 20 & 3) << 2) << half * 4, odds = ((codes >> 12 & 3) | (codes >> 28 & 3) << 2) << half * 4;
            evens |= __shfl_xor_sync(kFullWarp, evens, 2), odds |= __shfl_xor_sync(kFullWarp, odds, 2);
            if (!wanted[odd]) return;
            unsigned char* row = place.key_row + odd * kRowBytes + four / 2 * 4 + four % 2;
            row[0] = static_cast<unsigned char>((codes & 15) | (codes >> 12 & 0xf0)), row[2] = static_cast<unsigned char>((codes >> 8 & 15) | (codes >> 20 & 0xf0));
            unsigned char* tops = place.key_tops + odd * kTopBytes + four / 4 * 4 + four % 2;
            tops[half * 2] = static_cast<unsigned char>(half ? odds : evens);
        }
        __device__ __forceinline__ u32 value_codes(u32 odd) const {
            if constexpr (kKvRotated) {
                const u32 codes = reinterpret_cast<const u16*>(place.value_pair)[four * 2 + odd];
                return (codes & 15) | (codes & 0xf0) << 4 | (codes & 0xf00) << 8 | (codes & 0xf000) << 12;
            }
            const uint2 pairs = *(reinterpret_cast<const uint2*>(place.value_pair) + four);
            return __byte_perm(pairs.x, pairs.y, odd ? 0x7531 : 0x6420);
        }
        // The other one of a pair stays if it is not wanted.
        __device__ __forceinline__ void store_value_codes(const u32 (&codes)[2]) const {
            if (!kKvRotated && wanted[0] && wanted[1]) {
                *(reinterpret_cast<uint2*>(place.value_pair) + four) = {__byte_perm(codes[0], codes[1], 0x5140), __byte_perm(codes[0], codes[1], 0x7362)};
                return;
            }
            for (u32 odd = 0; odd < 2; ++odd) {
                if (!wanted[odd]) continue;
                const u32 c = codes[odd];
                if constexpr (kKvRotated) {
                    const u32 nibbles = (c & 15) | (c >> 4 & 0xf0) | (c >> 8 & 0xf00) | (c >> 12 & 0xf000);
                    reinterpret_cast<u16*>(place.value_pair)[four * 2 + odd] = static_cast<u16>(nibbles);
                } else {
                    for (u32 k = 0; k < 4; ++k) place.value_pair[four * 8 + 2 * k + odd] = static_cast<unsigned char>(c >> 8 * k);
                }
            }
        }
        __device__ __forceinline__ u32* scales(u32 odd) const { return reinterpret_cast<u32*>(place.scales + odd * kKvScaleBytes); }
    };
    __device__ __forceinline__ Item item(u32 index) const {
        const u32 four = index % kFours, head = index / kFours % kCachedHeads, split = index / (kFours * kCachedHeads) % kSplits;
        const u32 position = index / kOfPair * kStep + split;
        const auto is_wanted = [&](u32 at) { return at >= first && at < last && at + capacity >= last; };  // else what came later is there
        const auto plain = [&](u32 at) { return (static_cast<u64>(at) * kCachedHeads + head) * kFours + four; };
        return {{is_wanted(position), is_wanted(position + kSplits)}, {plain(position), plain(position + kSplits)}, four,
                CachePlace(cache, layer, head, position)};
    }
    __device__ __forceinline__ Item stored_item(u32 index) const {
        Item found = item(index);
        if (index / kFours % kCachedHeads % kSharingLanes) found.wanted[0] = found.wanted[1] = false;
        return found;
    }
};

__device__ __forceinline__ uint2 as_half(const uint2& of_cache) {
    return {Fp16::pack(KvFormat::low(of_cache.x), KvFormat::high(of_cache.x)), Fp16::pack(KvFormat::low(of_cache.y), KvFormat::high(of_cache.y))};
}
__device__ __forceinline__ uint2 as_cached(const uint2& half) {
    return {KvFormat::pack(Fp16::low(half.x), Fp16::high(half.x)), KvFormat::pack(Fp16::low(half.y), Fp16::high(half.y))};
}
__device__ __forceinline__ u32 low_halves(u32 even, u32 odd) { return (even & 0xffffu) | odd << 16; }
__device__ __forceinline__ u32 high_halves(u32 even, u32 odd) { return even >> 16 | (odd & 0xffff0000u); }

__device__ __forceinline__ float4 floats_of(const uint2& half) { return {Fp16::low(half.x), Fp16::high(half.x), Fp16::low(half.y), Fp16::high(half.y)}; }

// `load_items` and `store_items`, see below, of a cache of codes. Whole warps have items; a head's are those of neighbouring threads, which find
// its scales again.
__device__ __forceinline__ void load_codes(const CachedItems& items, u64 keys_ptr, u64 values_ptr, u32 thread, u32 count) {
    uint2 *keys = reinterpret_cast<uint2*>(keys_ptr), *values = reinterpret_cast<uint2*>(values_ptr);
    constexpr u32 kThreads = CachedItems::kFours;
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.item(index);
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const bool wanted = item.wanted[odd];
            const u32 scales = wanted ? *item.scales(odd) : 0;
            const CodedFour key{wanted ? item.key_codes(odd) : 0, Fp16::low(scales)}, value{wanted ? item.value_codes(odd) : 0, Fp16::high(scales)};
            const uint2 kept_key = kept_four<kThreads>(key, true, item.four), kept_value = kept_four<kThreads>(value, false, item.four);
            if (wanted) keys[item.plain[odd]] = kept_key, values[item.plain[odd]] = kept_value;
        }
    }
}
__device__ __forceinline__ void store_codes(const CachedItems& items, u64 keys_ptr, u64 values_ptr, u32 thread, u32 count) {
    const uint2 *keys = reinterpret_cast<const uint2*>(keys_ptr), *values = reinterpret_cast<const uint2*>(values_ptr);
    constexpr u32 kThreads = CachedItems::kFours;
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.stored_item(index);
        u32 codes[2];
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const uint2 none{};
            const CodedFour key = encode_four<kThreads>(floats_of(item.wanted[odd] ? keys[item.plain[odd]] : none), true, item.four);
            const CodedFour value = encode_four<kThreads>(floats_of(item.wanted[odd] ? values[item.plain[odd]] : none), false, item.four);
            codes[odd] = value.codes;
            item.store_key_codes(odd, key.codes);
            if (item.wanted[odd] && item.four == 0) *item.scales(odd) = Fp16::pack(key.scale, value.scale);
        }
        item.store_value_codes(codes);
    }
}

// From the cache to the plain arrays. Called by `count` threads in all, of which this is number `thread`. False: a value is not finite.
__device__ __forceinline__ bool load_items(const CachedItems& items, u64 keys_ptr, u64 values_ptr, u32 thread, u32 count) {
    if constexpr (kKvCoded) {
        load_codes(items, keys_ptr, values_ptr, thread, count);
        return true;
    }
    uint2 *keys = reinterpret_cast<uint2*>(keys_ptr), *values = reinterpret_cast<uint2*>(values_ptr);
    bool finite = true;
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.item(index);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        const uint4 pairs = *item.values();
        const uint2 stored[2] = {{low_halves(pairs.x, pairs.y), low_halves(pairs.z, pairs.w)},
                                 {high_halves(pairs.x, pairs.y), high_halves(pairs.z, pairs.w)}};
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            if (!item.wanted[odd]) continue;
            const uint2 key = as_half(*item.key(odd)), value = as_half(stored[odd]);
            keys[item.plain[odd]] = key, values[item.plain[odd]] = value;
            finite = finite && is_finite_pair(key.x) && is_finite_pair(key.y) && is_finite_pair(value.x) && is_finite_pair(value.y);
        }
    }
    return finite;
}

// From the plain arrays to the cache, likewise.
__device__ __forceinline__ void store_items(const CachedItems& items, u64 keys_ptr, u64 values_ptr, u32 thread, u32 count) {
    if constexpr (kKvCoded) return store_codes(items, keys_ptr, values_ptr, thread, count);
    const uint2 *keys = reinterpret_cast<const uint2*>(keys_ptr), *values = reinterpret_cast<const uint2*>(values_ptr);
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.stored_item(index);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        uint2 value[2] = {};
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            if (!item.wanted[odd]) continue;
            *item.key(odd) = as_cached(keys[item.plain[odd]]);
            value[odd] = as_cached(values[item.plain[odd]]);
        }
        if (item.wanted[0] && item.wanted[1]) {
            *item.values() = make_uint4(low_halves(value[0].x, value[1].x), high_halves(value[0].x, value[1].x),
                                        low_halves(value[0].y, value[1].y), high_halves(value[0].y, value[1].y));
        } else {  // the other one of each pair stays
            const u32 odd = item.wanted[0] ? 0 : 1;
            u16* to = reinterpret_cast<u16*>(item.values()) + odd;
            to[0] = static_cast<u16>(value[odd].x), to[2] = static_cast<u16>(value[odd].x >> 16);
            to[4] = static_cast<u16>(value[odd].y), to[6] = static_cast<u16>(value[odd].y >> 16);
        }
    }
}

}  // namespace kog
