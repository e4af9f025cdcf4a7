// Gates and ups of a block of tokens, and SwiGLU of them: activation = silu(s g) * s u, where g and u are the block's streams times the
// transposed matrix of gates and of ups, rounded to binary16, and s = 1 / rms of the row.
//
// A tile is kTileRows rows times 128 activations: 256 rows of the matrix, gates and ups among each other so that a thread has both of an
// activation. Thread blocks stay and take tiles in turn, a cluster kClusterRows * kClusterColumns tiles at a time, of which neighbours share
// what they read. One thread queues tensor copies into a ring of slots, which hold kDepth values of the rows and of the matrix each; two
// groups of four warps multiply 64 rows each. `full` counts bytes of a slot; `empty` the warps, of all thread blocks that this slot's copies
// go to together, that have done with it.
//
// kForm 0: SwiGLU of a tile behind its products. 1: gates and ups of a tile are rounded into registers, and an eighth of their SwiGLU is
// done beside each of the next tile's first eight steps. 2: groups take tiles of 64 rows in turn (ping-pong), SwiGLU behind the products of
// one's tile runs beside the other's products. 3: products only, nothing is stored but one value of each thread; to see what products take.
//
// Bits: a sum runs over k from first to last in one thread block, whatever tile, cluster or size of blocks it is.
#include "gateup_hopper.cuh"
#include "gateup_shape.cuh"

namespace kog {

constexpr u32 kDepth = 64, kRowBytes = kDepth * 2;  // of a slot: values of a row, swizzled over 128 bytes
constexpr u32 kGroups = 2, kGroupRows = 64, kGroupThreads = 128, kColumns = 256, kActivations = kColumns / 2;
constexpr bool kTakesTurns = kForm == 2;
constexpr u32 kTileRows = kTakesTurns ? kGroupRows : kGroups * kGroupRows;
constexpr u32 kCluster = kClusterRows * kClusterColumns;
constexpr u32 kXBytes = kTileRows * kRowBytes, kMatrixBytes = kColumns * kRowBytes, kSlotBytes = kXBytes + kMatrixBytes;
constexpr u32 kSteps = kHidden / kDepth, kEighths = 8;
constexpr u32 kBarsFrom = kSlots * kSlotBytes, kSharedBytes = 1024 + kBarsFrom + 16 * kSlots;
constexpr u32 kBoxRows = 64, kBoxBytes = kBoxRows * kRowBytes, kBoxes = kColumns / kBoxRows;
static_assert(kHidden % kDepth == 0 && kSteps >= kEighths, "steps");
static_assert(kFfn % (kActivations * kClusterColumns) == 0, "tiles");
static_assert(kBoxes % kClusterRows == 0 && kTileRows % kClusterColumns == 0, "shares");
static_assert(kSharedBytes <= 227 << 10, "shared memory");

struct alignas(64) GateUpParams {
    TensorMap x;       // hidden, rows, lanes
    TensorMap matrix;  // hidden, and four dimensions that make a box of 64 rows: see run.py
    u64 inverse_rms_ptr, out_ptr, diagnosis_ptr;
    u32 rows, group, is_reversed;  // rows of a lane; tiles of rows taken together; last lanes first
    u32 num_tiles;                 // of clusters
};

struct Tile {
    u32 lane, row, column;  // first row of the cluster's tiles, and first activation

    __device__ __forceinline__ Tile(const GateUpParams& params, u32 index) {
        constexpr u32 kAcross = kFfn / (kActivations * kClusterColumns);
        const u32 down = params.rows / (kTileRows * kClusterRows), of_lane = down * kAcross;
        const u32 at = params.is_reversed ? params.num_tiles - 1 - index : index;
        lane = at / of_lane;
        const u32 within = at % of_lane, of_group = params.group * kAcross;
        const u32 in_group = within % of_group;
        row = (within / of_group * params.group + in_group % params.group) * (kTileRows * kClusterRows);
        column = in_group / params.group * (kActivations * kClusterColumns);
    }
};

struct Ring {
    u32 slot = 0, parity;

    __device__ __forceinline__ explicit Ring(u32 parity) : parity(parity) {}
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(u32 count) {
        const u32 to = slot + count;
        slot = to % kSlots, parity ^= to / kSlots & 1;
    }
};

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 x(u32 slot) const { return base + slot * kSlotBytes; }
    __device__ __forceinline__ u32 matrix(u32 slot) const { return x(slot) + kXBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
};

// A thread block's place in its cluster: which tile it has, and with whom it shares rows of x or of the matrix.
struct Place {
    u32 rank, down, across;

    __device__ __forceinline__ Place() {
        rank = kCluster > 1 ? cluster_rank() : 0;
        down = rank % kClusterRows, across = rank / kClusterRows;
    }
    __device__ __forceinline__ u16 x_mask() const {  // those beside this one have the same rows of x
        u32 mask = 0;
        for (u32 i = 0; i < kClusterColumns; ++i) mask |= 1u << (down + kClusterRows * i);
        return static_cast<u16>(mask);
    }
    __device__ __forceinline__ u16 matrix_mask() const {  // those above and below this one have the same columns
        return static_cast<u16>(((1u << kClusterRows) - 1) << (kClusterRows * across));
    }
};

__device__ __forceinline__ void produce(const GateUpParams& params, const Memory memory, const Place place) {
    constexpr u32 kOwnRows = kTileRows / kClusterColumns, kOwnBoxes = kBoxes / kClusterRows;
    constexpr u32 kInStep = 8;  // clusters that read the same rows of x, or of the matrix, at about the same time: one of them reads ahead
    Ring ring(1);
    for (u32 index = blockIdx.x / kCluster; index < params.num_tiles; index += gridDim.x / kCluster) {
        const Tile tile(params, index);
        const int row = tile.row + place.down * kTileRows + place.across * kOwnRows;
        const int block = (tile.column + place.across * kActivations) / 32 + place.down * kOwnBoxes;
        const u32 next_index = index + gridDim.x / kCluster;
        const Tile next(params, kAhead && next_index < params.num_tiles ? next_index : index);
        for (u32 step = 0; step < kSteps; ++step) {
            if (kAhead) {
                Tile then = next;
                if (step + kAhead < kSteps) then.lane = tile.lane, then.row = tile.row, then.column = tile.column;
                const int ahead = (step + kAhead) % kSteps * kDepth;
                if (then.row / (kTileRows * kClusterRows) % kInStep == then.column / (kActivations * kClusterColumns) % kInStep) {
                    tensor_prefetch3(&params.x, ahead, then.row + place.down * kTileRows + place.across * kOwnRows, then.lane);
#pragma unroll
                    for (u32 i = 0; i < kOwnBoxes; ++i)
                        tensor_prefetch5(&params.matrix, ahead, 0, 4 * ((then.column + place.across * kActivations) / 32 + place.down * kOwnBoxes + i),
                                         2 * then.lane, 0);
                }
            }
            const u32 full = memory.full(ring.slot);
            const int k = step * kDepth;
            mbar_wait(memory.empty(ring.slot), ring.parity);
            mbar_arrive_expect(full, kSlotBytes);
            const u32 x = memory.x(ring.slot) + place.across * kOwnRows * kRowBytes;
            if (kClusterColumns > 1) tensor_load3_many(x, &params.x, k, row, tile.lane, full, place.x_mask());
            else tensor_load3(x, &params.x, k, row, tile.lane, full);
#pragma unroll
            for (u32 i = 0; i < kOwnBoxes; ++i) {
                const u32 to = memory.matrix(ring.slot) + (place.down * kOwnBoxes + i) * kBoxBytes;
                if (kClusterRows > 1) tensor_load5_many(to, &params.matrix, k, 0, 4 * (block + i), 2 * tile.lane, 0, full, place.matrix_mask());
                else tensor_load(to, &params.matrix, k, 0, 4 * (block + i), 2 * tile.lane, 0, full);
            }
            ring.advance();
        }
    }
}

constexpr int kSums = kColumns / 2;  // of a thread: two rows

// What is left to do of a tile: its gates and ups, rounded; the two rows' 1 / rms; where the first row's first activations go.
struct Rest {
    u32 values[kSums / 2];
    float scale[2];
    unsigned char* to;

    // 8 neighbouring activations of a row: gates and ups stand in eight columns each in turn, and a thread has two of each eight.
    template <int kEighth>
    __device__ __forceinline__ void finish() const {
        constexpr int kBlock = kEighth / 2, kRow = kEighth % 2;
        const float s = scale[kRow];
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 gates = values[2 * (8 * kBlock + 2 * i) + kRow], ups = values[2 * (8 * kBlock + 2 * i + 1) + kRow];
            words[i] = Fp16::pack(activation(Fp16::low(gates), Fp16::low(ups), s),
                                  activation(upper(gates), upper(ups), s));
        }
        store_global(to + (kRow * 8 * kFfn + kBlock * 32) * 2, make_uint4(words[0], words[1], words[2], words[3]));
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
    const GateUpParams& params;
    Memory memory;
    Place place;
    u32 group;
    Ring ring{0};
    float sums[kSums];
    Rest rest;

    __device__ __forceinline__ void release(u32 slot) {  // to all that copy into this thread block's slot
        if (kCluster == 1) {
            if (laneid() == 0) mbar_arrive(memory.empty(slot));
        } else if (laneid() < kCluster) {
            const u32 other = laneid();
            if (kClusterColumns == 1 || kClusterRows == 1 || other % kClusterRows == place.down || other / kClusterRows == place.across)
                mbar_arrive_cluster(cluster_address(memory.empty(slot), other));
        }
    }
    // The products of a slot are queued; then what `beside` does; then the slot before is given back, whose products are done.
    template <class Beside>
    __device__ __forceinline__ void step(bool is_first, Beside beside) {
        mbar_wait(memory.full(ring.slot), ring.parity);
        const u64 x = kRowsAt | ((memory.x(ring.slot) + (kTakesTurns ? 0 : group * kGroupRows * kRowBytes)) & 0x3ffff) >> 4;
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
    __device__ __forceinline__ void first_step(bool has_rest) {
        step(kEighth == 0, [&] {
            if (has_rest) rest.finish<kEighth>();
        });
    }
    __device__ __forceinline__ void multiply(bool has_rest, u32 index) {
        first_step<0>(has_rest), first_step<1>(has_rest), first_step<2>(has_rest), first_step<3>(has_rest);
        first_step<4>(has_rest), first_step<5>(has_rest), first_step<6>(has_rest), first_step<7>(has_rest);
        for (u32 i = kEighths; i < kSteps; ++i) step(false, [] {});
        if (kTakesTurns) group_arrive(2 - group, 2 * kGroupThreads);  // all of the tile's slots are known to be full
        begin_rest(Tile(params, index));  // beside the last products
        products_wait<0>();
        settle(sums);
        release(ring.slot == 0 ? kSlots - 1 : ring.slot - 1);
#pragma unroll
        for (int i = 0; i < kSums / 2; ++i) rest.values[i] = Fp16::pack(sums[2 * i], sums[2 * i + 1]);
    }
    __device__ __forceinline__ void begin_rest(const Tile& tile) {
        const u32 row = tile.row + place.down * kTileRows + (kTakesTurns ? 0 : group * kGroupRows) + threadIdx.x % kGroupThreads / 32 * 16 + laneid() / 4;
        const u64 at = static_cast<u64>(tile.lane) * params.rows + row;
        const float* scales = reinterpret_cast<const float*>(params.inverse_rms_ptr) + at;
        rest.scale[0] = __ldg(scales), rest.scale[1] = __ldg(scales + 8);
        rest.to = reinterpret_cast<unsigned char*>(params.out_ptr) + (at * kFfn + tile.column + place.across * kActivations + laneid() % 4 * 8) * 2;
    }
    __device__ __forceinline__ void run() {
        const u32 stride = gridDim.x / kCluster;
        bool has_rest = false;
        u32 pass = 0;
        if (kTakesTurns && group == 1) group_arrive(1, 2 * kGroupThreads);  // the other one begins
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0;
        for (u32 index = blockIdx.x / kCluster; index < params.num_tiles; index += stride, ++pass) {
            if (kTakesTurns && pass % kGroups != group) {
                ring.skip(kSteps);
                continue;
            }
            // Not before the other one has passed its slots: what is waited for is at most one round of the ring ahead.
            if (kTakesTurns) group_sync(1 + group, 2 * kGroupThreads);
            multiply(kForm == 1 && has_rest, index);
            if (kForm == 0 || kForm == 2) rest.finish_all();
            if (kForm == 3) {
                u32 any = 0;
#pragma unroll
                for (int i = 0; i < kSums / 2; ++i) any ^= rest.values[i];
                *reinterpret_cast<u32*>(rest.to) = any;
            }
            has_rest = true;
        }
        if (kForm == 1 && has_rest) rest.finish_all();
    }
    static constexpr u64 kRowsAt = static_cast<u64>(8 * kRowBytes >> 4) << 32 | 1ull << 62 | 1ull << 16;
};

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    gate_up(const __grid_constant__ GateUpParams params) {
    const Memory memory{(shared_memory() + 1023) & ~1023u};
    const Place place;
    const u32 group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);  // one register for the whole warp
    u64* const diagnosis = reinterpret_cast<u64*>(params.diagnosis_ptr) + 2 * blockIdx.x;  // cycles and nanoseconds of this thread block
    if (threadIdx.x == 0) {
        if (params.diagnosis_ptr) diagnosis[0] = clock64_cycles(), diagnosis[1] = globaltimer_ns();
        for (u32 slot = 0; slot < kSlots; ++slot) {
            mbar_init(memory.full(slot), 1);
            mbar_init(memory.empty(slot), (kTakesTurns ? 1 : kGroups) * 4 * (kClusterRows + kClusterColumns - 1));  // warps
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (kCluster > 1) cluster_sync();
    if (group < kGroups) {
        raise_registers<kAhead ? 232 : 240>();
        Consumer{params, memory, place, group}.run();
        if (threadIdx.x == 0 && params.diagnosis_ptr)
            diagnosis[0] = clock64_cycles() - diagnosis[0], diagnosis[1] = globaltimer_ns() - diagnosis[1];
        if (kCluster > 1) cluster_sync();  // nobody leaves whose memory another one may still copy to, or whose barriers it may still tell
    } else {
        drop_registers<kAhead ? 40 : 24>();
        if (threadIdx.x == kGroups * kGroupThreads) produce(params, memory, place);
        if (kCluster > 1) cluster_sync();
    }
}

}  // extern "C"
