// The FFN of a layer with experts: a choice for each row, pairs of rows and experts in the order of experts, products of each expert's pairs, and
// their sums.
// `workers/prefill/experts/plain.py` defines it.
#include "experts_shape.cuh"
#include "number_bits.cuh"
#include "tape_product.cuh"
#include "unit.cuh"

namespace kog {

using Params = KogExpertsParams;
constexpr u32 kLogits = (kNumExperts + 31) / 32;  // of a thread: experts laneid + 32 i
constexpr u32 kUnits = kHidden / kUnit;

struct alignas(64) ExpertsLaunch {  // as tensor maps want it
    Params params;
};

// The logits of a row, a warp's: the experts with the largest, of equal ones those with the smaller number, in ascending order.
__device__ __forceinline__ void choose_row(const Params& params) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = laneid();
    if (row >= params.size) return;
    const float* const logits = reinterpret_cast<const float*>(params.logits_ptr) + row * kNumExperts;
    u32 keys[kLogits];
#pragma unroll
    for (u32 i = 0; i < kLogits; ++i) {
        const u32 expert = i * 32 + lane;
        if (expert >= kNumExperts) {
            keys[i] = 0;
            continue;
        }
        float logit = logits[expert] + logits[params.size * kNumExperts + expert];
        if constexpr (kRouterBias) logit += reinterpret_cast<const float*>(params.router_bias_ptr)[expert];
        keys[i] = rising_key(logit);
    }
    float sum = 0;
    u32 numbers[kChosen], largest[kChosen];
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) {
        u32 most = 0, which = k;
#pragma unroll
        for (u32 i = 0; i < kLogits; ++i)
            if (keys[i] > most) most = keys[i], which = i * 32 + lane;
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            const u32 other = __shfl_xor_sync(kFullWarp, most, offset), number = __shfl_xor_sync(kFullWarp, which, offset);
            if (other > most || (other == most && number < which)) most = other, which = number;
        }
        numbers[k] = which, largest[k] = most;
        if (!kChoiceIsNormalised && k == 0) {
#pragma unroll
            for (u32 i = 0; i < kLogits; ++i)
                if (i * 32 + lane < kNumExperts) sum += __expf(value_of_key(keys[i]) - value_of_key(most));
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        }
#pragma unroll
        for (u32 i = 0; i < kLogits; ++i)
            if (which == i * 32 + lane) keys[i] = 0;
        if constexpr (kChoiceIsNormalised) sum += __expf(value_of_key(most) - value_of_key(largest[0]));
    }
    const int position = *reinterpret_cast<const int*>(params.place_ptr) + static_cast<int>(row);
    const bool is_padding = position > *reinterpret_cast<const int*>(params.last_position_ptr);
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) {
        if (lane != k) continue;
        u32 before = 0;
#pragma unroll
        for (u32 other = 0; other < kChosen; ++other) before += numbers[other] < numbers[k];
        reinterpret_cast<int*>(params.chosen_ptr)[row * kChosen + before] = is_padding ? -1 : static_cast<int>(numbers[k]);
        reinterpret_cast<float*>(params.weights_ptr)[row * kChosen + before] = __expf(value_of_key(largest[k]) - value_of_key(largest[0])) / sum;
    }
}

// A thread block for each expert: its pairs stand behind those of the experts before it, in the order of rows.
__device__ __forceinline__ void sort_expert(const Params& params) {
    __shared__ u32 before[kSortThreads / 32], own[kSortThreads / 32];
    const int* const chosen = reinterpret_cast<const int*>(params.chosen_ptr);
    const int expert = blockIdx.x;
    const u32 warp = threadIdx.x / 32, num_pairs = params.size * kChosen, of_warp = (num_pairs + kSortThreads - 1) / kSortThreads * 32;
    const u32 first = min(warp * of_warp, num_pairs), end = min(first + of_warp, num_pairs);
    u32 less = 0, mine = 0;
#pragma unroll 8
    for (u32 i = first + laneid(); i < end; i += 32) less += static_cast<u32>(chosen[i]) < blockIdx.x, mine += chosen[i] == expert;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1)
        less += __shfl_xor_sync(kFullWarp, less, offset), mine += __shfl_xor_sync(kFullWarp, mine, offset);
    if (laneid() == 0) before[warp] = less, own[warp] = mine;
    __syncthreads();
    u32 begin = 0, place = 0, all = 0;
    for (u32 i = 0; i < kSortThreads / 32; ++i) begin += before[i], place += i < warp ? own[i] : 0, all += own[i];
    if (threadIdx.x == 0) reinterpret_cast<u32*>(params.offsets_ptr)[expert] = begin;
    if (threadIdx.x == 0 && blockIdx.x + 1 == kNumExperts) reinterpret_cast<u32*>(params.offsets_ptr)[kNumExperts] = begin + all;
    if (own[warp] == 0) return;
    place += begin;
    for (u32 from = first; from < end; from += 32) {
        const u32 i = from + laneid();
        const bool is_mine = i < end && chosen[i] == expert;
        const u32 others = __ballot_sync(kFullWarp, is_mine);
        if (is_mine) reinterpret_cast<u32*>(params.places_ptr)[i] = place + __popc(others & ((1u << laneid()) - 1));
        place += __popc(others);
    }
}

// The row `row` of x for each of its pairs, in the order of products; a thread block's.
__device__ __forceinline__ void gather_row(const Params& params, u32 row) {
    if (reinterpret_cast<const int*>(params.chosen_ptr)[row * kChosen] < 0) return;
    u32 places[kChosen];
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) places[k] = reinterpret_cast<const u32*>(params.places_ptr)[row * kChosen + k];
    const u32* const x = reinterpret_cast<const u32*>(params.x_ptr) + row * (kHidden / 2);
    for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
        const u32* const from = x + unit / 4 * 16 + place_of_pair(unit % 4);  // `product_place` backwards
        const uint4 values = make_uint4(from[0], from[4], from[8], from[12]);
#pragma unroll
        for (u32 k = 0; k < kChosen; ++k) reinterpret_cast<uint4*>(params.operands_ptr)[static_cast<u64>(places[k]) * kUnits + unit] = values;
    }
}

// Tiles of pairs, a thread block's: an expert's have a common width, as small as its pairs allow, and wide ones come first. In front of them is
// their number.
struct PairsTile {
    u32 first;               // pair
    u16 expert;
    unsigned char last, end;  // pairs that are there, less one; and those that are multiplied, too
};
static_assert(sizeof(PairsTile) == 8, "rows.TILE_BYTES");
__device__ __forceinline__ void cut_pairs(const Params& params) {
    __shared__ u32 counts[kNumExperts], widths[kNumExperts];
    const u32* const offsets = reinterpret_cast<const u32*>(params.offsets_ptr);
    for (u32 e = threadIdx.x; e < kNumExperts; e += blockDim.x) {
        const u32 pairs = offsets[e + 1] - offsets[e], count = (pairs + params.tile_rows - 1) / params.tile_rows;
        counts[e] = count;
        widths[e] = count ? ((pairs + count - 1) / count + params.least - 1) / params.least * params.least : 0;
    }
    __syncthreads();
    PairsTile* const tiles = reinterpret_cast<PairsTile*>(params.tiles_ptr) + 1;
    for (u32 e = threadIdx.x; e < kNumExperts; e += blockDim.x) {
        u32 before = 0;
        for (u32 other = 0; other < kNumExperts; ++other)
            before += widths[other] > widths[e] || (widths[other] == widths[e] && other < e) ? counts[other] : 0;
        for (u32 i = 0; i < counts[e]; ++i) {
            const u32 first = offsets[e] + i * widths[e], count = min(offsets[e + 1] - first, widths[e]);
            tiles[before + i] = {first, static_cast<u16>(e), static_cast<unsigned char>(count - 1), static_cast<unsigned char>(widths[e] - 1)};
        }
    }
    if (threadIdx.x == 0) {
        u32 all = 0;
        for (u32 e = 0; e < kNumExperts; ++e) all += counts[e];
        *reinterpret_cast<u32*>(params.tiles_ptr) = all;
    }
}

__device__ __forceinline__ float activation_of(float gate, float up) {
    if constexpr (!kClamps) return __fdividef(gate, 1.0f + __expf(-gate)) * (up * kActivationScale);
    gate = fminf(gate, kClampLimit), up = fminf(fmaxf(up, -kClampLimit), kClampLimit);
    return __fdividef(gate, 1.0f + __expf(-kClampAlpha * gate)) * ((up + 1.0f) * kActivationScale);
}

// Columns in front of the lane's own, of a group of quantised weights that the lane before has, too: their codes are 0.
__device__ __forceinline__ u32 skew(const Params& params, u32 lane) { return kExpertSkew == 0 ? 0 : (params.first_lane + lane) * kExpertSkew % 32; }

// Of an expert's pairs `count` from `first` on; `width` are multiplied. `product`: lane.
struct PairsShare {
    u32 first, count, room, width, line, product, expert;
};
// Neighbouring pairs of tiles have the same pairs of rows and experts. What others of this chunk have written is not read by `__ldg`: the compiler
// takes that for constant, and moves it in front of the wait for them.
template <class Form, u32 kProducts>
struct OfExperts {
    using Params = KogExpertsParams;
    using Share = PairsShare;
    static constexpr bool kAwaitsTiles = true;
    template <class Tile>
    static __device__ __forceinline__ u32 num_pairs(const Params& params) {
        return *reinterpret_cast<const u32*>(params.tiles_ptr) * kProducts * TileLines<Tile, Form>::kPairsAcross;
    }
    template <class Tile>
    static __device__ __forceinline__ PairsShare share(const Params& params, u32 pair) {
        constexpr u32 kAcross = TileLines<Tile, Form>::kPairsAcross, kOfTile = kProducts * kAcross;
        const uint2 words = *(reinterpret_cast<const uint2*>(params.tiles_ptr) + 1 + pair / kOfTile);  // a PairsTile
        const u32 count = (words.y >> 16 & 0xff) + 1, width = (words.y >> 24) + 1, at = pair % kOfTile;
        return {words.x, count, count, width, (at % kAcross * kPair + blockIdx.x % kPair) * Tile::kLines, at / kAcross, words.y & 0xffff};
    }
    static __device__ __forceinline__ const TensorMap* rows_map(const Params& params) { return reinterpret_cast<const TensorMap*>(params.rows_map); }
    static __device__ __forceinline__ u32 lane_of_rows(const PairsShare& share) { return share.product; }
    static __device__ __forceinline__ constexpr float factor(const Params&, const Share&, u32) { return 1.0f / kWeightScale; }
    static __device__ __forceinline__ const unsigned char* expert(const Params& params, const Share& share) {
        return reinterpret_cast<const unsigned char*>(params.experts_ptr) + static_cast<u64>(share.expert) * kExpertBytes;
    }
    template <class Tile>
    static __device__ __forceinline__ void clear_from(const Params&, const Share&, u32) {}
};

// Those of all hosted lanes are below each other.
struct Gated : OfExperts<GateUp, 1>, GatedRows<GateUp> {
    static constexpr u32 kWidth = kHidden;
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share) { return expert(params, share); }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile) {
        [[maybe_unused]] float gate_bias = 0, up_bias = 0;
        const u32 own = tile.row_at(gate_of(laneid() / 4) * 2);  // this thread's gate
        if (kExpertBias && own != kNowhere) {
            const u32 pair = reinterpret_cast<const u32*>(tile.params.gate_up_bias_ptr)[(tile.share.expert * GateUp::kMatrixRows + own) / 2];
            gate_bias = WeightFormat::low(pair), up_bias = WeightFormat::high(pair);
        }
        GatedRows<GateUp>::put(
            tile, [&](float gate, float up) { return activation_of(gate + gate_bias, up + up_bias); },
            [&](u32 pair, u32 gate) {
                const u32 lane = gate / 2 / kFfn, column = skew(tile.params, lane) + gate / 2 % kFfn;
                return reinterpret_cast<u16*>(tile.params.activation_ptr) + (static_cast<u64>(tile.share.first + pair) * kLanes + lane) * kPadded +
                       product_place(column / 2) * 2 + column % 2;
            });
    }
};

// A product is a lane's.
struct Lowered : OfExperts<Down, kLanes>, PlainRows<Down> {
    static constexpr u32 kWidth = kDownColumns;
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share) {
        return expert(params, share) + kGateUpBytes + share.product * kDownBytes;
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile) {
        PlainRows<Down>::put(tile, [&](u32 pair) {
            return reinterpret_cast<u16*>(tile.params.result_ptr) + (static_cast<u64>(tile.share.first + pair) * kLanes + tile.share.product) * kHidden;
        });
    }
};

// The sum of a row's experts in each lane, a thread block's.
__device__ __forceinline__ void combine_row(const Params& params) {
    const u32 row = blockIdx.x;
    u32 places[kChosen];
    float weights[kChosen];
    int chosen[kChosen];
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) {
        chosen[k] = reinterpret_cast<const int*>(params.chosen_ptr)[row * kChosen + k];
        places[k] = reinterpret_cast<const u32*>(params.places_ptr)[row * kChosen + k];
        weights[k] = reinterpret_cast<const float*>(params.weights_ptr)[row * kChosen + k];
    }
    const uint4* const results = reinterpret_cast<const uint4*>(params.result_ptr);
    const uint4* const biases = reinterpret_cast<const uint4*>(params.down_bias_ptr);
    for (u32 i = threadIdx.x; i < kLanes * kUnits; i += blockDim.x) {
        const u32 lane = i / kUnits, unit = i % kUnits;
        Unit sum{};
        if (chosen[0] >= 0) {
            uint4 held[kChosen];
#pragma unroll
            for (u32 k = 0; k < kChosen; ++k) held[k] = __ldg(results + (static_cast<u64>(places[k]) * kLanes + lane) * kUnits + unit);
#pragma unroll
            for (u32 k = 0; k < kChosen; ++k) {
                const Unit given = widened(held[k]);
                [[maybe_unused]] Unit bias{};
                if (kExpertBias && biases && lane == 0) bias = widened_as<WeightFormat>(__ldg(biases + static_cast<u64>(chosen[k]) * kUnits + unit));
#pragma unroll
                for (int j = 0; j < kUnit; ++j) sum.v[j] += weights[k] * (given.v[j] + bias.v[j] * kActivationScale);
            }
        }
        reinterpret_cast<uint4*>(params.partial_ptr)[(static_cast<u64>(lane) * params.size + row) * kUnits + unit] = narrowed(sum);
    }
}

}  // namespace kog

using namespace kog;

#define KOG_KERNEL(name, bounds, body)                                                              \
    __global__ void __launch_bounds__ bounds name(const __grid_constant__ ExpertsLaunch launch) { \
        const Params& params = launch.params;                                                        \
        await_predecessors();                                                                        \
        let_successors_begin();                                                                      \
        body;                                                                                        \
    }
#define KOG_PRODUCT(name, form, tail, rows)                                                                          \
    __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Tile##rows::kThreads + kGroupThreads, Tile##rows::kCtas) \
        name##_##rows(const __grid_constant__ ExpertsLaunch launch) {                                            \
        run_tiles<Tile##rows, form, tail>(launch.params);                                                         \
    }
#define KOG_TILE(rows)                       \
    KOG_PRODUCT(gate_up, GateUp, Gated, rows) \
    KOG_PRODUCT(down, Down, Lowered, rows)

extern "C" {

KOG_KERNEL(choose, (256), choose_row(params))
KOG_KERNEL(sort, (kSortThreads), sort_expert(params))
KOG_KERNEL(gather, (256), if (blockIdx.x == 0) cut_pairs(params); else gather_row(params, blockIdx.x - 1))
KOG_KERNEL(combine, (256), combine_row(params))
KOG_TILES

}  // extern "C"
