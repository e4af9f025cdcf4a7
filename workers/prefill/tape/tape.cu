// Products of the rows of a chunk with a layer's quantised matrices where the monokernel has them, for chunks of few rows, which wait for weights:
// queries, keys and values; what attention's output gives; gates and ups with the activation; what `down` gives. Rows are in the order of
// products (weights.cuh). Rows behind the prompt's last token are not multiplied: their results are 0, and their activations nobody reads.
#include "tape_shape.cuh"
#include "pdl.cuh"
#include "tape_product.cuh"

namespace kog {

struct alignas(64) TapeLaunch {  // as tensor maps want it
    KogTapeParams params;
};

// What a thread block has of a launch. A pair of thread blocks, a cluster, has the same rows and neighbouring parts of a matrix; neighbouring
// pairs have the same parts.
struct RowsShare {
    u32 first, count, room, block, product;
};
template <class Tile, class Form>
__device__ __forceinline__ RowsShare find_share(const KogTapeParams& params) {
    constexpr u32 kAcross = (Blocks<Form>::kAcross + kPair - 1) / kPair * kPair;
    const u32 num_row_tiles = (params.size + Tile::kRows - 1) / Tile::kRows, pair = blockIdx.x / kPair;
    const u32 tile = pair / num_row_tiles * kPair + blockIdx.x % kPair;
    const u32 first = pair % num_row_tiles * Tile::kRows, room = min(params.size - first, Tile::kRows);
    const int num_known = *reinterpret_cast<const int*>(params.last_position_ptr) + 1 - *reinterpret_cast<const int*>(params.place_ptr);
    const int count = max(min(num_known - static_cast<int>(first), static_cast<int>(room)), 0);
    return {first, static_cast<u32>(count), room, tile % kAcross * Blocks<Form>::kOfTile, tile / kAcross};
}

template <class Form>
struct OfLayers {
    using Params = KogTapeParams;
    using Share = RowsShare;
    static constexpr u32 kLanesOfTile = 1;
    static constexpr bool kIsPaired = true;
    static __device__ __forceinline__ const TensorMap* rows_map(const Params& params) { return reinterpret_cast<const TensorMap*>(params.rows_map); }
    static __device__ __forceinline__ u32 lane_of_rows(const Share&) { return 0; }
    static __device__ __forceinline__ u32 row_at(const Params&, u32) { return 0; }  // they are copied by the map
    static __device__ __forceinline__ const u16* rows_from(const Params&, const Share&, u32) { return nullptr; }
    static __device__ __forceinline__ void await_rows() { await_predecessors(); }
    static __device__ __forceinline__ u64 place(const Params& params, const Share& share, u32 which) {
        return __ldg(reinterpret_cast<const u64*>(params.places_ptr) + 2 * share.product + which);
    }
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share, u32) {
        return reinterpret_cast<const unsigned char*>(params.tape_ptr) + place(params, share, 0);
    }
    static __device__ __forceinline__ float factor(const Params& params, const Share& share, u32 row) {
        if constexpr (kScales > 0) return 1.0f / kWeightScale;
        const u32 block = share.block + row / Form::kRows;
        if (row >= Blocks<Form>::kTileRows || block >= Blocks<Form>::kAll) return 0;
        const u64 cta = place(params, share, 1) * Form::kCtas + block / Form::kBlocks;
        return __ldg(reinterpret_cast<const float*>(params.scales_ptr) + cta * kScaleRows + block % Form::kBlocks * Form::kRows + row % Form::kRows);
    }
    static __device__ __forceinline__ u16* binary16(u64 address) { return reinterpret_cast<u16*>(address); }
};

// Results of rows from `from` on, of all rows of the matrix that the tile has, are 0. `to`: where those of a row begin.
template <class Form, class To>
__device__ __forceinline__ void clear(const RowsShare& share, u32 from, To to) {
    const u32 row = Blocks<Form>::row_at(share.block, threadIdx.x % kColumns);
    if (row == kNowhere) return;
    for (u32 i = from + threadIdx.x / kColumns; i < share.room; i += kTileThreads / kColumns) to(i)[row] = 0;
}

// Float32, a row for each row.
struct Projected : OfLayers<Qkv> {
    using Parts = Blocks<Qkv>;
    static constexpr u32 kWidth = kHidden, kColumnsOfLane = kHidden;
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return threadIdx.x / 32 * 16 + which * 8 + laneid() / 4; }
    static __device__ __forceinline__ float* results(const Params& params, const Share& share, u32 row) {
        return reinterpret_cast<float*>(params.out_ptr) + static_cast<u64>(share.first + row) * kQkvRows + share.product * Qkv::kMatrixRows;
    }
    static __device__ __forceinline__ void clear_from(const Params& params, const Share& share, u32 from) {
        clear<Qkv>(share, from, [&](u32 row) { return results(params, share, row); });
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile, u32) {
        u32 rows[2];
        float factors[2];
#pragma unroll
        for (u32 k = 0; k < 2; ++k) rows[k] = Parts::row_at(tile.share.block, row_of_operand(k)), factors[k] = tile.factor(k);
#pragma unroll
        for (u32 i = 0; i < sizeof(tile.sums) / sizeof(float); ++i) {
            const u32 row = i / 4 * 8 + laneid() % 4 * 2 + i % 2, k = i / 2 % 2;
            if (row < tile.share.room && rows[k] != kNowhere)
                results(tile.params, tile.share, row)[rows[k]] = row < tile.share.count ? tile.sums[i] * factors[k] : 0.0f;
        }
    }
};

// A product is a lane's: the partial sums of the stream.
template <class Form>
struct Partial : OfLayers<Form>, PlainRows<Form> {
    static __device__ __forceinline__ u32 lane_of_rows(const RowsShare& share) { return share.product; }
    static __device__ __forceinline__ u16* results(const KogTapeParams& params, const RowsShare& share, u32 row) {
        return reinterpret_cast<u16*>(params.out_ptr) + (static_cast<u64>(share.product) * params.size + share.first + row) * kHidden;
    }
    static __device__ __forceinline__ void clear_from(const KogTapeParams& params, const RowsShare& share, u32 from) {
        clear<Form>(share, from, [&](u32 row) { return results(params, share, row); });
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile, u32) {
        PlainRows<Form>::put(tile, [&](u32 row) { return results(tile.params, tile.share, row); });
    }
};
struct Mixed : Partial<Out> {
    static constexpr u32 kWidth = kMixedColumns, kColumnsOfLane = kMixedColumns;
};
struct Lowered : Partial<Down> {
    static constexpr u32 kWidth = kFfn, kColumnsOfLane = kFfn;
};
struct Gated : OfLayers<GateUp>, GatedRows<GateUp> {
    static constexpr u32 kWidth = kHidden, kColumnsOfLane = kHidden;
    static __device__ __forceinline__ void clear_from(const Params&, const Share&, u32) {}

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile, u32) {
        GatedRows<GateUp>::put(
            tile, [](float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * (up * kActivationScale); },
            [&](u32 row, u32 gate) {
                const u32 column = (tile.share.product * GateUp::kMatrixRows + gate) / 2;  // of those of all lanes
                return binary16(tile.params.out_ptr) + static_cast<u64>(tile.share.first + row) * (kLanes * kFfn) + product_place(column / 2) * 2 + column % 2;
            });
    }
};

template <class Tile, class Form, class Tail>
__device__ __forceinline__ void run_rows(const KogTapeParams& params) {
    let_successors_begin();
    const RowsShare share = find_share<Tile, Form>(params);
    if (share.count == 0) {  // so it is in both of a pair
        await_predecessors();
        return Tail::clear_from(params, share, 0);
    }
    if (threadIdx.x == 0) make_barriers<Tile, true>();
    __syncthreads();
    cluster_sync();
    run_product<Tile, Form, Tail, Tile::kLeast>(params, share);
    Tail::clear_from(params, share, max(Tile::kLeast, (share.count + kLeastWidth - 1) / kLeastWidth * kLeastWidth));
    cluster_sync();  // nobody leaves whose barriers the other one tells
}

}  // namespace kog

using namespace kog;

#define KOG_KERNEL(name, form, tail, rows)                                                                                              \
    __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kTileThreads, Tile##rows::kCtas)                                     \
        name##_##rows(const __grid_constant__ TapeLaunch launch) {                                                                   \
        run_rows<Tile##rows, form, tail>(launch.params);                                                                                    \
    }
#define KOG_TILE(rows)                       \
    KOG_KERNEL(qkv, Qkv, Projected, rows)    \
    KOG_KERNEL(out, Out, Mixed, rows)        \
    KOG_KERNEL(gate_up, GateUp, Gated, rows) \
    KOG_KERNEL(down, Down, Lowered, rows)

extern "C" {

KOG_TILES

}  // extern "C"
