// The operations of prefill that are no matrix products and no attention, fused so that each value is read and written as rarely
// as can be: they are bounded by memory. operations.py beside it defines them; the names are the same. A thread takes kUnit
// neighbouring values of a row at a time (16 bytes); a thread block takes rows in turn. Activations are binary16, arithmetic is
// float32.
#include "prefill_units.cuh"
#include "cache_place.cuh"
#include "prefill_last_row.cuh"
#include "prefill_residual.cuh"
#include "rope.cuh"

using namespace kog;

extern "C" {

__global__ void begin(const __grid_constant__ KogPrefillParams params) {
    int* place = reinterpret_cast<int*>(params.place_ptr);
    int* next_start = reinterpret_cast<int*>(params.next_start_ptr);
    const int start = *next_start, end = start + static_cast<int>(params.size);
    place[0] = start, place[2] = end, *next_start = end;
}

}  // extern "C"

// Padding is 0: zeros draw less power.
template <bool kExact>
__device__ __forceinline__ void embed_rows(const KogPrefillParams& params) {
    using Values = Kept<kExact>;
    const u32 size = params.size;
    const u32* tokens = reinterpret_cast<const u32*>(params.prompt_ptr) + *reinterpret_cast<const int*>(params.place_ptr);
    uint4* stream = reinterpret_cast<uint4*>(params.stream_ptr);
    const Scales scales(params.scale_ptr);
    for (u32 row = blockIdx.x; row < size; row += gridDim.x) {
        const uint4* words = reinterpret_cast<const uint4*>(params.embedding_ptr) + static_cast<u64>(tokens[row]) * kUnits;
        const bool is_zero = is_padding(params, row);
        float squares[kLanes] = {};
        for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
            const uint4 w = is_zero ? uint4{} : words[unit];
            const Unit value = widened_as<WeightFormat>(w);
            const float sum = square_sum(value);
            Unit scaled{};
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if (kScales > 1 || lane == 0) {
                    scaled = value;
                    multiply(scaled, scales.unit(lane, unit));
                }
                squares[lane] += sum;
                if (lane < params.num_written)
                    Values::store(&stream[Values::at(lane, row, size, kUnits) + unit], static_cast<u64>(size) * kUnits, scaled);
            }
        }
        store_inverse_rms(squares, reinterpret_cast<float*>(params.inverse_rms_ptr), row, size);
    }
}

// Neighbouring rows of a lane at a time, the last ones of the last lane first, as in swiglu_rows. A thread has two pairs of each row,
// of those from `first` to `last`: queries, keys and values, or some of them.
template <bool kExact>
__device__ __forceinline__ void append_rows(const KogPrefillParams& params) {
    constexpr u32 kCount = kLanePairs / 2, kQueries = kHeads * kPairs / 2, kKeys = kKvPairs / 2;  // two pairs each
    const u32 size = params.size, start = *reinterpret_cast<const int*>(params.place_ptr);
    const u32 num_groups = (size + kAppendRows - 1) / kAppendRows;
    let_successors_begin();
    const float* inverse_rms = reinterpret_cast<const float*>(params.inverse_rms_ptr);
    const float4* qkv = reinterpret_cast<const float4*>(params.qkv_ptr);
    const float4* rope = reinterpret_cast<const float4*>(params.rope_ptr);
    bool finite = true;
    for (u32 n = blockIdx.x; n < kLanes * num_groups; n += gridDim.x) {
        const u32 i = kLanes * num_groups - 1 - n, lane = i / num_groups, first_row = i % num_groups * kAppendRows;
        for (u32 at = params.first + threadIdx.x; at < params.last; at += blockDim.x) {
            float4 values[kAppendRows];
#pragma unroll
            for (int r = 0; r < kAppendRows; ++r) {
                const u32 row = first_row + r < size ? first_row + r : first_row;
                const u32 place = Kept<kExact>::at(lane, row, size, kCount) + at;
                values[r] = __ldg(&qkv[place]);
                if (!kExact) continue;
                const float4 rest = __ldg(&qkv[place + size * kCount]);
                values[r] = {values[r].x + rest.x, values[r].y + rest.y, values[r].z + rest.z, values[r].w + rest.w};
            }
#pragma unroll
            for (int r = 0; r < kAppendRows; ++r) {
                const u32 row = first_row + r, position = start + row;
                if (row >= size) break;
                const float scale = __ldg(&inverse_rms[lane * size + row]);
                float4 value = {values[r].x * scale, values[r].y * scale, values[r].z * scale, values[r].w * scale};
                if (at < kQueries + kKeys) {
                    const u32 turn = position < kMaxContext ? position : kMaxContext - 1;
                    value = turned(value, __ldg(&rope[static_cast<u64>(turn) * (kPairs / 2) + at % (kPairs / 2)]));
                }
                uint2 rounded;
                if (at < kQueries) {
                    rounded = {Fp16::pack(value.x, value.y), Fp16::pack(value.z, value.w)};
                    reinterpret_cast<uint2*>(params.query_ptr)[(static_cast<u64>(row) * kLanes + lane) * kQueries + at] = rounded;
                } else {
                    const u32 first = KvFormat::pack(value.x, value.y), second = KvFormat::pack(value.z, value.w);
                    rounded = {Fp16::pack(KvFormat::low(first), KvFormat::high(first)),
                               Fp16::pack(KvFormat::low(second), KvFormat::high(second))};
                    const bool is_key = at < kQueries + kKeys;
                    uint2* kept = reinterpret_cast<uint2*>(is_key ? params.keys_ptr : params.values_ptr);
                    kept[(static_cast<u64>(position) * kLanes + lane) * kKeys + at - (is_key ? kQueries : kQueries + kKeys)] = rounded;
                }
                finite = finite && is_finite_pair(rounded.x) && is_finite_pair(rounded.y);
            }
        }
    }
    if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
}

template <bool kExact>
__device__ __forceinline__ void sum_lanes(const KogPrefillParams& params) {
    using Values = Kept<kExact>;
    for (u32 row = blockIdx.x; row < params.size; row += gridDim.x) {
        float* own_sum = reinterpret_cast<float*>(params.own_sum_ptr) + static_cast<u64>(row) * kHidden;
        for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
            Lanes tree;
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane)
                tree.add(lane, Values::result(params.partial_ptr, Values::at(lane, row, params.size, kUnits) + unit,
                                              static_cast<u64>(params.size) * kUnits));
            store_unit(own_sum + unit * kUnit, tree.sum);
        }
    }
}

// The last row of the last lane first: of what the product has just written, the end is in the L2 cache, and the next product begins
// with what is written here at last.
template <bool kExact>
__device__ __forceinline__ void swiglu_rows(const KogPrefillParams& params) {
    using Values = Kept<kExact>;
    const u32 size = params.size;
    for (u32 n = blockIdx.x; n < kLanes * size; n += gridDim.x) {
        const u32 i = kLanes * size - 1 - n, lane = i / size, row = i % size;
        const float scale = reinterpret_cast<const float*>(params.inverse_rms_ptr)[i];
        const u64 gates = Values::at(lane, row, size, 2 * kFfnUnits), rest = static_cast<u64>(size) * kFfnUnits;
        uint4* activation = reinterpret_cast<uint4*>(params.activation_ptr) + Values::at(lane, row, size, kFfnUnits);
        for (u32 unit = threadIdx.x; unit < kFfnUnits; unit += blockDim.x) {
            const Unit gate = Values::result(params.gate_up_ptr, gates + unit, 2 * rest);
            const Unit up = Values::result(params.gate_up_ptr, gates + kFfnUnits + unit, 2 * rest);
            Unit result;
#pragma unroll
            for (int k = 0; k < kUnit; ++k) {
                const float g = gate.v[k] * scale;
                result.v[k] = __fdividef(g, 1.0f + __expf(-g)) * (up.v[k] * scale);
            }
            Values::store(&activation[unit], rest, result);
        }
    }
}

// Thread blocks of the same number for each layer.
struct LayerShare {
    u32 num_ctas = gridDim.x / kLayers, layer = blockIdx.x / num_ctas;
    u32 thread = blockIdx.x % num_ctas * blockDim.x + threadIdx.x, count = num_ctas * blockDim.x;
    u64 first_byte = static_cast<u64>(layer) * kPositions * kCachedHeads * kHeadDim * 2;
};
__device__ __forceinline__ void load_layer(const KogPrefillParams& params) {
    const LayerShare mine;
    const CachedItems items{cache_of(params.cache_ptr, params.cache_number_ptr), mine.layer, params.first, params.last, capacity_of(mine.layer)};
    if (!load_items(items, params.keys_ptr + mine.first_byte, params.values_ptr + mine.first_byte, mine.thread, mine.count))
        *reinterpret_cast<int*>(params.overflow_ptr) = 1;
}
__device__ __forceinline__ void store_layer(const KogPrefillParams& params) {
    if (*reinterpret_cast<const int*>(params.overflow_ptr)) return;
    const LayerShare mine;
    const CachedItems items{cache_of(params.cache_ptr, params.cache_number_ptr), mine.layer, params.first, params.last, capacity_of(mine.layer)};
    store_items(items, params.keys_ptr + mine.first_byte, params.values_ptr + mine.first_byte, mine.thread, mine.count);
}

#define KOG_KERNEL(name, threads, body) \
    __global__ void __launch_bounds__ threads name(const __grid_constant__ KogPrefillParams params) { \
        await_predecessors();                                                                         \
        body(params);                                                                                 \
    }
#define KOG_KERNELS(name, other, threads, body) \
    KOG_KERNEL(name, threads, body<false>)      \
    KOG_KERNEL(other, threads, body<true>)
#define KOG_RESIDUAL(name, mode, ctas)                                                              \
    KOG_KERNEL(name, (kRowThreads, ctas), (residual_row<mode, Form::kPlain>))                      \
    KOG_KERNEL(name##_split, (kRowThreads), (residual_row<mode, Form::kSplit>))                    \
    KOG_KERNEL(name##_exact, (kRowThreads), (residual_row<mode, Form::kExact>))

extern "C" {

KOG_KERNELS(embed, embed_split, (kRowThreads), embed_rows)
KOG_KERNELS(append, append_split, (kMaxThreads, 1), append_rows)
KOG_KERNELS(lane_sum, lane_sum_exact, (kRowThreads), sum_lanes)
KOG_KERNELS(swiglu, swiglu_exact, (kMaxThreads), swiglu_rows)
KOG_RESIDUAL(residual_blocking, Mode::kBlocking, 2)
KOG_RESIDUAL(residual_blocking_alone, Mode::kBlockingAlone, 2)
KOG_RESIDUAL(residual_delayed, Mode::kDelayed, kHoldsLanes ? 1 : 2)
KOG_RESIDUAL(residual_delayed_alone, Mode::kDelayedAlone, kHoldsLanes ? 1 : 2)
KOG_RESIDUAL(residual_local, Mode::kLocal, kHoldsLanes ? 1 : 2)

KOG_KERNEL(load_cache, (kMaxThreads), load_layer)
KOG_KERNEL(store_cache, (kMaxThreads), store_layer)
KOG_KERNEL(take_last, (kRowThreads), take_row<Form::kPlain>)
KOG_KERNEL(take_last_split, (kRowThreads), take_row<Form::kSplit>)
KOG_KERNEL(take_last_exact, (kRowThreads), take_row<Form::kExact>)
KOG_KERNEL(give_streams, (kRowThreads), give_row)

}  // extern "C"
