// Gates and ups of a block of tokens, and SwiGLU of them, binary16 with float32 sums, on Hopper's matrix units: activation =
// silu(s g) * s u, where g and u are the block's streams times the transposed rows of gates and of ups, rounded to binary16, and s = 1 / rms
// of the stream.
//
// A tile is 128 rows of a lane times 128 activations: 256 rows of the matrix, gates and ups among each other, so that a thread has both of
// an activation. Thread blocks stay and take tiles in turn, two at a time, one above the other, which share what they read of the matrix:
// each copies half of it to both. One thread queues tensor copies into a ring of slots, which hold kDepth values of the tile's rows and of the
// matrix's each; two groups of four warps multiply 64 rows each. `full` counts bytes of a slot; `empty` the warps, of both thread blocks, that
// have done with it.
//
// What a tile does with its sums would leave the matrix units idle. So they are rounded into registers, and an eighth of their SwiGLU is done
// beside each of the next tile's first eight steps.
//
// Bits: a sum runs over k from first to last in one thread block, whatever tile and size of blocks it is in.
#include "hopper.cuh"
#include "dependent.cuh"
#include "gate_up_shape.cuh"

namespace kog {

constexpr u32 kDepth = 64, kRowBytes = kDepth * 2;  // of a slot: values of a row, swizzled over 128 bytes
constexpr u32 kGroups = 2, kGroupRows = 64, kGroupThreads = 128, kTileRows = kGroups * kGroupRows;
constexpr u32 kCluster = 2, kClusterRows = kCluster * kTileRows;
constexpr u32 kColumns = 256, kActivations = kColumns / 2;  // of a tile
constexpr u32 kBoxRows = 64, kBoxBytes = kBoxRows * kRowBytes, kOwnBoxes = kColumns / kBoxRows / kCluster;  // of the matrix
constexpr u32 kXBytes = kTileRows * kRowBytes, kSlotBytes = kXBytes + kColumns * kRowBytes;
constexpr u32 kSteps = kHidden / kDepth, kEighths = 8;
constexpr u32 kBarsFrom = kSlots * kSlotBytes;
constexpr int kSums = kColumns / 2;  // of a thread: two rows
static_assert(kHidden % kDepth == 0 && kSteps >= kEighths, "steps");
static_assert(kFfn % kActivations == 0, "tiles");
static_assert(1024 + kBarsFrom + 16 * kSlots <= kSharedBytes, "shared memory");

struct Tile {
    u32 lane, row, column;  // first row of both thread blocks' tiles, and their first activation

    // The tiles of `band` clusters of rows are taken column by column, so that what they read stays in L2.
    __device__ __forceinline__ Tile(const KogGateUpParams& params, u32 index) {
        constexpr u32 kAcross = kFfn / kActivations;
        const u32 of_lane = params.rows / kClusterRows * kAcross, of_band = params.band * kAcross;
        lane = index / of_lane;
        const u32 within = index % of_lane, in_band = within % of_band;
        row = (within / of_band * params.band + in_band % params.band) * kClusterRows;
        column = in_band / params.band * kActivations;
    }
};

struct Ring {
    u32 slot = 0, parity;

    __device__ __forceinline__ explicit Ring(u32 parity) : parity(parity) {}
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 x(u32 slot) const { return base + slot * kSlotBytes; }
    __device__ __forceinline__ u32 matrix(u32 slot) const { return x(slot) + kXBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
};

// Called by one thread. `rank`: of the thread block in its cluster.
__device__ __forceinline__ void queue_copies(const KogGateUpParams& params, const Memory memory, u32 rank) {
    const TensorMap* x_map = reinterpret_cast<const TensorMap*>(params.x_map);
    const TensorMap* matrix_map = reinterpret_cast<const TensorMap*>(params.matrix_map);
    Ring ring(1);
    for (u32 index = blockIdx.x / kCluster; index < params.num_tiles; index += gridDim.x / kCluster) {
        const Tile tile(params, index);
        const int row = tile.row + rank * kTileRows, stream = params.is_shared ? 0 : tile.lane;
        const int box = tile.column / 32 + rank * kOwnBoxes;
        for (u32 step = 0; step < kSteps; ++step) {
            const u32 full = memory.full(ring.slot);
            const int k = step * kDepth;
            mbar_wait(memory.empty(ring.slot), ring.parity);
            mbar_arrive_expect(full, kSlotBytes);
            tensor_load(memory.x(ring.slot), x_map, k, row, stream, full);
#pragma unroll
            for (u32 i = 0; i < kOwnBoxes; ++i)
                tensor_load_many(memory.matrix(ring.slot) + (rank * kOwnBoxes + i) * kBoxBytes, matrix_map, k, 0, 4 * (box + i),
                                 2 * tile.lane, 0, full, (1 << kCluster) - 1);
            ring.advance();
        }
    }
}

// What is left to do of a tile: its gates and ups, rounded; the two rows' 1 / rms; where the first row's first activations go.
struct Rest {
    u32 values[kSums / 2];
    float scale[2];
    unsigned char* to;

    // 8 neighbouring activations of a row: gates and ups stand in eight columns each in turn, and a thread has two of each eight.
    template <int kEighth>
    __device__ __forceinline__ void finish() const {
        constexpr int kBox = kEighth / 2, kRow = kEighth % 2;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 gates = values[2 * (8 * kBox + 2 * i) + kRow], ups = values[2 * (8 * kBox + 2 * i + 1) + kRow];
            words[i] = Fp16::pack(activation(Fp16::low(gates), Fp16::low(ups), scale[kRow]),
                                  activation(high_half(gates), high_half(ups), scale[kRow]));
        }
        store_global(to + (kRow * 8 * kFfn + kBox * 32) * 2, make_uint4(words[0], words[1], words[2], words[3]));
    }
    // In the arithmetic of prefill.cu's swiglu.
    static __device__ __forceinline__ float activation(float gate, float up, float scale) {
        const float g = gate * scale;
        return __fdividef(g, 1.0f + __expf(-g)) * (up * scale);
    }
    __device__ __forceinline__ void finish_all() const {
        finish<0>(), finish<1>(), finish<2>(), finish<3>(), finish<4>(), finish<5>(), finish<6>(), finish<7>();
    }
};

struct Consumer {
    const KogGateUpParams& params;
    Memory memory;
    u32 rank, group;  // of the thread block in its cluster; in the thread block
    Ring ring{0};
    float sums[kSums];
    Rest rest;

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
    template <int kEighth>
    __device__ __forceinline__ void early_step(bool has_rest) {
        step(kEighth == 0, [&] {
            if (has_rest) rest.finish<kEighth>();
        });
    }
    __device__ __forceinline__ void multiply(bool has_rest, u32 index) {
        early_step<0>(has_rest), early_step<1>(has_rest), early_step<2>(has_rest), early_step<3>(has_rest);
        early_step<4>(has_rest), early_step<5>(has_rest), early_step<6>(has_rest), early_step<7>(has_rest);
        for (u32 i = kEighths; i < kSteps; ++i) step(false, [] {});
        begin_rest(Tile(params, index));  // beside the last products
        products_wait<0>();
        settle(sums);
        release(ring.slot == 0 ? kSlots - 1 : ring.slot - 1);
#pragma unroll
        for (int i = 0; i < kSums / 2; ++i) rest.values[i] = Fp16::pack(sums[2 * i], sums[2 * i + 1]);
    }
    __device__ __forceinline__ void begin_rest(const Tile& tile) {
        const u32 thread = threadIdx.x % kGroupThreads;
        const u32 row = tile.row + rank * kTileRows + group * kGroupRows + thread / 32 * 16 + laneid() / 4;
        const u64 at = static_cast<u64>(tile.lane) * params.rows + row;
        const float* scales = reinterpret_cast<const float*>(params.inverse_rms_ptr) + at;
        rest.scale[0] = __ldg(scales), rest.scale[1] = __ldg(scales + 8);
        rest.to = reinterpret_cast<unsigned char*>(params.activation_ptr) + (at * kFfn + tile.column + laneid() % 4 * 8) * 2;
    }
    __device__ __forceinline__ void run() {
        bool has_rest = false;
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0;
        for (u32 index = blockIdx.x / kCluster; index < params.num_tiles; index += gridDim.x / kCluster) {
            multiply(has_rest, index);
            has_rest = true;
        }
        if (has_rest) rest.finish_all();
    }
    // Of operands in shared memory: eight rows repeat themselves, swizzled over 128 bytes.
    static constexpr u64 kRowsAt = static_cast<u64>(8 * kRowBytes >> 4) << 32 | 1ull << 62 | 1ull << 16;
};

struct alignas(64) GateUpLaunch {  // as tensor maps want it
    KogGateUpParams params;
};

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    gate_up(const __grid_constant__ GateUpLaunch launch) {
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
    await_predecessors();
    if (group < kGroups) {
        raise_registers<240>();
        Consumer{launch.params, memory, rank, group}.run();
    } else {
        drop_registers<24>();
        if (threadIdx.x == kGroups * kGroupThreads) queue_copies(launch.params, memory, rank);
    }
    cluster_sync();  // nobody leaves whose memory the other one may still copy to, or whose barriers it may still tell
}

}  // extern "C"
