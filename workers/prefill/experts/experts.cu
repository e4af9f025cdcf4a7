// The FFN of a layer with experts: a choice for each row, pairs of rows and experts in the order of experts, grouped products, and their sums.
// `workers/prefill/experts/plain.py` defines it.
#include "experts_shape.cuh"
#include "number_bits.cuh"
#include "expert_product.cuh"
#include "unit.cuh"

namespace kog {

using Params = KogExpertsParams;
constexpr u32 kLogits = (kNumExperts + 31) / 32;  // of a thread: experts laneid + 32 i
constexpr u32 kUnits = kHidden / kUnit;
static_assert(kNumExperts <= kTileThreads, "a thread looks at each expert");

// A row of x in the order of products, a warp's.
__device__ __forceinline__ void order_row(const Params& params, u32 row) {
    const u32 *from = reinterpret_cast<const u32*>(params.x_ptr) + row * (kHidden / 2);
    u32* to = reinterpret_cast<u32*>(params.operands_ptr) + row * (kHidden / 2);
#pragma unroll 4
    for (u32 pair = laneid(); pair < kHidden / 2; pair += 32) to[product_place(pair)] = __ldg(from + pair);
}

// The logits of a row, a warp's: the experts with the largest, of equal ones those with the smaller number, in ascending order.
__device__ __forceinline__ void choose_row(const Params& params) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = laneid();
    if (row >= params.size) return;
    order_row(params, row);
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
        if (is_mine) {
            const u32 at = place + __popc(others & ((1u << laneid()) - 1));
            reinterpret_cast<u32*>(params.places_ptr)[i] = at;
            reinterpret_cast<u32*>(params.pair_rows_ptr)[at] = i / kChosen;
        }
        place += __popc(others);
    }
}

__device__ __forceinline__ float activation_of(float gate, float up) {
    if constexpr (!kClamps) return __fdividef(gate, 1.0f + __expf(-gate)) * (up * kActivationScale);
    gate = fminf(gate, kClampLimit), up = fminf(fmaxf(up, -kClampLimit), kClampLimit);
    return __fdividef(gate, 1.0f + __expf(-kClampAlpha * gate)) * ((up + 1.0f) * kActivationScale);
}

// Columns in front of the lane's own, of a group of quantised weights that the lane before has, too: their codes are 0.
__device__ __forceinline__ u32 skew(const Params& params, u32 lane) { return kExpertSkew == 0 ? 0 : (params.first_lane + lane) * kExpertSkew % 32; }

// What a thread block has of a launch. Pairs lie in the order of experts, and which those of an expert are is only known on the device: there
// are as many thread blocks as could be needed, and those without pairs leave at once.
struct PairsShare {
    u32 expert, first, count, room, block;
};
// None: `count` is 0. Barriers are made, too.
template <class Tile, class Form>
__device__ __forceinline__ PairsShare find_share(const Params& params) {
    __shared__ u32 found[3];
    const u32 slot = blockIdx.x / WholeBlocks<Form>::kAcross, block = blockIdx.x % WholeBlocks<Form>::kAcross * WholeBlocks<Form>::kOfTile;
    if (threadIdx.x == 0) {
        found[2] = 0;
        make_barriers<Tile>();
    }
    __syncthreads();
    if (threadIdx.x < kNumExperts) {  // tiles of expert e begin at slot floor(its first pair / rows) + e: there is room for all
        const u32 e = threadIdx.x;
        const u32 begin = reinterpret_cast<const u32*>(params.offsets_ptr)[e], end = reinterpret_cast<const u32*>(params.offsets_ptr)[e + 1];
        const u32 from = begin / Tile::kRows + e, pair = begin + (slot - from) * Tile::kRows;
        if (slot >= from && slot <= end / Tile::kRows + e && pair < end) found[0] = e, found[1] = pair, found[2] = min(end - pair, Tile::kRows);
    }
    __syncthreads();
    return {found[0], found[1], found[2], found[2], block};
}
struct OfExperts {
    using Params = KogExpertsParams;
    using Share = PairsShare;
    static __device__ __forceinline__ constexpr float factor(const Params&, const Share&, u32) { return 1.0f / kWeightScale; }
    static __device__ __forceinline__ const unsigned char* expert(const Params& params, const Share& share) {
        return reinterpret_cast<const unsigned char*>(params.experts_ptr) + static_cast<u64>(share.expert) * kExpertBytes;
    }
};

// Those of all hosted lanes are below each other.
struct Gated : OfExperts, GatedRows<GateUp> {
    static constexpr u32 kLanesOfTile = 1, kWidth = kHidden, kColumnsOfLane = kHidden;
    static __device__ __forceinline__ u32 row_at(const Params& params, u32 pair) {
        return reinterpret_cast<const u32*>(params.pair_rows_ptr)[pair] * kHidden;
    }
    static __device__ __forceinline__ const u16* rows_from(const Params& params, const Share&, u32) { return reinterpret_cast<const u16*>(params.operands_ptr); }
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share, u32) { return expert(params, share); }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile, u32) {
        const u32 row = gate_row(tile.share.block);
        [[maybe_unused]] float gate_bias = 0, up_bias = 0;
        if (kExpertBias && row != kNowhere) {
            const u32 pair = reinterpret_cast<const u32*>(tile.params.gate_up_bias_ptr)[(tile.share.expert * GateUp::kMatrixRows + row) / 2];
            gate_bias = WeightFormat::low(pair), up_bias = WeightFormat::high(pair);
        }
        GatedRows<GateUp>::put(
            tile, [&](float gate, float up) { return activation_of(gate + gate_bias, up + up_bias); },
            [&](u32 pair, u32 row) {
                const u32 lane = row / 2 / kFfn, column = skew(tile.params, lane) + row / 2 % kFfn;
                return reinterpret_cast<u16*>(tile.params.activation_ptr) + (static_cast<u64>(tile.share.first + pair) * kLanes + lane) * kPadded +
                       product_place(column / 2) * 2 + column % 2;
            });
    }
};

// Of all lanes.
struct Lowered : OfExperts, PlainRows<Down> {
    static constexpr u32 kLanesOfTile = kLanes, kWidth = kPadded, kColumnsOfLane = kDownColumns;
    static __device__ __forceinline__ u32 row_at(const Params&, u32 pair) { return pair * (kLanes * kPadded); }
    static __device__ __forceinline__ const u16* rows_from(const Params& params, const Share&, u32 lane) {
        return reinterpret_cast<const u16*>(params.activation_ptr) + lane * kPadded;
    }
    static __device__ __forceinline__ const unsigned char* matrix(const Params& params, const Share& share, u32 lane) {
        return expert(params, share) + kGateUpBytes + lane * kDownBytes;
    }

    template <class Product>
    static __device__ __forceinline__ void put(const Product& tile, u32 lane) {
        PlainRows<Down>::put(tile, [&](u32 pair) {
            return reinterpret_cast<u16*>(tile.params.result_ptr) + (static_cast<u64>(tile.share.first + pair) * kLanes + lane) * kHidden;
        });
    }
};
template <class Tile, class Form, class Tail>
__device__ __forceinline__ void run_pairs(const Params& params) {
    const PairsShare share = find_share<Tile, Form>(params);
    if (share.count > 0) run_product<Tile, Form, Tail, (kLeastWidth < Tile::kRows ? kLeastWidth : Tile::kRows)>(params, share);
}

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

#define KOG_KERNEL(name, bounds, body)                                               \
    __global__ void __launch_bounds__ bounds name(const __grid_constant__ Params params) { \
        await_predecessors();                                                         \
        let_successors_begin();                                                       \
        body;                                                                         \
    }
#define KOG_TILE(rows)                                                                                             \
    KOG_KERNEL(gate_up_##rows, (kTileThreads, Tile##rows::kCtas), (run_pairs<Tile##rows, GateUp, Gated>(params))) \
    KOG_KERNEL(down_##rows, (kTileThreads, Tile##rows::kCtas), (run_pairs<Tile##rows, Down, Lowered>(params)))

extern "C" {

KOG_KERNEL(choose, (256), choose_row(params))
KOG_KERNEL(sort, (kSortThreads), sort_expert(params))
KOG_KERNEL(combine, (256), combine_row(params))
KOG_TILES

}  // extern "C"
