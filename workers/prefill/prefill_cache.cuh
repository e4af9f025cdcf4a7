// The monokernel's KV cache: a position read from it, a pair of positions written to it.
#pragma once

#include "prefill_units.cuh"

namespace kog {

// Where K of a position stands in the monokernel's cache (see cache_layout.py), in bytes; V of its pair follows `kBatch` rows later.
struct CachePlace {
    unsigned char *key_row, *value_pair;
    bool is_odd;

    __device__ __forceinline__ CachePlace(u64 cache, u32 layer, u32 kv_head, u32 position) {
        const u32 batches = kIsWindowed[layer] ? kWindowBatches : kFullBatches;
        const u32 slot = position / kSplits % (batches * kBatch), row = slot % kBatch;
        const u64 batch = kFirstBatches[layer] + (static_cast<u64>(kv_head) * kSplits + position % kSplits) * batches + slot / kBatch;
        unsigned char* at = reinterpret_cast<unsigned char*>(cache) + batch * kBatchBytes;
        key_row = at + row * kHeadDim * 2;
        value_pair = at + kBatch * kHeadDim * 2 + (row >> 1) * kHeadDim * 4;
        is_odd = row & 1;
    }
};

__device__ __forceinline__ u32 capacity_of(u32 layer) {
    return (kIsWindowed[layer] ? kWindowBatches : kFullBatches) * kBatch * kSplits;
}

// One thread block per layer and position, kPairs * KV heads pairs of values.
__device__ __forceinline__ void load_position(const KogPrefillParams& params) {
    const u32 count = params.last - params.first, layer = blockIdx.x / count, position = params.first + blockIdx.x % count;
    if (position + capacity_of(layer) < params.last) return;  // what came later stands there
    int* overflow = reinterpret_cast<int*>(params.overflow_ptr);
    const u64 plain = (static_cast<u64>(layer) * kPositions + position) * kLanes * kKvPairs;
    u32* keys = reinterpret_cast<u32*>(params.keys_ptr) + plain;
    u32* values = reinterpret_cast<u32*>(params.values_ptr) + plain;
    for (u32 i = threadIdx.x; i < kLanes * kKvPairs; i += blockDim.x) {
        const u32 kv_head = i / kPairs, pair = i % kPairs;
        const CachePlace place(params.cache_ptr, layer, kv_head, position);
        u32* key = reinterpret_cast<u32*>(place.key_row) + pair;
        u16* value = reinterpret_cast<u16*>(place.value_pair) + 4 * pair + place.is_odd;
        const u32 stored = value[0] | static_cast<u32>(value[2]) << 16;
        const u32 key_pair = Fp16::pack(KvFormat::low(*key), KvFormat::high(*key));
        const u32 value_pair = Fp16::pack(KvFormat::low(stored), KvFormat::high(stored));
        keys[i] = key_pair, values[i] = value_pair;
        if (!is_finite_pair(key_pair) || !is_finite_pair(value_pair)) *overflow = 1;
    }
}

// One thread block per layer and pair of positions whose values lie side by side; a thread has two pairs of values of each.
__device__ __forceinline__ void store_positions(const KogPrefillParams& params) {
    constexpr u32 kStep = 2 * kSplits, kItems = kLanes * kKvPairs / 2;
    const u32 first_step = params.first / kStep, count = ((params.last + kStep - 1) / kStep - first_step) * kSplits;
    const u32 layer = blockIdx.x / count, i = blockIdx.x % count, first = (first_step + i / kSplits) * kStep + i % kSplits;
    const u32 capacity = capacity_of(layer);
    const auto is_wanted = [&](u32 at) { return at >= params.first && at < params.last && at + capacity >= params.last; };
    const bool wanted[2] = {is_wanted(first), is_wanted(first + kSplits)};  // else what came later stands there
    if (!(wanted[0] || wanted[1]) || *reinterpret_cast<const int*>(params.overflow_ptr)) return;
    const auto narrowed = [](const uint2& from) {
        return uint2{KvFormat::pack(Fp16::low(from.x), Fp16::high(from.x)), KvFormat::pack(Fp16::low(from.y), Fp16::high(from.y))};
    };
    for (u32 item = threadIdx.x; item < kItems; item += blockDim.x) {
        uint2 keys[2] = {}, values[2] = {};
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            if (!wanted[odd]) continue;
            const u64 at = (static_cast<u64>(layer) * kPositions + first + odd * kSplits) * kItems + item;
            keys[odd] = reinterpret_cast<const uint2*>(params.keys_ptr)[at];
            values[odd] = reinterpret_cast<const uint2*>(params.values_ptr)[at];
        }
        const u32 pair = item % (kPairs / 2) * 2;  // of a head
        const CachePlace place(params.cache_ptr, layer, item / (kPairs / 2), first);
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            values[odd] = narrowed(values[odd]);
            if (wanted[odd]) reinterpret_cast<uint2*>(place.key_row + odd * kHeadDim * 2)[pair / 2] = narrowed(keys[odd]);
        }
        if (wanted[0] && wanted[1]) {
            const auto low = [](u32 even, u32 odd) { return (even & 0xffffu) | odd << 16; };
            const auto high = [](u32 even, u32 odd) { return even >> 16 | (odd & 0xffff0000u); };
            const uint2 even = values[0], odd = values[1];
            reinterpret_cast<uint4*>(place.value_pair)[pair / 2] =
                make_uint4(low(even.x, odd.x), high(even.x, odd.x), low(even.y, odd.y), high(even.y, odd.y));
        } else {
            const uint2 packed = wanted[0] ? values[0] : values[1];
            u16* value = reinterpret_cast<u16*>(place.value_pair) + 4 * pair + (wanted[0] ? 0 : 1);
            value[0] = static_cast<u16>(packed.x), value[2] = static_cast<u16>(packed.x >> 16);
            value[4] = static_cast<u16>(packed.y), value[6] = static_cast<u16>(packed.y >> 16);
        }
    }
}

}  // namespace kog
