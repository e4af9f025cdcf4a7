// Keys and values of a layer between the monokernel's KV cache and plain arrays (positions, KV heads, head_dim) of binary16.
// Behind a header with the model's sizes.
#pragma once

#include "kv_codes.cuh"

namespace kog {

constexpr u32 kRowBytes = kHeadDim * kKvBits / 8, kBatchBytes = 2 * kBatch * kRowBytes + kBatch * kKvScaleBytes;
constexpr u32 kCachedHeads = kLanes * kKvHeads;

__device__ __forceinline__ bool is_finite_pair(u32 packed) {
    return (packed & 0x7c00u) != 0x7c00u && (packed & 0x7c000000u) != 0x7c000000u;
}

// Where K of a position stands in the monokernel's cache (see cache_layout.py), in bytes; V of its pair follows `kBatch` rows later, the scales
// of both at the end of the batch.
struct CachePlace {
    unsigned char *key_row, *value_pair, *scales;

    __device__ __forceinline__ CachePlace(u64 cache, u32 layer, u32 kv_head, u32 position) {
        const u32 batches = kIsWindowed[layer] ? kWindowBatches : kFullBatches;
        const u32 slot = position / kSplits % (batches * kBatch), row = slot % kBatch;
        const u64 batch = kFirstBatches[layer] + (static_cast<u64>(kv_head) * kSplits + position % kSplits) * batches + slot / kBatch;
        unsigned char* at = reinterpret_cast<unsigned char*>(cache) + batch * kBatchBytes;
        key_row = at + row * kRowBytes;
        value_pair = at + kBatch * kRowBytes + (row >> 1) * 2 * kRowBytes;
        scales = at + 2 * kBatch * kRowBytes + row * kKvScaleBytes;
    }
};

__device__ __forceinline__ u32 capacity_of(u32 layer) {
    return (kIsWindowed[layer] ? kWindowBatches : kFullBatches) * kBatch * kSplits;
}

// Of the positions `first` to `last` - 1 of a layer those that it still has when all of them are there. Positions `kSplits` apart lie side
// by side in the cache, two by two: an item is four neighbouring dimensions of both of a head.
struct CachedItems {
    static constexpr u32 kFours = kHeadDim / 4, kOfPair = kSplits * kCachedHeads * kFours, kStep = 2 * kSplits;
    u64 cache;
    u32 layer, first, last;

    __device__ __forceinline__ u32 begin() const { return first / kStep * kOfPair; }
    __device__ __forceinline__ u32 end() const { return first < last ? (last + kStep - 1) / kStep * kOfPair : begin(); }

    struct Item {
        bool wanted[2];
        u64 plain[2];   // in fours
        u32 four;       // of a head
        CachePlace place;  // of the first of both

        __device__ __forceinline__ uint2* key(u32 odd) const { return reinterpret_cast<uint2*>(place.key_row + odd * kHeadDim * 2) + four; }
        __device__ __forceinline__ uint4* values() const { return reinterpret_cast<uint4*>(place.value_pair) + four; }
        // Of codes:
        __device__ __forceinline__ u32* key_codes(u32 odd) const { return reinterpret_cast<u32*>(place.key_row + odd * kRowBytes) + four; }
        __device__ __forceinline__ uint2* value_codes() const { return reinterpret_cast<uint2*>(place.value_pair) + four; }
        __device__ __forceinline__ u32* scales(u32 odd) const { return reinterpret_cast<u32*>(place.scales + odd * kKvScaleBytes); }
    };
    __device__ __forceinline__ Item item(u32 index) const {
        const u32 four = index % kFours, head = index / kFours % kCachedHeads, split = index / (kFours * kCachedHeads) % kSplits;
        const u32 position = index / kOfPair * kStep + split, capacity = capacity_of(layer);
        const auto is_wanted = [&](u32 at) { return at >= first && at < last && at + capacity >= last; };  // else what came later is there
        const auto plain = [&](u32 at) { return (static_cast<u64>(at) * kCachedHeads + head) * kFours + four; };
        return {{is_wanted(position), is_wanted(position + kSplits)}, {plain(position), plain(position + kSplits)}, four,
                CachePlace(cache, layer, head, position)};
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
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.item(index);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        const uint2 pairs = *item.value_codes();
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            if (!item.wanted[odd]) continue;
            const u32 scales = *item.scales(odd);
            keys[item.plain[odd]] = decode_four(*item.key_codes(odd), Fp16::low(scales));
            values[item.plain[odd]] = decode_four(__byte_perm(pairs.x, pairs.y, odd ? 0x7531 : 0x6420), Fp16::high(scales));
        }
    }
}
__device__ __forceinline__ void store_codes(const CachedItems& items, u64 keys_ptr, u64 values_ptr, u32 thread, u32 count) {
    const uint2 *keys = reinterpret_cast<const uint2*>(keys_ptr), *values = reinterpret_cast<const uint2*>(values_ptr);
    for (u32 index = items.begin() + thread; index < items.end(); index += count) {
        const CachedItems::Item item = items.item(index);
        u32 codes[2] = {};
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            const float4 none{}, key = item.wanted[odd] ? floats_of(keys[item.plain[odd]]) : none;
            const float4 value = item.wanted[odd] ? floats_of(values[item.plain[odd]]) : none;
            const float key_scale = shared_scale<CachedItems::kFours>(key), value_scale = shared_scale<CachedItems::kFours>(value);
            codes[odd] = encode_four(value, value_scale);
            if (!item.wanted[odd]) continue;
            *item.key_codes(odd) = encode_four(key, key_scale);
            if (item.four == 0) *item.scales(odd) = Fp16::pack(key_scale, value_scale);
        }
        if (item.wanted[0] && item.wanted[1]) {
            *item.value_codes() = {__byte_perm(codes[0], codes[1], 0x5140), __byte_perm(codes[0], codes[1], 0x7362)};
        } else if (item.wanted[0] || item.wanted[1]) {  // the other one of each pair stays
            const u32 odd = item.wanted[0] ? 0 : 1;
            unsigned char* to = reinterpret_cast<unsigned char*>(item.value_codes()) + odd;
            for (u32 k = 0; k < 4; ++k) to[2 * k] = static_cast<unsigned char>(codes[odd] >> 8 * k);
        }
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
        const CachedItems::Item item = items.item(index);
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
