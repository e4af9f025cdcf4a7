// Products of a chunk of tokens and each lane's matrix, binary16 with float32 sums, on Hopper's matrix units. What becomes of the sums is up to
// the file that includes this: its `Tail`.
//
// A tile is 128 rows of a lane times 256 rows of its matrix. Thread blocks stay and take tiles in turn, two at a time, one above the other,
// which share what they read of the matrix: each copies half of it to both. One thread queues tensor copies into a ring of slots, which hold
// kDepth values of the tile's rows and of the matrix's each; two groups of four warps multiply 64 rows each. `full` counts bytes of a slot;
// `empty` the warps, of both thread blocks, that have done with it.
//
// What a tile does with its sums leaves the matrix units idle. So a tail rounds them into registers, and an eighth of what else it does runs
// beside each of the next tile's first eight steps (two eighths, where there are fewer steps).
//
// Bits: a sum runs over k from first to last in one thread block, whatever tile and size of chunks it is in.
#pragma once
#include "hopper.cuh"
#include "pdl.cuh"
#include "slot_ring.cuh"

namespace kog {

constexpr u32 kDepth = 64, kRowBytes = kDepth * 2;  // of a slot: values of a row, swizzled over 128 bytes
constexpr u32 kGroups = 2, kGroupRows = 64, kGroupThreads = 128, kTileRows = kGroups * kGroupRows;
constexpr u32 kCluster = 2, kClusterRows = kCluster * kTileRows;
constexpr u32 kColumns = 256, kAcross = kWidth / kColumns;
constexpr u32 kBoxRows = 64, kBoxes = kColumns / kBoxRows, kOwnBoxes = kBoxes / kCluster;  // of the matrix
constexpr u32 kBoxBytes = kBoxRows * kRowBytes;
constexpr u32 kXBytes = kTileRows * kRowBytes, kSlotBytes = kXBytes + kColumns * kRowBytes;
constexpr u32 kSteps = kInner / kDepth, kEighths = 8, kAtOnce = kSteps < kEighths ? 2 : 1;  // eighths beside an early step
constexpr u32 kBarsFrom = kSlots * kSlotBytes;
constexpr int kSums = kColumns / 2;  // of a thread: two rows, 8 apart; of each 8 columns two neighbours of each
static_assert(kInner % kDepth == 0 && kSteps >= kEighths / kAtOnce && kSteps >= kSlots, "steps");
static_assert(kWidth % kColumns == 0, "tiles");
static_assert(1024 + kBarsFrom + 16 * kSlots <= kSharedBytes, "shared memory");

struct alignas(64) TileLaunch {  // as tensor maps want it
    KogTileParams params;
};

struct Tile {
    u32 lane, row, across;  // first row of both thread blocks' tiles; which 256 rows of the lane's matrix

    // The tiles of `band` clusters of rows are taken column by column, so that what they read stays in L2.
    __device__ __forceinline__ Tile(const KogTileParams& params, u32 index) {
        const u32 of_lane = params.rows / kClusterRows * kAcross, of_band = params.band * kAcross;
        lane = index / of_lane;
        const u32 within = index % of_lane, in_band = within % of_band;
        row = (within / of_band * params.band + in_band % params.band) * kClusterRows;
        across = in_band / params.band;
    }
};

using Ring = SlotRing<kSlots>;

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 x(u32 slot) const { return base + slot * kSlotBytes; }
    __device__ __forceinline__ u32 matrix(u32 slot) const { return x(slot) + kXBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
};

// Where box `box` of a lane's matrix begins, its first dimension left out. A box has its 64 rows in such an order that a thread gets 8
// neighbouring results of a row (`Tiles` in tiles.py).
struct BoxPlace {
    int at[4];
};
__device__ __forceinline__ BoxPlace plain_box(u32 lane, u32 box) {
    return {0, 0, 0, static_cast<int>(lane * (kWidth / 32) + 2 * box)};
}

// Called by one thread. `rank`: of the thread block in its cluster.
template <class Tail>
__device__ __forceinline__ void queue_copies(const KogTileParams& params, const Memory memory, u32 rank) {
    const TensorMap* x_map = reinterpret_cast<const TensorMap*>(params.x_map);
    const TensorMap* matrix_map = reinterpret_cast<const TensorMap*>(params.matrix_map);
    const auto load_matrix = [&](const Tile& tile, u32 step, u32 slot) {
        mbar_arrive_expect(memory.full(slot), kSlotBytes);
#pragma unroll
        for (u32 n = 0; n < kOwnBoxes; ++n) {
            const u32 i = rank * kOwnBoxes + n;
            const BoxPlace box = Tail::box_place(tile.lane, tile.across * kBoxes + i);
            tensor_load_many(memory.matrix(slot) + i * kBoxBytes, matrix_map, step * kDepth, box.at[0], box.at[1], box.at[2], box.at[3],
                             memory.full(slot), (1 << kCluster) - 1);
        }
    };
    const u32 first = blockIdx.x / kCluster;
    for (u32 step = 0; step < kSlots; ++step) load_matrix(Tile(params, first), step, step);  // nobody's result, so that it need not wait
    await_predecessors();
    Ring ring{0, 1};
    for (u32 index = first; index < params.num_tiles; index += gridDim.x / kCluster) {
        const Tile tile(params, index);
        const u32 row = tile.row + rank * kTileRows, stream = params.is_shared ? 0 : tile.lane;
        for (u32 step = 0; step < kSteps; ++step) {
            mbar_wait(memory.empty(ring.slot), ring.parity);
            if (index != first || step >= kSlots) load_matrix(tile, step, ring.slot);
            tensor_load(memory.x(ring.slot), x_map, step * kDepth, row, stream, memory.full(ring.slot));
            ring.advance();
        }
    }
}

template <class Tail>
struct Consumer {
    const KogTileParams& params;
    Memory memory;
    u32 rank, group;  // of the thread block in its cluster; in the thread block
    Ring ring{0, 0};
    float sums[kSums];
    Tail tail;

    __device__ __forceinline__ void release(u32 slot) {  // to both that copy into it
        if (laneid() < kCluster) mbar_arrive_cluster(cluster_address(memory.empty(slot), laneid()));
    }
    // The products of a slot are queued; then what `beside` does; then the slot before is given back, whose products are done.
    template <class Beside>
    __device__ __forceinline__ void step(bool is_first, Beside beside) {
        mbar_wait(memory.full(ring.slot), ring.parity);
        const u64 x = kRowsAt | ((memory.x(ring.slot) + group * kGroupRows * kRowBytes) & 0x3ffff) >> 4;
        const u64 matrix = kRowsAt | (memory.matrix(ring.slot) & 0x3ffff) >> 4;
        products_begin();
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k) multiply_rows(sums, x + 2 * k, matrix + 2 * k, !is_first || k > 0);
        products_commit();
        beside();
        products_wait<1>();
        if (!is_first) release(ring.slot == 0 ? kSlots - 1 : ring.slot - 1);
        ring.advance();
    }
    template <u32 kStep>
    __device__ __forceinline__ void early_steps(bool has_tail) {
        step(kStep == 0, [&] {
            if (has_tail) finish<kStep * kAtOnce, kAtOnce>();
        });
        if constexpr (kStep + 1 < kEighths / kAtOnce) early_steps<kStep + 1>(has_tail);
    }
    template <u32 kFirst, u32 kCount>
    __device__ __forceinline__ void finish() {
        tail.template finish<kFirst>(params);
        if constexpr (kCount > 1) finish<kFirst + 1, kCount - 1>();
    }
    __device__ __forceinline__ void multiply(bool has_tail, u32 index) {
        early_steps<0>(has_tail);
        for (u32 i = kEighths / kAtOnce; i < kSteps; ++i) step(false, [] {});
        const Tile tile(params, index);
        const u32 row = tile.row + rank * kTileRows + group * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16 + laneid() / 4;
        tail.begin(params, tile, row);  // beside the last products
        products_wait<0>();
        release(ring.slot == 0 ? kSlots - 1 : ring.slot - 1);
        settle(sums);
        tail.take(params, sums);
    }
    __device__ __forceinline__ void run() {
        bool has_tail = false;
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0;
        for (u32 index = blockIdx.x / kCluster; index < params.num_tiles; index += gridDim.x / kCluster) {
            multiply(has_tail, index);
            has_tail = true;
        }
        if (has_tail) finish<0, kEighths>();
    }
    // Of operands in shared memory: eight rows repeat themselves, swizzled over 128 bytes.
    static constexpr u64 kRowsAt = static_cast<u64>(8 * kRowBytes >> 4) << 32 | 1ull << 62 | 1ull << 16;
};

// A kernel. `Tail`, of each thread: `begin` (its first row; the other one is 8 below), `take` of the sums, and `finish` of each eighth.
template <class Tail>
__device__ __forceinline__ void run_tiles(const KogTileParams& params) {
    const Memory memory{(shared_memory() + 1023) & ~1023u};
    const u32 rank = cluster_rank();
    const u32 group = __shfl_sync(kFullWarp, threadIdx.x / kGroupThreads, 0);  // one register for the whole warp
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < kSlots; ++slot) {
            mbar_init(memory.full(slot), 1);
            mbar_init(memory.empty(slot), kCluster * kGroups * 4);  // warps
        }
        fence_barrier_init();
    }
    __syncthreads();
    cluster_sync();
    let_successors_begin();
    if (group < kGroups) {
        await_predecessors();
        raise_registers<240>();
        Consumer<Tail>{params, memory, rank, group}.run();
    } else {
        drop_registers<24>();
        if (threadIdx.x == kGroups * kGroupThreads) queue_copies<Tail>(params, memory, rank);
    }
    cluster_sync();  // nobody leaves whose memory the other one may still copy to, or whose barriers it may still tell
}

#define KOG_TILES(name, Tail)                                                                            \
    extern "C" __global__ void __cluster_dims__(kog::kCluster, 1, 1)                                     \
        __launch_bounds__((kog::kGroups + 1) * kog::kGroupThreads, 1)                                    \
            name(const __grid_constant__ kog::TileLaunch launch) {                                       \
        kog::run_tiles<kog::Tail>(launch.params);                                                        \
    }

}  // namespace kog
