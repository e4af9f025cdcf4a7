// The operations of prefill of a model with one residual stream that are no matrix products and no attention, fused so that each value is
// read and written as rarely as can be: they are bounded by memory. `workers/prefill/dense/operations.py` defines them; the names are the
// same. The stream is float32, what is multiplied binary16.
#include "ptx.cuh"
#include "dense_shape.cuh"
#include "cache_place.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "rope.cuh"
#include "unit.cuh"

namespace kog {

using Params = KogDenseParams;
constexpr u32 kUnits = kHidden / kUnit, kFfnUnits = kFfn / kUnit;
constexpr u32 kTurns = (kUnits + kRowThreads - 1) / kRowThreads;  // units of a row that a thread has
// Fours of queries, keys, values; behind them of gates, which gates.cu reads.
constexpr u32 kAppendedFours = (kHeads + 2 * kKvHeads) * kHeadDim / 4, kLaneFours = kAppendedFours + (kGated ? kHeads * kHeadDim / 4 : 0);
constexpr u32 kRowFours = kLanes * kLaneFours;
constexpr u32 kQueryFours = kHeads * kHeadDim / 4, kKeyFours = kKvHeads * kHeadDim / 4;  // of a lane

// A row of the stream as the threads of a thread block have it.
struct Row {
    Unit units[kTurns];

    // x of this row = its norm times the weights of the norm that comes next, if any. Called by all threads of a thread block.
    __device__ __forceinline__ void store_norm(const Params& params, u32 row) const {
        if (!params.norm_ptr) return;
        __shared__ float sums[kRowThreads / 32];
        float squares = 0;
#pragma unroll
        for (u32 turn = 0; turn < kTurns; ++turn) squares += square_sum(units[turn]);  // those behind the row are 0
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) squares += __shfl_xor_sync(kFullWarp, squares, offset);
        if (laneid() == 0) sums[threadIdx.x / 32] = squares;
        __syncthreads();
        float sum = 0;
        for (u32 warp = 0; warp < kRowThreads / 32; ++warp) sum += sums[warp];
        const float inverse_rms = 1.0f / sqrtf(sum * (1.0f / kHidden) + kNormEps);
        uint4* x = reinterpret_cast<uint4*>(params.x_ptr) + row * kUnits;
        const float* weights = reinterpret_cast<const float*>(params.norm_ptr);
#pragma unroll
        for (u32 turn = 0; turn < kTurns; ++turn) {
            const u32 unit = turn * kRowThreads + threadIdx.x;
            const bool is_mine = unit < kUnits;
            const Unit weight = float_unit(weights + (is_mine ? unit : 0) * kUnit);
            Unit normed;
#pragma unroll
            for (int k = 0; k < kUnit; ++k) normed.v[k] = units[turn].v[k] * inverse_rms * weight.v[k];
            const uint4 rounded = narrowed(normed);
            if (params.is_ordered) {  // of all four threads that have a group of 32 columns, or of none
                const uint4 ordered = in_order_of_products(rounded);
                if (is_mine) x[unit / 4 * 4 + place_of_pair(unit % 4)] = ordered;
                continue;
            }
            if (is_mine) x[unit] = rounded;
            if (!params.left_ptr || !is_mine) continue;
            const Unit kept = widened(rounded);
#pragma unroll
            for (int k = 0; k < kUnit; ++k) normed.v[k] -= kept.v[k];
            reinterpret_cast<uint4*>(params.left_ptr)[row * kUnits + unit] = narrowed(normed);
        }
    }
};

__device__ __forceinline__ void embed_row(const Params& params) {
    const u32 row = blockIdx.x;
    const int position = *reinterpret_cast<const int*>(params.place_ptr) + static_cast<int>(row);
    const bool is_padding = position > *reinterpret_cast<const int*>(params.last_position_ptr);
    const u32 token = reinterpret_cast<const u32*>(params.prompt_ptr)[position];
    const uint4* words = reinterpret_cast<const uint4*>(params.embedding_ptr) + static_cast<u64>(token) * kUnits;
    float* stream = reinterpret_cast<float*>(params.stream_ptr) + row * kHidden;
    Row h{};
#pragma unroll
    for (u32 turn = 0; turn < kTurns; ++turn) {
        const u32 unit = turn * kRowThreads + threadIdx.x;
        if (unit >= kUnits) break;
        if (!is_padding) h.units[turn] = widened_as<WeightFormat>(words[unit]);
        store_unit(stream + unit * kUnit, h.units[turn]);
    }
    h.store_norm(params, row);
}

// Unit `unit` of the sum over the hosted lanes of a row's partial sums. All are asked for at once.
__device__ __forceinline__ Unit lanes_sum(const Params& params, u32 row, u32 unit) {
    const uint4* partials = reinterpret_cast<const uint4*>(params.partial_ptr) + row * kUnits + unit;
    uint4 held[kLanes];
#pragma unroll
    for (u32 lane = 0; lane < kLanes; ++lane) held[lane] = __ldg(partials + static_cast<u64>(lane) * params.size * kUnits);
    Unit bias{};
    if (params.bias_ptr) bias = float_unit(reinterpret_cast<const float*>(params.bias_ptr) + unit * kUnit);
    LaneTree<kLanes> tree;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
        Unit partial = widened(held[lane]);
#pragma unroll
        for (int k = 0; k < kUnit; ++k)
            if (lane == 0) partial.v[k] += bias.v[k];
        tree.add(lane, partial);
    }
    return tree.sum;
}

__device__ __forceinline__ void sum_row(const Params& params) {
    const u32 row = blockIdx.x;
    float* own_sum = reinterpret_cast<float*>(params.own_sum_ptr) + row * kHidden;
    for (u32 unit = threadIdx.x; unit < kUnits; unit += kRowThreads) {
        Unit sum = lanes_sum(params, row, unit);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) sum.v[k] *= params.scale;
        store_unit(own_sum + unit * kUnit, sum);
    }
}

template <bool kIsAlone>
__device__ __forceinline__ void residual_row(const Params& params) {
    const u32 row = blockIdx.x;
    float* stream = reinterpret_cast<float*>(params.stream_ptr) + row * kHidden;
    const float* total = reinterpret_cast<const float*>(params.total_ptr) + row * kHidden;
    Row h{};
#pragma unroll
    for (u32 turn = 0; turn < kTurns; ++turn) {
        const u32 unit = turn * kRowThreads + threadIdx.x;
        if (unit >= kUnits) break;
        Unit& value = h.units[turn] = float_unit(stream + unit * kUnit);
        const Unit added = kIsAlone ? lanes_sum(params, row, unit) : float_unit(total + unit * kUnit);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) value.v[k] += kIsAlone ? added.v[k] * params.scale : added.v[k];
        store_unit(stream + unit * kUnit, value);
    }
    h.store_norm(params, row);
}

// Where heads are normed, as many neighbouring threads as a head has fours add their squares: all go through the loop to its end.
constexpr u32 kHeadThreads = kHeadDim / 4;
static_assert(!kQkNorm || ((32 % kHeadThreads == 0 || kHeadThreads == 64) && kHeadDim % 4 == 0), "a head's values are those of threads of one warp, or of two");
__device__ __forceinline__ float4 normed_head(const float4& value, const float4& weights) {
    float squares = value.x * value.x + value.y * value.y + value.z * value.z + value.w * value.w;
#pragma unroll
    for (u32 offset = 1; offset < kHeadThreads && offset < 32; offset *= 2) squares += __shfl_xor_sync(kFullWarp, squares, offset);
    if constexpr (kHeadThreads > 32) {
        __shared__ float of_warps[kMaxThreads / 32];
        const u32 warp = threadIdx.x / 32;
        if (laneid() == 0) of_warps[warp] = squares;
        __syncthreads();
        squares = of_warps[warp] + of_warps[warp ^ 1];
        __syncthreads();
    }
    const float scale = 1.0f / sqrtf(squares * (1.0f / kHeadDim) + kNormEps);
    return {value.x * scale * weights.x, value.y * scale * weights.y, value.z * scale * weights.z, value.w * scale * weights.w};
}

// Queries, keys and values of kAppendRows rows; a thread has two pairs of each row, `at` of the fours of a row.
struct Appended {
    const Params& params;
    u32 start;  // position of the chunk's first row

    __device__ __forceinline__ bool store(float4 value, u32 at, u32 row, bool is_mine) const {
        const u32 lane = at / kLaneFours, of_lane = at % kLaneFours, position = start + row;
        const bool is_query = of_lane < kQueryFours, is_rotated = of_lane < kQueryFours + kKeyFours;
        if constexpr (kQkvBias) {
            const float4 bias = __ldg(&reinterpret_cast<const float4*>(params.qkv_bias_ptr)[at]);
            value = {value.x + bias.x, value.y + bias.y, value.z + bias.z, value.w + bias.w};
        }
        if constexpr (kQkNorm) {
            const float4* norms = reinterpret_cast<const float4*>(params.head_norms_ptr) + (is_query ? 0 : kHeadThreads);
            const float4 normed = normed_head(value, __ldg(&norms[of_lane % kHeadThreads]));
            if (is_rotated) value = normed;
        }
        if (!kKvCoded && !is_mine) return true;
        if (is_rotated && (kRotaryDim == kHeadDim || of_lane % (kHeadDim / 4) < kRotaryDim / 4)) {
            const u32 turn = position < kMaxContext ? position : kMaxContext - 1;
            value = turned(value, __ldg(&reinterpret_cast<const float4*>(params.rope_ptr)[static_cast<u64>(turn) * (kRotaryDim / 4) + of_lane % (kHeadDim / 4)]));
        }
        uint2 half = {Fp16::pack(value.x, value.y), Fp16::pack(value.z, value.w)};
        [[maybe_unused]] const bool was_finite = is_finite_pair(half.x) && is_finite_pair(half.y);  // the largest code is
        if constexpr (kKvCoded) {
            const u32 thread = of_lane % kHeadThreads;  // of the head: all threads are still here
            const uint2 kept = kept_four<kHeadThreads>(encode_four<kHeadThreads>(value, is_rotated, thread), is_rotated, thread);
            if (!is_mine) return true;
            if (!is_query) half = kept;
        }
        if (is_query) {
            reinterpret_cast<uint2*>(params.query_ptr)[(static_cast<u64>(row) * kLanes + lane) * kQueryFours + of_lane] = half;
        } else if (kGated && of_lane >= kAppendedFours) {
            return true;
        } else {
            if constexpr (!kKvCoded) half = as_half({KvFormat::pack(value.x, value.y), KvFormat::pack(value.z, value.w)});
            const u32 of_kind = of_lane - (is_rotated ? kQueryFours : kQueryFours + kKeyFours);
            uint2* kept = reinterpret_cast<uint2*>(is_rotated ? params.keys_ptr : params.values_ptr);
            kept[(static_cast<u64>(position) * kLanes + lane) * kKeyFours + of_kind] = half;
        }
        return kKvCoded ? was_finite : is_finite_pair(half.x) && is_finite_pair(half.y);
    }
};

// The first thread blocks have rows of the chunk; the others bring the keys and values of the positions before it from the cache.
__device__ __forceinline__ void append_rows(const Params& params) {
    const u32 start = *reinterpret_cast<const int*>(params.place_ptr);
    bool finite = true;
    if (blockIdx.x >= params.num_row_ctas) {
        const u32 thread = (blockIdx.x - params.num_row_ctas) * blockDim.x + threadIdx.x;
        const CachedItems before{cache_of(params.cache_ptr, params.cache_number_ptr), params.layer, 0, start, reach_of(params.layer)};
        finite = load_items(before, params.keys_ptr, params.values_ptr, thread, (gridDim.x - params.num_row_ctas) * blockDim.x);
    } else {
        const Appended appended{params, start};
        const float4* qkv = reinterpret_cast<const float4*>(params.qkv_ptr);
        const u32 first_row = blockIdx.x * kAppendRows;
        for (u32 first = 0; first < kRowFours; first += blockDim.x) {
            const u32 next = first + threadIdx.x;
            const bool is_mine = next < kRowFours;
            const u32 at = is_mine ? next : kRowFours - 1;
            float4 values[kAppendRows];
#pragma unroll
            for (u32 r = 0; r < kAppendRows; ++r)
                values[r] = __ldg(&qkv[static_cast<u64>(first_row + r < params.size ? first_row + r : first_row) * kRowFours + at]);
#pragma unroll
            for (u32 r = 0; r < kAppendRows; ++r) {
                if (first_row + r >= params.size) break;
                finite = appended.store(values[r], at, first_row + r, is_mine) && finite;
            }
        }
    }
    if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
}

__device__ __forceinline__ void store_rows(const Params& params) {
    if (*reinterpret_cast<const int*>(params.overflow_ptr)) return;
    const int start = *reinterpret_cast<const int*>(params.place_ptr), last = *reinterpret_cast<const int*>(params.last_position_ptr);
    const int behind = start + static_cast<int>(params.size), end = behind <= last ? behind : last + 1;
    const CachedItems items{cache_of(params.cache_ptr, params.cache_number_ptr), params.layer, static_cast<u32>(start), static_cast<u32>(end), capacity_of(params.layer)};
    store_items(items, params.keys_ptr, params.values_ptr, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// The last rows first: of what the product has just written, the end is in the L2 cache.
__device__ __forceinline__ void swiglu_rows(const Params& params) {
    for (u32 n = blockIdx.x; n < params.size; n += gridDim.x) {
        const u32 row = params.size - 1 - n;
        const uint4* gate_up = reinterpret_cast<const uint4*>(params.gate_up_ptr) + static_cast<u64>(row) * (kLanes * 2 * kFfnUnits);
        uint4* activation = reinterpret_cast<uint4*>(params.activation_ptr) + static_cast<u64>(row) * (kLanes * kFfnUnits);
        for (u32 unit = threadIdx.x; unit < kLanes * kFfnUnits; unit += blockDim.x) {
            const u32 gate_at = unit + unit / kFfnUnits * kFfnUnits;
            const Unit gate = widened(__ldg(&gate_up[gate_at])), up = widened(__ldg(&gate_up[gate_at + kFfnUnits]));
            Unit result;
#pragma unroll
            for (int k = 0; k < kUnit; ++k)
                result.v[k] = __fdividef(gate.v[k], 1.0f + __expf(-gate.v[k])) * (up.v[k] * kActivationScale);
            activation[unit] = narrowed(result);
        }
    }
}

// One thread block.
__device__ __forceinline__ void take_row(const Params& params) {
    const int position = *reinterpret_cast<const int*>(params.last_position_ptr);
    const u32 row = position - *reinterpret_cast<const int*>(params.place_ptr);
    const float* stream = reinterpret_cast<const float*>(params.stream_ptr) + static_cast<u64>(row) * kHidden;
    float* last_stream = reinterpret_cast<float*>(params.last_stream_ptr);
    for (u32 i = threadIdx.x; i < kHidden; i += blockDim.x) last_stream[i] = stream[i];
    const uint2* query = reinterpret_cast<const uint2*>(params.query_ptr) + static_cast<u64>(row) * (kLanes * kQueryFours);
    uint2* last_query = reinterpret_cast<uint2*>(params.last_query_ptr);
    for (u32 i = threadIdx.x; i < kLanes * kQueryFours; i += blockDim.x) last_query[i] = query[i];
    if (threadIdx.x) return;
    int* place = reinterpret_cast<int*>(params.last_place_ptr);
    place[0] = position, place[2] = position + 1;
}

// One thread block.
__device__ __forceinline__ void give_row(const Params& params) {
    const float* stream = reinterpret_cast<const float*>(params.stream_ptr);
    float* to = reinterpret_cast<float*>(params.last_streams_ptr);
    bool finite = true;
    for (u32 i = threadIdx.x; i < kHidden; i += blockDim.x) {
        to[i] = stream[i];
        finite = finite && stream[i] - stream[i] == 0;
    }
    if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
}

}  // namespace kog

using namespace kog;

#define KOG_KERNEL(name, threads, body)                                                     \
    __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params params) { \
        await_predecessors();                                                               \
        let_successors_begin();                                                             \
        body(params);                                                                       \
    }

extern "C" {

__global__ void begin(const __grid_constant__ Params params) {
    int* place = reinterpret_cast<int*>(params.place_ptr);
    int* next_start = reinterpret_cast<int*>(params.next_start_ptr);
    const int start = *next_start, end = start + static_cast<int>(params.size);
    place[0] = start, place[2] = end, *next_start = end;
}

KOG_KERNEL(embed, kRowThreads, embed_row)
KOG_KERNEL(append, kMaxThreads, append_rows)
KOG_KERNEL(store, kMaxThreads, store_rows)
KOG_KERNEL(lane_sum, kRowThreads, sum_row)
KOG_KERNEL(residual, kRowThreads, residual_row<false>)
KOG_KERNEL(residual_alone, kRowThreads, residual_row<true>)
KOG_KERNEL(swiglu, kMaxThreads, swiglu_rows)
KOG_KERNEL(take_last, kMaxThreads, take_row)
KOG_KERNEL(give_stream, kMaxThreads, give_row)

}  // extern "C"
