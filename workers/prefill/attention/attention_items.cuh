// Which keys which thread block attends to, and how they come into shared memory: items, the ring of slots, the thread that copies.
#pragma once

#include "panels.cuh"
#include "pdl.cuh"
#include "slot_ring.cuh"
#include "attention_shape.cuh"

namespace kog {

constexpr u32 kGroupRows = 64, kGroupThreads = 128;
constexpr int kGroupPositions = kGroupRows / kPack;
constexpr u32 kPanels = kHeadDim / kPanel, kPanelBytes = kKeys * kPanel * 2, kTileBytes = kPanels * kPanelBytes;
constexpr u32 kQueryPanelBytes = kGroupRows * kPanel * 2, kQueryBytes = kPanels * kQueryPanelBytes;
constexpr u32 kTotalBytes = kGroupRows * kHeadDim * 4;
constexpr u32 kQueriesFrom = kSlots * kTileBytes, kTotalsFrom = kQueriesFrom + kGroups * kQueryBytes;
constexpr u32 kBarsFrom = kTotalsFrom + kGroups * kTotalBytes, kNumBars = 2 * kSlots + 2 * kGroups;
constexpr int kValues = kHeadDim / 2, kScores = kKeys / 2;  // of a thread: two rows
static_assert(1024 + kBarsFrom + 8 * kNumBars <= kSharedBytes, "shared memory");
static_assert(kScores <= 64, "a row's scores of a thread have a bit each");
static_assert(kGroupRows % kPack == 0 && kHeadDim % kPanel == 0, "whole panels");

struct Item {
    u32 tile, head, partition;  // `head`: kPack neighbouring query heads
    int first, end;         // tiles of keys

    // `start`: position of the chunk's first row.
    __device__ __forceinline__ Item(const KogAttentionParams& params, u32 index, int start) {
        head = index % kPackedHeads;
        const u32 rest = index / kPackedHeads;
        tile = params.num_partitions ? rest % params.num_tiles : params.num_tiles - 1 - rest;  // the longest first
        partition = params.num_partitions ? rest / params.num_tiles : 0;
        see(params, start);
        if (params.num_partitions) {
            first = max(first, static_cast<int>(partition) * kPartitionTiles);
            end = min(end, static_cast<int>(partition + 1) * kPartitionTiles);
        }
    }
    __device__ __forceinline__ void see(const KogAttentionParams& params, int start) {
        const int row = first_row(params, 0), lowest = start + row - static_cast<int>(params.window) + 1;
        first = params.window && lowest > 0 ? lowest / kKeys : 0;
        end = (start + min(static_cast<int>(params.size), row + static_cast<int>(params.num_groups) * kGroupPositions) - 1) / kKeys + 1;
    }
    __device__ __forceinline__ int first_row(const KogAttentionParams& params, u32 group) const {
        return (tile * params.num_groups + group) * kGroupPositions;
    }
    // One past the last tile that belongs together with tile `from`.
    __device__ __forceinline__ int run_end(const KogAttentionParams& params, int from) const {
        return params.is_partitioned ? min(end, (from / kPartitionTiles + 1) * kPartitionTiles) : end;
    }
};

// Items of a thread block in turn: there and back, so that the shortest follow the longest.
__device__ __forceinline__ u32 item_index(u32 pass) {
    return pass * gridDim.x + (pass & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

using Ring = SlotRing<kSlots>;

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 slot(u32 index) const { return base + index * kTileBytes; }
    __device__ __forceinline__ u32 query(u32 group) const { return base + kQueriesFrom + group * kQueryBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
    __device__ __forceinline__ u32 query_full(u32 group) const { return base + kBarsFrom + 16 * (kSlots + group); }
    __device__ __forceinline__ u32 query_empty(u32 group) const { return query_full(group) + 8; }
};

struct Producer {
    const KogAttentionParams& params;
    Memory memory;
    Ring ring{0, 1};

    __device__ __forceinline__ void load(const uint64_t (&map)[16], int tile, u32 kv_head) {
        const u32 full = memory.full(ring.slot);
        mbar_wait(memory.empty(ring.slot), ring.parity);
        mbar_arrive_expect(full, kTileBytes);
        tensor_load(memory.slot(ring.slot), reinterpret_cast<const TensorMap*>(map), 0, tile * static_cast<int>(kKeys), 0, kv_head, full);
        ring.advance();
    }
    __device__ __forceinline__ void run() {
        const int start = *reinterpret_cast<const int*>(params.place_ptr);
        u32 query_parity = 1;
        for (u32 pass = 0; pass * gridDim.x < params.num_items; ++pass) {
            if (item_index(pass) >= params.num_items) continue;
            const Item item(params, item_index(pass), start);
            if (item.first >= item.end) continue;
            const u32 kv_head = item.head * kPack / kShare;
            load(params.keys_map, item.first, kv_head);
            for (u32 group = 0; group < params.num_groups; ++group) {
                mbar_wait(memory.query_empty(group), query_parity);
                mbar_arrive_expect(memory.query_full(group), kQueryBytes);
                tensor_load(memory.query(group), reinterpret_cast<const TensorMap*>(params.query_map), 0, 0,
                            item.first_row(params, group), 0, item.head, memory.query_full(group));
            }
            query_parity ^= 1;
            for (int from = item.first; from < item.end;) {
                const int until = item.run_end(params, from);
                if (from > item.first) load(params.keys_map, from, kv_head);
                for (int tile = from + 1; tile < until; ++tile) {
                    load(params.keys_map, tile, kv_head);
                    load(params.values_map, tile - 1, kv_head);
                }
                load(params.values_map, until - 1, kv_head);
                from = until;
            }
        }
    }
};

}  // namespace kog
