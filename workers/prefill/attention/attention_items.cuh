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
constexpr u32 kSlotBytes = kTileBytes < kGroups * kQueryBytes ? kGroups * kQueryBytes : kTileBytes;
constexpr u32 kTotalsFrom = kSlots * kSlotBytes, kBarsFrom = kTotalsFrom + kGroups * kTotalBytes, kNumBars = 2 * kSlots;
constexpr int kValues = kHeadDim / 2, kScores = kKeys / 2;  // of a thread: two rows
static_assert(1024 + kBarsFrom + 8 * kNumBars <= kSharedBytes, "shared memory");
static_assert(kScores <= 64, "a row's scores of a thread have a bit each");
static_assert(kGroupRows % kPack == 0 && kHeadDim % kPanel == 0, "whole panels");

// Partitions of tiles of keys: kShortPartitions at the beginning of the context, long ones behind them.
__device__ __forceinline__ int partition_of(int tile) {
    const int behind = tile - kShortPartitions * kPartitionTiles;
    return behind < 0 ? tile / kPartitionTiles : kShortPartitions + behind / kLongPartitionTiles;
}
__device__ __forceinline__ int partition_begin(int partition) {
    const int behind = partition - kShortPartitions;
    return behind < 0 ? partition * kPartitionTiles : kShortPartitions * kPartitionTiles + behind * kLongPartitionTiles;
}

// Units of neighbouring partitions are items of their own: the first has as many as the launch says, all others one.
__device__ __forceinline__ int unit_of(const KogAttentionParams& params, int tile) {
    return max(0, partition_of(tile) - static_cast<int>(params.first_partitions) + 1);
}
__device__ __forceinline__ int unit_begin(const KogAttentionParams& params, int unit) {
    return unit ? partition_begin(unit + static_cast<int>(params.first_partitions) - 1) : 0;
}

struct Item {
    u32 tile, head;  // `head`: kPack neighbouring query heads
    int unit;
    int first, end;  // tiles of keys
    bool is_whole;   // all that its rows see

    // `start`: position of the chunk's first row.
    __device__ __forceinline__ Item(const KogAttentionParams& params, u32 index, int start) {
        head = index % kPackedHeads;
        const u32 rest = index / kPackedHeads;
        unit = 0;
        if (params.num_units == 0) {
            tile = params.num_tiles - 1 - rest;  // the longest first
            see(params, start);
            return;
        }
        tile = rest % params.num_tiles;
        see(params, start);
        const int last_unit = unit_of(params, (start + static_cast<int>(params.size) - 1) / static_cast<int>(kKeys));
        // The longest first: the short partitions last, if they are units.
        const int turn = static_cast<int>(rest / params.num_tiles), num_short = params.first_partitions == 1 ? kShortPartitions : 0;
        const int num_long = max(0, last_unit + 1 - num_short);
        unit = turn < num_long ? num_short + turn : turn - num_long;
        is_whole = is_of_one_unit(params);
        first = max(first, unit_begin(params, unit));
        end = turn > last_unit ? 0 : min(end, unit_begin(params, unit + 1));
    }
    __device__ __forceinline__ bool is_of_one_unit(const KogAttentionParams& params) const {
        return unit_of(params, first) == unit_of(params, end - 1);
    }
    __device__ __forceinline__ void see(const KogAttentionParams& params, int start) {
        const int row = first_row(params, 0), lowest = start + row - static_cast<int>(params.window) + 1;
        first = params.window && lowest > 0 ? lowest / kKeys : 0;
        end = (start + min(static_cast<int>(params.size), row + static_cast<int>(params.num_groups) * kGroupPositions) - 1) / kKeys + 1;
        is_whole = true;
    }
    __device__ __forceinline__ int first_row(const KogAttentionParams& params, u32 group) const {
        return (tile * params.num_groups + group) * kGroupPositions;
    }
    // One past the last tile that belongs together with tile `from`.
    __device__ __forceinline__ int run_end(const KogAttentionParams& params, int from) const {
        return params.is_partitioned ? min(end, partition_begin(partition_of(from) + 1)) : end;
    }
    // Where what a unit gives for the item's rows is kept.
    __device__ __forceinline__ u32 part_index(const KogAttentionParams& params, int of_unit) const {
        return (static_cast<u32>(of_unit) * params.num_tiles + tile) * kPackedHeads + head;
    }
};

// Items of a cluster in turn: there and back, so that the shortest follow the longest.
template <u32 kCluster>
__device__ __forceinline__ u32 item_index(u32 pass) {
    const u32 count = gridDim.x / kCluster, own = blockIdx.x / kCluster;
    return pass * count + (pass & 1 ? count - 1 - own : own);
}

using Ring = SlotRing<kSlots>;

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 slot(u32 index) const { return base + index * kSlotBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
};

template <u32 kCluster>
struct Producer {
    static constexpr u32 kOwnKeys = kKeys / kCluster;  // of a tile: this thread block copies them, to all of the cluster

    const KogAttentionParams& params;
    Memory memory;
    u32 rank;  // of the thread block in its cluster
    Ring ring{0, 1};

    __device__ __forceinline__ void load(const uint64_t (&map)[16], int tile, u32 kv_head) {
        const u32 full = memory.full(ring.slot);
        mbar_wait(memory.empty(ring.slot), ring.parity);
        mbar_arrive_expect(full, kTileBytes);
        const TensorMap* tensor = reinterpret_cast<const TensorMap*>(map);
        const u32 to = memory.slot(ring.slot);
        const int first = tile * static_cast<int>(kKeys);
        if constexpr (kCluster == 1) {
            tensor_load(to, tensor, 0, first, 0, kv_head, full);
        } else {
            const u32 own = rank * kOwnKeys;
#pragma unroll
            for (u32 panel = 0; panel < kPanels; ++panel)
                tensor_load_many(to + panel * kPanelBytes + own * kPanel * 2, tensor, 0, first + static_cast<int>(own), panel, kv_head, full,
                                 (1 << kCluster) - 1);
        }
        ring.advance();
    }
    __device__ __forceinline__ void load_queries(const Item& item) {
        const u32 full = memory.full(ring.slot), num_groups = params.num_groups / kCluster;
        mbar_wait(memory.empty(ring.slot), ring.parity);
        mbar_arrive_expect(full, num_groups * kQueryBytes);
        for (u32 group = 0; group < num_groups; ++group)
            tensor_load(memory.slot(ring.slot) + group * kQueryBytes, reinterpret_cast<const TensorMap*>(params.query_map), 0, 0,
                        item.first_row(params, rank * num_groups + group), 0, item.head, full);
        ring.advance();
    }
    __device__ __forceinline__ void run() {
        const int start = *reinterpret_cast<const int*>(params.place_ptr);
        for (u32 pass = 0; pass * (gridDim.x / kCluster) < params.num_items; ++pass) {
            const u32 index = item_index<kCluster>(pass);
            if (index >= params.num_items) continue;
            const Item item(params, index, start);
            if (item.first >= item.end) continue;
            const u32 kv_head = item.head * kPack / kShare;
            load_queries(item);
            load(params.keys_map, item.first, kv_head);
            for (int tile = item.first + 1; tile < item.end; ++tile) {  // keys before the values of the tile before, of a partition
                const bool begins = params.is_partitioned && tile == partition_begin(partition_of(tile));
                load(begins ? params.values_map : params.keys_map, tile - begins, kv_head);
                load(begins ? params.keys_map : params.values_map, tile - !begins, kv_head);
            }
            load(params.values_map, item.end - 1, kv_head);
        }
    }
};

}  // namespace kog
