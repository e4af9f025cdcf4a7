// Matrix products of a block of tokens, lane by lane: out (size x columns) = x (size x depth) times the transposed matrix, binary16,
// summed in float32 in one order whatever the size: a row has the same bits in every block and on any number of ranks.
//
// Large blocks: a tile of 128 x 256 results belongs to a thread block, and two of them below each other to a cluster of two, which
// share what they read of the matrix. Two warp groups multiply 64 rows each, and a thread behind them queues copies into a ring of
// stages. `full` counts bytes of a stage; `empty` counts the warps of both thread blocks that have done with it, since either
// one's copies go into both. Tiles are taken in turn until none is left; results leave while the next tile is multiplied.
// Small blocks wait for the matrix to be read: tiles of 128 x 128, one for each thread block, two of which fit on a multiprocessor.
#include "hopper.cuh"
#include "order.cuh"
#include "product_shape.cuh"

namespace kog {

constexpr u32 kTileRows = 128, kTileDepth = 64, kGroupRows = 64, kRowBytes = kTileDepth * 2;
constexpr u32 kXBytes = kTileRows * kRowBytes, kPanelBytes = kGroupRows * kRowBytes;

// With kGated half of a tile's matrix rows are gates, the others their up rows, and it gives half as many activations.
template <bool kGated, bool kLarge>
struct Shape {
    static constexpr u32 kCtas = kLarge ? 2 : 1;  // of a cluster
    static constexpr u32 kMatrixRows = kLarge ? 256 : 128, kHalfBytes = kMatrixRows / 2 * kRowBytes;
    static constexpr u32 kStageBytes = kXBytes + 2 * kHalfBytes;
    static constexpr u32 kColumns = kGated ? kMatrixRows / 2 : kMatrixRows, kPanels = kColumns / kTileDepth;  // of the results
    static constexpr u32 kStages = kLarge && kGated ? 4 : 3;
    static constexpr u32 kPanelsFrom = kLarge ? kStages * kStageBytes : 0;  // a small tile is the last one, and needs no stages then
    static constexpr u32 kBars = kStages * kStageBytes + (kLarge ? 2 * kPanels * kPanelBytes : 0);
    static_assert(1024 + kBars + 16 * kStages <= (kLarge ? kLargeSharedBytes : kSmallSharedBytes), "shared memory");
};

struct Tile {
    u32 band, column, lane;  // row tiles of a cluster, tile of columns

    __device__ __forceinline__ Tile(const KogProductParams& params, u32 index)
        : band(index % params.num_bands), column(index / params.num_bands % params.num_columns),
          lane(index / (params.num_bands * params.num_columns)) {}
};

template <class S>
__device__ __forceinline__ void queue_copies(const KogProductParams& params, u32 stages, u32 bars) {
    const TensorMap* x = reinterpret_cast<const TensorMap*>(params.x_map);
    const TensorMap* matrix = reinterpret_cast<const TensorMap*>(params.matrix_map);
    const u32 rank = S::kCtas > 1 ? cluster_rank() : 0;
    u32 stage = 0, parity = 1;
    for (u32 index = blockIdx.x / S::kCtas; index < params.num_tiles; index += gridDim.x / S::kCtas) {
        const Tile tile(params, index);
        const u32 row = (S::kCtas * tile.band + rank) * kTileRows, matrix_row = tile.column * S::kColumns;
        for (u32 step = 0; step < params.num_steps; ++step) {
            const u32 full = bars + 16 * stage, to = stages + stage * S::kStageBytes, depth = step * kTileDepth;
            mbar_wait(full + 8, parity);
            mbar_arrive_expect(full, S::kStageBytes);
            tensor_load(to, x, depth, row, tile.lane, full);
            if (S::kCtas > 1) {
                tensor_load_shared(to + kXBytes + rank * S::kHalfBytes, matrix, depth, matrix_row + rank * params.half_offset, tile.lane,
                                   full, 3);
            } else {
                tensor_load(to + kXBytes, matrix, depth, matrix_row, tile.lane, full);
                tensor_load(to + kXBytes + S::kHalfBytes, matrix, depth, matrix_row + params.half_offset, tile.lane, full);
            }
            if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ float gated(float gate, float up, float scale) {
    const float g = gate * scale;
    return __fdividef(g, 1.0f + __expf(-g)) * (up * scale);
}

// Rows `row` and `row` + 8 of this thread: activations instead of gates.
template <int kCount>
__device__ __forceinline__ void apply_gates(const KogProductParams& params, float (&d)[kCount], u32 lane, u32 row) {
    const float* inverse_rms = reinterpret_cast<const float*>(params.inverse_rms_ptr) + static_cast<u64>(lane) * params.size;
    const float above = row < params.num_rows ? inverse_rms[row] : 0.0f, below = row + 8 < params.num_rows ? inverse_rms[row + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) d[i] = gated(d[i], d[i + kCount / 2], i & 2 ? below : above);
}

template <class S, bool kGated>
__device__ __forceinline__ void multiply_tiles(const KogProductParams& params, u32 stages, u32 bars, u32 group) {
    const u32 thread = threadIdx.x % 128, warp = thread / 32, rank = S::kCtas > 1 ? cluster_rank() : 0;
    const u32 panels = stages + S::kPanelsFrom + group * S::kPanels * kPanelBytes;
    const u32 panel_row = warp * 16 + (laneid() & 15), swizzle = laneid() & 7, right = laneid() >> 4;
    u32 stage = 0, parity = 0;
    float d[S::kMatrixRows / 2];
    for (u32 index = blockIdx.x / S::kCtas; index < params.num_tiles; index += gridDim.x / S::kCtas) {
        const Tile tile(params, index);
        u32 before = 0;
        for (u32 step = 0; step < params.num_steps; ++step) {
            const u32 full = bars + 16 * stage, from = stages + stage * S::kStageBytes;
            mbar_wait(full, parity);
            __syncwarp();
            if (step == 0) settle(d);
            products_begin();
            const u64 x = operand_at(from + group * kGroupRows * kRowBytes), matrix = operand_at(from + kXBytes);
#pragma unroll
            for (u32 k = 0; k < kTileDepth / 16; ++k) multiply(d, x + 2 * k, matrix + 2 * k, step + k > 0);
            products_commit();
            products_wait<1>();
            if (step > 0 && laneid() < S::kCtas) mbar_arrive_at(bars + 16 * before + 8, laneid());
            before = stage;
            if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
        products_wait<0>();
        settle(d);
        if (laneid() < S::kCtas) mbar_arrive_at(bars + 16 * before + 8, laneid());

        const u32 row = (S::kCtas * tile.band + rank) * kTileRows + group * kGroupRows;
        if (kGated) apply_gates(params, d, tile.lane, row + warp * 16 + laneid() / 4);
        if (S::kPanelsFrom > 0) {
            if (thread == 0) stores_have_read();  // the panels are free again
            group_sync(1 + group);
        } else {
            group_sync(3, 256);  // neither group reads stages any more
        }
#pragma unroll
        for (u32 q = 0; q < S::kColumns / 16; ++q) {  // 16 columns
            const u32 at = panels + q / 4 * kPanelBytes + panel_row * kRowBytes + (((2 * q + right) % 8 ^ swizzle) << 4);
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

template <bool kGated, bool kLarge>
__device__ __forceinline__ void run(const KogProductParams& params) {
    using S = Shape<kGated, kLarge>;
    extern __shared__ unsigned char memory[];
    const u32 stages = (shared_address(memory) + 1023) & ~1023u, bars = stages + S::kBars;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < S::kStages; ++stage) {
            mbar_init(bars + 16 * stage, 1);
            mbar_init(bars + 16 * stage + 8, 8 * S::kCtas);  // warps that multiply
        }
        fence_barrier_init();
    }
    cluster_sync();
    let_next_begin();
    await_previous();
    const u32 group = threadIdx.x / 128;
    if (group < 2) {
        if (kLarge) raise_registers<240>();
        multiply_tiles<S, kGated>(params, stages, bars, group);
    } else {
        if (kLarge) drop_registers<24>();
        if (threadIdx.x == 256) queue_copies<S>(params, stages, bars);
    }
    __syncwarp();
    cluster_sync();  // the other one may still send here
}

struct alignas(64) Launch {  // as tensor maps want it
    KogProductParams params;
};

}  // namespace kog

#define KOG_PRODUCT(name, gated)                                                                                       \
    __global__ void __cluster_dims__(2) __launch_bounds__(kog::kLargeThreads, 1) name(const __grid_constant__ kog::Launch launch) {       \
        kog::run<gated, true>(launch.params);                                                                          \
    }                                                                                                                  \
    __global__ void __launch_bounds__(kog::kSmallThreads, 2) small_##name(const __grid_constant__ kog::Launch launch) {               \
        kog::run<gated, false>(launch.params);                                                                         \
    }

extern "C" {

KOG_PRODUCT(product, false)
KOG_PRODUCT(gated_product, true)

}  // extern "C"
