// Products of the rows of a chunk with a layer's quantised matrices where the monokernel has them: queries, keys and values; what attention's
// output gives; gates and ups with the activation; what `down` gives. Rows are in the order of products (weights.cuh). Rows behind the prompt's
// last token have results of 0, and activations that nobody reads.
#include "tape_shape.cuh"
#include "tape_product.cuh"

namespace kog {

struct alignas(64) TapeLaunch {  // as tensor maps want it
    KogTapeParams params;
};

// A tile of a launch. A pair of thread blocks, a cluster, takes two at a time, of the same rows and neighbouring parts of a matrix. Pairs that
// come one behind the other have the same parts, but for those that have the last rows: they may take less time, and come last. `width`: rows
// that are multiplied.
struct RowsShare {
    u32 first, count, room, width, line, product;
};
template <class Form>
struct OfLayers {
    using Params = KogTapeParams;
    using Share = RowsShare;
    static constexpr bool kAwaitsTiles = false;
    template <class Tile>
    static __device__ __forceinline__ u32 num_pairs(const Params& params) { return params.num_pairs; }
    template <class Tile>
    static __device__ __forceinline__ RowsShare share(const Params& params, u32 pair) {
        constexpr u32 kAcross = TileLines<Tile, Form>::kPairsAcross;
        const u32 rows = params.tile_rows, num_others = (params.size - 1) / rows, last_from = kAcross * params.products * num_others;
        const bool is_last = pair >= last_from;
        const u32 tile = (is_last ? pair - last_from : pair / num_others) * kPair + blockIdx.x % kPair;
        const u32 first = (is_last ? num_others : pair % num_others) * rows, room = min(params.size - first, rows);
        const int num_known = *reinterpret_cast<const int*>(params.last_position_ptr) + 1 - *reinterpret_cast<const int*>(params.place_ptr);
        const u32 count = max(min(num_known - static_cast<int>(first), static_cast<int>(room)), 0);
        const u32 width = is_last ? (count + Tile::kLeast - 1) / Tile::kLeast * Tile::kLeast : rows;
        return {first, count, room, width, tile % (kAcross * kPair) * Tile::kLines, tile / (kAcross * kPair)};
    }
    static __device__ __forceinline__ const TensorMap* rows_map(const Params& params) { return reinterpret_cast<const TensorMap*>(params.rows_map); }
    static __device__ __forceinline__ u32 lane_of_rows(const Share&) { return 0; }
    static __device__ __forceinline__ u64 place(const Params& params, const Share& share, u32 which) {
        return __ldg(reinterpret_cast<const u64*>(params.places_ptr) + 2 * share.product + which);
    }
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share) {
        return reinterpret_cast<const unsigned char*>(params.tape_ptr) + place(params, share, 0);
    }
    static __device__ __forceinline__ float factor(const Params& params, const Share& share, u32 row) {
        if constexpr (kScales > 0) return 1.0f / kWeightScale;
        const u32 line = share.line + row, block = line / Form::kRows;
        if (line >= Lines<Form>::kAll) return 0;
        const u64 cta = place(params, share, 1) * Form::kCtas + block / Form::kBlocks;
        return __ldg(reinterpret_cast<const float*>(params.scales_ptr) + cta * kScaleRows + block % Form::kBlocks * Form::kRows + line % Form::kRows);
    }
    static __device__ __forceinline__ u16* binary16(u64 address) { return reinterpret_cast<u16*>(address); }
};

// Results of rows from `from` on, of all rows of the matrix that the tile has, are 0. `to`: where those of a row begin.
template <class Tile, class Form, class To>
__device__ __forceinline__ void clear(const RowsShare& share, u32 from, To to) {
    const u32 row = Lines<Form>::row_at(share.line + threadIdx.x % Tile::kLines);
    if (row == kNowhere) return;
    for (u32 i = from + threadIdx.x / Tile::kLines; i < share.room; i += Tile::kThreads / Tile::kLines) to(i)[row] = 0;
}

// Float32, a row for each row.
struct Projected : OfLayers<Qkv> {
    static constexpr u32 kWidth = kHidden;
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return threadIdx.x / 32 * 16 + which * 8 + laneid() / 4; }
    static __device__ __forceinline__ float* results(const Params& params, const Share& share, u32 row) {
        return reinterpret_cast<float*>(params.out_ptr) + static_cast<u64>(share.first + row) * kQkvRows + share.product * Qkv::kMatrixRows;
    }
    template <class Tile>
    static __device__ __forceinline__ void clear_from(const Params& params, const Share& share, u32 from) {
        clear<Tile, Qkv>(share, from, [&](u32 row) { return results(params, share, row); });
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile) {
        u32 rows[2];
        float factors[2];
#pragma unroll
        for (u32 k = 0; k < 2; ++k) rows[k] = tile.row_at(row_of_operand(k)), factors[k] = tile.factor(k);
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
    template <class Tile>
    static __device__ __forceinline__ void clear_from(const KogTapeParams& params, const RowsShare& share, u32 from) {
        clear<Tile, Form>(share, from, [&](u32 row) { return results(params, share, row); });
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile) {
        PlainRows<Form>::put(tile, [&](u32 row) { return results(tile.params, tile.share, row); });
    }
};
struct Mixed : Partial<Out> {
    static constexpr u32 kWidth = kMixedColumns;
};
struct Lowered : Partial<Down> {
    static constexpr u32 kWidth = kFfn;
};
struct Gated : OfLayers<GateUp>, GatedRows<GateUp> {
    static constexpr u32 kWidth = kHidden;
    static __device__ __forceinline__ u16* result(const Params& params, const Share& share, u32 row, u32 gate) {
        const u32 column = (share.product * GateUp::kMatrixRows + gate) / 2;  // of those of all lanes
        return binary16(params.out_ptr) + static_cast<u64>(share.first + row) * (kLanes * kFfn) + product_place(column / 2) * 2 + column % 2;
    }
    static __device__ __forceinline__ float activation(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * (up * kActivationScale); }
    template <class Tile>
    static __device__ __forceinline__ void clear_from(const Params&, const Share&, u32) {}

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile) {
        GatedRows<GateUp>::put(tile, activation, [&](u32 row, u32 gate) { return result(tile.params, tile.share, row, gate); });
    }
};

}  // namespace kog

using namespace kog;

#define KOG_KERNEL(name, form, tail, rows)                                                                                              \
    __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Tile##rows::kThreads + kGroupThreads, Tile##rows::kCtas)             \
        name##_##rows(const __grid_constant__ TapeLaunch launch) {                                                                   \
        run_tiles<Tile##rows, form, tail>(launch.params);                                                                                   \
    }
#define KOG_TILE(rows)                       \
    KOG_KERNEL(qkv, Qkv, Projected, rows)    \
    KOG_KERNEL(out, Out, Mixed, rows)        \
    KOG_KERNEL(gate_up, GateUp, Gated, rows) \
    KOG_KERNEL(down, Down, Lowered, rows)

extern "C" {

KOG_TILES

}  // extern "C"
