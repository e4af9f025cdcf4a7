// Matrix products of a block of tokens, lane by lane: out (size x columns) = x (size x depth) times the transposed matrix, binary16,
// summed in float32 in one order whatever the size: a row has the same bits in every block and on any number of ranks.
//
// A tile of 128 x 256 results belongs to a thread block, and two of them below each other to a cluster of two, which share what
// they read of the matrix. One warp group has a thread that queues copies into a ring of stages; two others multiply 64 rows each.
// `full` counts bytes of a stage; `empty` counts the warps of both thread blocks that have done with it, since either one's copies
// go into both. Tiles are taken in turn until none is left. Results leave through shared memory while the next tile is multiplied.
#include "hopper.cuh"
#include "product_shape.cuh"

namespace kog {

constexpr u32 kTileRows = 128, kTileColumns = 256, kTileDepth = 64, kGroupRows = 64;
constexpr u32 kXBytes = kTileRows * kTileDepth * 2, kHalfBytes = kTileColumns / 2 * kTileDepth * 2;
constexpr u32 kStageBytes = kXBytes + 2 * kHalfBytes, kPanelBytes = kGroupRows * kTileDepth * 2;
constexpr u32 kWarpsOfCluster = 2 * 8;  // that multiply

// With kGated a tile's matrix rows are 128 gates and their 128 up rows, and it gives 128 activations.
template <bool kGated>
struct Shape {
    static constexpr u32 kColumns = kGated ? kTileColumns / 2 : kTileColumns;  // of the results
    static constexpr u32 kPanels = kColumns / kTileDepth;
    static constexpr u32 kStages = kGated ? kGatedStages : kPlainStages;
    static constexpr u32 kBars = kStages * kStageBytes + 2 * kPanels * kPanelBytes;
    static_assert(1024 + kBars + 16 * kStages <= kProductSharedBytes, "shared memory");
};

struct Tile {
    u32 pair, column, lane;  // pair of row tiles, tile of columns

    __device__ __forceinline__ Tile(const KogProductParams& params, u32 index)
        : pair(index % params.num_pairs), column(index / params.num_pairs % params.num_columns),
          lane(index / (params.num_pairs * params.num_columns)) {}
};

template <bool kGated>
__device__ __forceinline__ void queue_copies(const KogProductParams& params, u32 stages, u32 bars) {
    constexpr u32 kStages = Shape<kGated>::kStages;
    const TensorMap* x = reinterpret_cast<const TensorMap*>(params.x_map);
    const TensorMap* matrix = reinterpret_cast<const TensorMap*>(params.matrix_map);
    const u32 rank = cluster_rank();
    u32 stage = 0, parity = 1;
    for (u32 index = blockIdx.x / 2; index < params.num_tiles; index += gridDim.x / 2) {
        const Tile tile(params, index);
        const u32 row = (2 * tile.pair + rank) * kTileRows;
        const u32 matrix_row = tile.column * Shape<kGated>::kColumns + rank * params.half_offset;
        for (u32 step = 0; step < params.num_steps; ++step) {
            const u32 full = bars + 16 * stage, to = stages + stage * kStageBytes;
            mbar_wait(full + 8, parity);
            mbar_arrive_expect(full, kStageBytes);
            tensor_load(to, x, step * kTileDepth, row, tile.lane, full);
            tensor_load_shared(to + kXBytes + rank * kHalfBytes, matrix, step * kTileDepth, matrix_row, tile.lane, full, 3);
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ float gated(float gate, float up, float scale) {
    const float g = gate * scale;
    return __fdividef(g, 1.0f + __expf(-g)) * (up * scale);
}

// Rows `row` and `row` + 8 of this thread: activations instead of gates.
__device__ __forceinline__ void apply_gates(const KogProductParams& params, float (&d)[128], u32 lane, u32 row) {
    const float* inverse_rms = reinterpret_cast<const float*>(params.inverse_rms_ptr) + static_cast<u64>(lane) * params.size;
    const float above = row < params.num_rows ? inverse_rms[row] : 0.0f, below = row + 8 < params.num_rows ? inverse_rms[row + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i] = gated(d[i], d[i + 64], i & 2 ? below : above);
}

template <bool kGated>
__device__ __forceinline__ void multiply_tiles(const KogProductParams& params, u32 stages, u32 bars, u32 group) {
    using S = Shape<kGated>;
    const u32 thread = threadIdx.x % 128, warp = thread / 32, own_rank = cluster_rank();
    const u32 panels = stages + S::kStages * kStageBytes + group * S::kPanels * kPanelBytes;
    const u32 matrix_in_stage = kXBytes, x_in_stage = group * kGroupRows * kTileDepth * 2;
    const u32 panel_row = warp * 16 + (laneid() & 15), swizzle = laneid() & 7, right = laneid() >> 4;
    u32 stage = 0, parity = 0;
    float d[128];
    for (u32 index = blockIdx.x / 2; index < params.num_tiles; index += gridDim.x / 2) {
        const Tile tile(params, index);
        u32 before = 0;
        for (u32 step = 0; step < params.num_steps; ++step) {
            const u32 full = bars + 16 * stage, from = stages + stage * kStageBytes;
            mbar_wait(full, parity);
            __syncwarp();
            if (step == 0) settle(d);
            products_begin();
            const u64 x = operand_at(from + x_in_stage), matrix = operand_at(from + matrix_in_stage);
#pragma unroll
            for (u32 k = 0; k < kTileDepth / 16; ++k) multiply_64x256x16(d, x + 2 * k, matrix + 2 * k, step + k > 0);
            products_commit();
            products_wait<1>();
            if (step > 0 && laneid() < 2) mbar_arrive_at(bars + 16 * before + 8, laneid());
            before = stage;
            if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
        products_wait<0>();
        settle(d);
        if (laneid() < 2) mbar_arrive_at(bars + 16 * before + 8, laneid());

        const u32 row = (2 * tile.pair + own_rank) * kTileRows + group * kGroupRows;
        if (kGated) apply_gates(params, d, tile.lane, row + warp * 16 + laneid() / 4);
        if (thread == 0) stores_have_read();  // the panels are free again
        group_sync(1 + group);
#pragma unroll
        for (u32 q = 0; q < S::kColumns / 16; ++q) {  // 16 columns
            const u32 at = panels + q / 4 * kPanelBytes + panel_row * 128 + (((2 * q + right) % 8 ^ swizzle) << 4);
            store_matrices(at, Fp16::pack(d[8 * q], d[8 * q + 1]), Fp16::pack(d[8 * q + 2], d[8 * q + 3]),
                           Fp16::pack(d[8 * q + 4], d[8 * q + 5]), Fp16::pack(d[8 * q + 6], d[8 * q + 7]));
        }
        fence_to_copies();
        group_sync(1 + group);
        if (thread == 0) {
            const TensorMap* out = reinterpret_cast<const TensorMap*>(params.out_map);
            for (u32 panel = 0; panel < S::kPanels; ++panel)
                tensor_store(out, tile.column * S::kColumns + panel * kTileDepth, row, tile.lane, panels + panel * kPanelBytes);
            stores_commit();
        }
    }
    if (thread == 0) stores_have_ended();
}

template <bool kGated>
__device__ __forceinline__ void run(const KogProductParams& params) {
    extern __shared__ unsigned char memory[];
    const u32 stages = (shared_address(memory) + 1023) & ~1023u, bars = stages + Shape<kGated>::kBars;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < Shape<kGated>::kStages; ++stage) {
            mbar_init(bars + 16 * stage, 1);
            mbar_init(bars + 16 * stage + 8, kWarpsOfCluster);
        }
        fence_barrier_init();
    }
    cluster_sync();
    const u32 group = threadIdx.x / 128;
    if (group == 0) {
        drop_registers<24>();
        if (threadIdx.x == 0) queue_copies<kGated>(params, stages, bars);
    } else {
        raise_registers<240>();
        multiply_tiles<kGated>(params, stages, bars, group - 1);
    }
    __syncwarp();
    cluster_sync();  // the other one may still send here
}

struct alignas(64) Launch {  // as tensor maps want it
    KogProductParams params;
};

}  // namespace kog

extern "C" {

__global__ void __cluster_dims__(2) __launch_bounds__(384, 1) product(const __grid_constant__ kog::Launch launch) {
    kog::run<false>(launch.params);
}
__global__ void __cluster_dims__(2) __launch_bounds__(384, 1) gated_product(const __grid_constant__ kog::Launch launch) {
    kog::run<true>(launch.params);
}

}  // extern "C"
