// The operations of prefill that are no matrix products and no attention, fused so that each value is read and written as rarely
// as can be: they are bounded by memory. `workers/prefill/operations.py` defines them; the names are the same. A thread takes
// kUnit neighbouring values of a row at a time (16 bytes); a thread block takes rows in turn. Activations are binary16, arithmetic is
// float32.
#include "ptx.cuh"
#include "dependent.cuh"
#include "prefill_shape.cuh"
#include "turned.cuh"

namespace kog {

constexpr int kUnits = kHidden / kUnit, kFfnUnits = kFfn / kUnit;
constexpr int kPairs = kHeadDim / 2;                     // of one head
constexpr int kLanePairs = (kHeads + 2 * kKvHeads) * kPairs;  // queries, keys, values of a lane
constexpr int kKvPairs = kKvHeads * kPairs;
constexpr int kBatchBytes = 2 * kBatch * kHeadDim * 2;
static_assert(kPairs % 2 == 0, "a thread takes two pairs of a head");
static_assert(kUnit == 8 && kHidden % kUnit == 0 && kFfn % kUnit == 0, "a unit is 16 bytes");

struct Unit {
    float v[kUnit];
};
__device__ __forceinline__ Unit widened(const uint4& packed) {
    return {{Fp16::low(packed.x), Fp16::high(packed.x), Fp16::low(packed.y), Fp16::high(packed.y), Fp16::low(packed.z),
             Fp16::high(packed.z), Fp16::low(packed.w), Fp16::high(packed.w)}};
}
__device__ __forceinline__ uint4 narrowed(const Unit& unit) {
    return make_uint4(Fp16::pack(unit.v[0], unit.v[1]), Fp16::pack(unit.v[2], unit.v[3]), Fp16::pack(unit.v[4], unit.v[5]),
                      Fp16::pack(unit.v[6], unit.v[7]));
}
__device__ __forceinline__ Unit float_unit(const float* from) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
__device__ __forceinline__ void store_unit(float* to, const Unit& unit) {
    reinterpret_cast<float4*>(to)[0] = make_float4(unit.v[0], unit.v[1], unit.v[2], unit.v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(unit.v[4], unit.v[5], unit.v[6], unit.v[7]);
}
__device__ __forceinline__ float square_sum(const Unit& unit) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) sum += unit.v[k] * unit.v[k];
    return sum;
}
__device__ __forceinline__ void multiply(Unit& unit, const Unit& factors) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) unit.v[k] *= factors.v[k];
}
template <bool kFirst, class A, class B>
struct Choice {
    using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
    using Type = B;
};
struct HeldWords {
    uint4 words;
    __device__ __forceinline__ Unit unit() const { return widened(words); }
};
struct HeldUnit {
    Unit value;
    __device__ __forceinline__ Unit unit() const { return value; }
};
// How a block keeps a value. Exact ones have twice the rows: binary16 values that go into products and what rounding left of them,
// `size` rows later; and float32 results of both, to be added up.
template <bool kExact>
struct Kept {
    static constexpr u32 kPlanes = kExact ? 2 : 1;

    // First unit of a row of a lane, where a row has `units`. Blocks have less than 2^32 of them.
    static __device__ __forceinline__ u32 at(u32 lane, u32 row, u32 size, u32 units) {
        return (lane * kPlanes * size + row) * units;
    }
    // An operand of a product; `rest` is `size` rows in units.
    static __device__ __forceinline__ Unit operand(const uint4* from, u32 rest) {
        Unit value = widened(from[0]);
        if (kExact) add(value, widened(from[rest]));
        return value;
    }
    static __device__ __forceinline__ void store(uint4* to, u32 rest, const Unit& value) {
        const uint4 rounded = narrowed(value);
        to[0] = rounded;
        if (!kExact) return;
        Unit left = widened(rounded);
#pragma unroll
        for (int k = 0; k < kUnit; ++k) left.v[k] = value.v[k] - left.v[k];
        to[rest] = narrowed(left);
    }
    // A result of a product: unit `at` of binary16, or of float32. Nothing in the kernel writes there, so loads may go before stores.
    static __device__ __forceinline__ Unit result(u64 address, u32 at, u32 rest) {
        if (!kExact) return widened(__ldg(reinterpret_cast<const uint4*>(address) + at));
        const float4* from = reinterpret_cast<const float4*>(address) + 2 * at;
        const float4 a = __ldg(from), b = __ldg(from + 1), c = __ldg(from + 2 * rest), d = __ldg(from + 2 * rest + 1);
        return {{a.x + c.x, a.y + c.y, a.z + c.z, a.w + c.w, b.x + d.x, b.y + d.y, b.z + d.z, b.w + d.w}};
    }
    // The same, on its way from memory: packed as it stands there, or already added up.
    using Held = typename Choice<kExact, HeldUnit, HeldWords>::Type;
    static __device__ __forceinline__ Held held_operand(const uint4* from, u32 rest) {
        if constexpr (kExact) return {operand(from, rest)};
        else return {from[0]};
    }
    static __device__ __forceinline__ Held held_result(u64 address, u32 at, u32 rest) {
        if constexpr (kExact) return {result(address, at, rest)};
        else return {__ldg(reinterpret_cast<const uint4*>(address) + at)};
    }
    static __device__ __forceinline__ void add(Unit& value, const Unit& other) {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) value.v[k] += other.v[k];
    }
};
// Factors of the streams' columns: one vector for all lanes, or one for each.
struct Scales {
    const float* values;

    __device__ __forceinline__ explicit Scales(u64 address) : values(reinterpret_cast<const float*>(address)) {}
    __device__ __forceinline__ Unit unit(int lane, u32 at) const {
        return values ? float_unit(values + (kScales > 1 ? lane * kHidden : 0) + at * kUnit) : Unit{};
    }
};
// Binary tree over the lanes' partials, fed lane by lane in order.
struct LaneTree {
    Unit waiting[5];  // by level: a sum that waits for its neighbour
    Unit sum;         // after the last lane

    __device__ __forceinline__ void add(int lane, const Unit& partial) {  // `lane` is a constant in unrolled loops
        sum = partial;
#pragma unroll
        for (int level = 0; level < 5; ++level) {
            if (1 << level >= kLanes) break;
            if ((lane >> level & 1) == 0) {
                waiting[level] = sum;
                break;
            }
#pragma unroll
            for (int k = 0; k < kUnit; ++k) sum.v[k] = waiting[level].v[k] + sum.v[k];
        }
    }
};
static_assert(kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "lanes are a power of two");

constexpr bool kHoldsLanes = kLanes <= kHeldLanes;

// 1 / rms of a row in every lane from the threads' sums of squares. Called by all threads of a block, whole warps.
__device__ __forceinline__ void store_inverse_rms(float (&squares)[kLanes], float* inverse_rms, u32 row, u32 size) {
    __shared__ float sums[kRowThreads / 32][kLanes];
    const u32 warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) squares[lane] += __shfl_xor_sync(kFullWarp, squares[lane], offset);
        if (laneid() == 0) sums[warp][lane] = squares[lane];
    }
    __syncthreads();
    for (u32 lane = threadIdx.x; lane < kLanes; lane += blockDim.x) {
        float sum = 0;
        for (u32 i = 0; i < num_warps; ++i) sum += sums[i][lane];
        inverse_rms[lane * size + row] = 1.0f / sqrtf(sum * (1.0f / kHidden) + kNormEps);
    }
    __syncthreads();  // the next row's sums
}

__device__ __forceinline__ bool is_finite_pair(u32 packed) {
    return (packed & 0x7c00u) != 0x7c00u && (packed & 0x7c000000u) != 0x7c000000u;
}

// ...Alone: `partial` (blocking) or `past` (delayed) has all lanes of the model, to be added up here.
enum class Mode { kBlocking, kBlockingAlone, kDelayed, kDelayedAlone, kLocal };
enum class Form { kPlain, kSplit, kExact };  // kSplit: the streams have two planes, results of products one

// A thread has the same columns of all lanes of a row. What it reads of several lanes is asked for at once, as far as registers
// suffice: memory wants as much under way.
//
// kShared: the streams are the same in all lanes, and kept once; what a delayed or a local sum makes of them is written to all.
template <Mode kMode, Form kForm, bool kShared>
__device__ __forceinline__ void residual(const KogPrefillParams& params, u32 row) {
    constexpr bool kExact = kForm == Form::kExact;
    using Streams = Kept<kForm != Form::kPlain>;
    using Results = Kept<kExact>;
    constexpr bool kDelays = kMode == Mode::kDelayed || kMode == Mode::kDelayedAlone;
    constexpr bool kBlocks = kMode == Mode::kBlocking || kMode == Mode::kBlockingAlone;
    constexpr bool kHasTotal = kMode == Mode::kBlocking || kMode == Mode::kDelayed;
    constexpr bool kHoldsPasts = kDelays && !kExact && kHoldsLanes;
    constexpr int kMost = kExact ? 2 : kForm == Form::kSplit || kBlocks ? 4 : kHeldLanes, kAhead = kLanes < kMost ? kLanes : kMost;
    const u32 size = params.size;
    const u32 rest = size * kUnits;
    uint4* stream = reinterpret_cast<uint4*>(params.stream_ptr);
    const float* __restrict__ totals = reinterpret_cast<const float*>(params.total_ptr) + static_cast<u64>(row) * kHidden;
    float* own_sum = reinterpret_cast<float*>(params.own_sum_ptr);
    const Scales scales(params.unscale_ptr ? params.unscale_ptr : params.scale_ptr);
    const bool scales_input = params.unscale_ptr != 0, scales_output = params.scale_ptr != 0;
    float squares[kLanes] = {};
    for (u32 unit = threadIdx.x; unit < kUnits; unit += kRowThreads) {  // a constant: most models take one turn
        const auto stream_at = [&](int lane) { return Streams::at(lane, row, size, kUnits) + unit; };
        const auto result_at = [&](int lane) { return Results::at(lane, row, size, kUnits) + unit; };
        typename Streams::Held streams[kShared ? 1 : kAhead];
        typename Results::Held partials[kAhead], pasts[kHoldsPasts ? kLanes : 1];
        const auto load = [&](int lane) {
            if constexpr (!kShared) streams[lane % kAhead] = Streams::held_operand(stream + stream_at(lane), rest);
            if constexpr (!kBlocks) partials[lane % kAhead] = Results::held_result(params.partial_ptr, result_at(lane), rest);
        };
        Unit total{};
        LaneTree tree;
        if constexpr (kHoldsPasts) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) pasts[lane] = Results::held_result(params.past_ptr, result_at(lane), rest);
        }
        if constexpr (kShared) streams[0] = Streams::held_operand(stream + stream_at(0), rest);
#pragma unroll
        for (int lane = 0; lane < kAhead; ++lane) load(lane);
        if (kHasTotal) total = float_unit(totals + unit * kUnit);
        if constexpr (kMode == Mode::kDelayedAlone || kMode == Mode::kBlockingAlone) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if constexpr (kHoldsPasts) tree.add(lane, pasts[lane].unit());
                else tree.add(lane, Results::result(kDelays ? params.past_ptr : params.partial_ptr, result_at(lane), rest));
            }
            total = tree.sum;
        }
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
            Unit h = streams[kShared ? 0 : lane % kAhead].unit(), p{}, old{};
            if constexpr (!kBlocks) p = partials[lane % kAhead].unit();
            if (lane + kAhead < kLanes) load(lane + kAhead);  // before what this lane stores
            if (scales_input) multiply(h, scales.unit(lane, unit));
            if constexpr (kMode == Mode::kDelayed || kMode == Mode::kLocal) tree.add(lane, p);
            if constexpr (kHoldsPasts) old = pasts[lane].unit();
            else if constexpr (kDelays && kExact) old = Results::result(params.past_ptr, result_at(lane), rest);
            else if constexpr (kDelays) old = widened(reinterpret_cast<const uint4*>(params.past_ptr)[result_at(lane)]);  // L1 has it
#pragma unroll
            for (int k = 0; k < kUnit; ++k) {
                if (kBlocks) h.v[k] += total.v[k];
                else if (kMode == Mode::kLocal) h.v[k] += p.v[k] * kLocalScale;
                else h.v[k] += p.v[k] + (total.v[k] - old.v[k]);
            }
            squares[lane] += square_sum(h);
            if (kShared && kBlocks && lane >= params.num_written) continue;
            if (scales_output) multiply(h, scales.unit(lane, unit));
            Streams::store(stream + stream_at(lane), rest, h);
        }
        if ((kMode == Mode::kDelayed || kMode == Mode::kLocal) && own_sum)
            store_unit(own_sum + static_cast<u64>(row) * kHidden + unit * kUnit, tree.sum);
    }
    store_inverse_rms(squares, reinterpret_cast<float*>(params.inverse_rms_ptr), row, size);
}

// Where K of a position stands in the monokernel's cache (see cache_layout.py), in bytes; V of its pair follows `kBatch` rows later.
struct CachePlace {
    unsigned char *key_row, *value_pair;
    bool is_odd;

    __device__ __forceinline__ CachePlace(u64 cache, u32 layer, u32 kv_head, u32 position) {
        const u32 batches = kIsWindowed[layer] ? kWindowBatches : kFullBatches;
        const u32 slot = position / kSplits % (batches * kBatch), row = slot % kBatch;
        const u64 batch = kFirstBatches[layer] + (static_cast<u64>(kv_head) * kSplits + position % kSplits) * batches + slot / kBatch;
        unsigned char* at = reinterpret_cast<unsigned char*>(cache) + batch * kBatchBytes;
        key_row = at + row * kHeadDim * 2;
        value_pair = at + kBatch * kHeadDim * 2 + (row >> 1) * kHeadDim * 4;
        is_odd = row & 1;
    }
};

__device__ __forceinline__ u32 capacity_of(u32 layer) {
    return (kIsWindowed[layer] ? kWindowBatches : kFullBatches) * kBatch * kSplits;
}

// One thread block per layer and position, kPairs * KV heads pairs of values.
__device__ __forceinline__ void load_position(const KogPrefillParams& params) {
    const u32 count = params.last - params.first, layer = blockIdx.x / count, position = params.first + blockIdx.x % count;
    if (position + capacity_of(layer) < params.last) return;  // what came later stands there
    int* overflow = reinterpret_cast<int*>(params.overflow_ptr);
    const u64 plain = (static_cast<u64>(layer) * kPositions + position) * kLanes * kKvPairs;
    u32* keys = reinterpret_cast<u32*>(params.keys_ptr) + plain;
    u32* values = reinterpret_cast<u32*>(params.values_ptr) + plain;
    for (u32 i = threadIdx.x; i < kLanes * kKvPairs; i += blockDim.x) {
        const u32 kv_head = i / kPairs, pair = i % kPairs;
        const CachePlace place(params.cache_ptr, layer, kv_head, position);
        u32* key = reinterpret_cast<u32*>(place.key_row) + pair;
        u16* value = reinterpret_cast<u16*>(place.value_pair) + 4 * pair + place.is_odd;
        const u32 stored = value[0] | static_cast<u32>(value[2]) << 16;
        const u32 key_pair = Fp16::pack(KvFormat::low(*key), KvFormat::high(*key));
        const u32 value_pair = Fp16::pack(KvFormat::low(stored), KvFormat::high(stored));
        keys[i] = key_pair, values[i] = value_pair;
        if (!is_finite_pair(key_pair) || !is_finite_pair(value_pair)) *overflow = 1;
    }
}

// One thread block per layer and pair of positions whose values lie side by side; a thread has two pairs of values of each.
__device__ __forceinline__ void store_positions(const KogPrefillParams& params) {
    constexpr u32 kStep = 2 * kSplits, kItems = kLanes * kKvPairs / 2;
    const u32 first_step = params.first / kStep, count = ((params.last + kStep - 1) / kStep - first_step) * kSplits;
    const u32 layer = blockIdx.x / count, i = blockIdx.x % count, first = (first_step + i / kSplits) * kStep + i % kSplits;
    const u32 capacity = capacity_of(layer);
    const auto is_wanted = [&](u32 at) { return at >= params.first && at < params.last && at + capacity >= params.last; };
    const bool wanted[2] = {is_wanted(first), is_wanted(first + kSplits)};  // else what came later stands there
    if (!(wanted[0] || wanted[1]) || *reinterpret_cast<const int*>(params.overflow_ptr)) return;
    const auto narrowed = [](const uint2& from) {
        return uint2{KvFormat::pack(Fp16::low(from.x), Fp16::high(from.x)), KvFormat::pack(Fp16::low(from.y), Fp16::high(from.y))};
    };
    for (u32 item = threadIdx.x; item < kItems; item += blockDim.x) {
        uint2 keys[2] = {}, values[2] = {};
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            if (!wanted[odd]) continue;
            const u64 at = (static_cast<u64>(layer) * kPositions + first + odd * kSplits) * kItems + item;
            keys[odd] = reinterpret_cast<const uint2*>(params.keys_ptr)[at];
            values[odd] = reinterpret_cast<const uint2*>(params.values_ptr)[at];
        }
        const u32 pair = item % (kPairs / 2) * 2;  // of a head
        const CachePlace place(params.cache_ptr, layer, item / (kPairs / 2), first);
#pragma unroll
        for (u32 odd = 0; odd < 2; ++odd) {
            values[odd] = narrowed(values[odd]);
            if (wanted[odd]) reinterpret_cast<uint2*>(place.key_row + odd * kHeadDim * 2)[pair / 2] = narrowed(keys[odd]);
        }
        if (wanted[0] && wanted[1]) {
            const auto low = [](u32 even, u32 odd) { return (even & 0xffffu) | odd << 16; };
            const auto high = [](u32 even, u32 odd) { return even >> 16 | (odd & 0xffff0000u); };
            const uint2 even = values[0], odd = values[1];
            reinterpret_cast<uint4*>(place.value_pair)[pair / 2] =
                make_uint4(low(even.x, odd.x), high(even.x, odd.x), low(even.y, odd.y), high(even.y, odd.y));
        } else {
            const uint2 packed = wanted[0] ? values[0] : values[1];
            u16* value = reinterpret_cast<u16*>(place.value_pair) + 4 * pair + (wanted[0] ? 0 : 1);
            value[0] = static_cast<u16>(packed.x), value[2] = static_cast<u16>(packed.x >> 16);
            value[4] = static_cast<u16>(packed.y), value[6] = static_cast<u16>(packed.y >> 16);
        }
    }
}

// The prompt's last token out of its block: a thread block for each lane. What goes on is exact, of one row.
template <Form kForm>
__device__ __forceinline__ void take_row(const KogPrefillParams& params) {
    constexpr bool kExact = kForm == Form::kExact;
    constexpr u32 kQueryPairs = kHeads * kPairs;
    using Streams = Kept<kForm != Form::kPlain>;
    using Results = Kept<kExact>;
    const u32 size = params.size, lane = blockIdx.x, rest = size * kUnits;
    const int position = *reinterpret_cast<const int*>(params.last_position_ptr);
    const u32 row = position - *reinterpret_cast<const int*>(params.place_ptr);
    const uint4* stream = reinterpret_cast<const uint4*>(params.stream_ptr) + Streams::at(lane, row, size, kUnits);
    uint4* last_stream = reinterpret_cast<uint4*>(params.last_stream_ptr) + lane * 2 * kUnits;
    const u64 partials[] = {params.partial_ptr, params.past_ptr}, last_partials[] = {params.last_partial_ptr, params.last_past_ptr};
    for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
        last_stream[unit] = stream[unit];
        last_stream[kUnits + unit] = Streams::kPlanes > 1 ? stream[rest + unit] : uint4{};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!last_partials[i]) continue;
            const u32 from = Results::at(lane, row, size, kUnits) + unit;
            float* to = reinterpret_cast<float*>(last_partials[i]) + (lane * 2 * kUnits + unit) * kUnit;
            if constexpr (kExact) {
                const float* results = reinterpret_cast<const float*>(partials[i]);
                store_unit(to, float_unit(results + static_cast<u64>(from) * kUnit));
                store_unit(to + kHidden, float_unit(results + static_cast<u64>(from + rest) * kUnit));
            } else {
                store_unit(to, widened(reinterpret_cast<const uint4*>(partials[i])[from]));
                store_unit(to + kHidden, Unit{});
            }
        }
    }
    const u32* query = reinterpret_cast<const u32*>(params.query_ptr) + static_cast<u64>(row) * kLanes * kQueryPairs;
    u32* last_query = reinterpret_cast<u32*>(params.last_query_ptr);
    for (u32 i = lane * kQueryPairs + threadIdx.x; i < (lane + 1) * kQueryPairs; i += blockDim.x) last_query[i] = query[i];
    if (threadIdx.x) return;
    const float* inverse_rms = reinterpret_cast<const float*>(params.inverse_rms_ptr);
    reinterpret_cast<float*>(params.last_inverse_rms_ptr)[lane] = inverse_rms[lane * size + row];
    if (lane) return;
    int* place = reinterpret_cast<int*>(params.last_place_ptr);
    place[0] = position, place[2] = position + 1;
}

// A thread block for each lane of an exact block of one row.
__device__ __forceinline__ void give_row(const KogPrefillParams& params) {
    const u32 lane = blockIdx.x;
    const uint4* stream = reinterpret_cast<const uint4*>(params.stream_ptr) + lane * 2 * kUnits;
    float* to = reinterpret_cast<float*>(params.last_streams_ptr) + lane * kHidden;
    for (u32 unit = threadIdx.x; unit < kUnits; unit += blockDim.x) {
        const Unit value = Kept<true>::operand(stream + unit, kUnits);
        store_unit(to + unit * kUnit, value);
        bool finite = true;
#pragma unroll
        for (int k = 0; k < kUnit; ++k) finite = finite && value.v[k] - value.v[k] == 0;
        if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
    }
}

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void begin(const __grid_constant__ KogPrefillParams params) {
    int* place = reinterpret_cast<int*>(params.place_ptr);
    int* next_start = reinterpret_cast<int*>(params.next_start_ptr);
    const int start = *next_start, end = start + static_cast<int>(params.size);
    place[0] = start, place[2] = end, *next_start = end;
}

// The host sees where the block will end: what was queued before has been done.
__global__ void tell_near(const __grid_constant__ KogPrefillParams params) {
    *reinterpret_cast<volatile int*>(params.near_ptr) = *reinterpret_cast<const int*>(params.next_start_ptr);
}

}  // extern "C"

// Whether a row of the block stands behind the prompt.
__device__ __forceinline__ bool is_padding(const KogPrefillParams& params, u32 row) {
    const int start = *reinterpret_cast<const int*>(params.place_ptr), last = *reinterpret_cast<const int*>(params.last_position_ptr);
    return start + static_cast<int>(row) > last;
}

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
            const Unit value = {{WeightFormat::low(w.x), WeightFormat::high(w.x), WeightFormat::low(w.y), WeightFormat::high(w.y),
                                 WeightFormat::low(w.z), WeightFormat::high(w.z), WeightFormat::low(w.w), WeightFormat::high(w.w)}};
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
            LaneTree tree;
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane)
                tree.add(lane, Values::result(params.partial_ptr, Values::at(lane, row, params.size, kUnits) + unit,
                                              static_cast<u64>(params.size) * kUnits));
            store_unit(own_sum + unit * kUnit, tree.sum);
        }
    }
}

template <class Streams>
__device__ __forceinline__ void clear_row(const KogPrefillParams& params, u32 row) {
    uint4* stream = reinterpret_cast<uint4*>(params.stream_ptr);
    for (u32 lane = 0; lane < kLanes; ++lane)
        for (u32 unit = threadIdx.x; unit < kUnits; unit += kRowThreads)
            Streams::store(stream + Streams::at(lane, row, params.size, kUnits) + unit, params.size * kUnits, Unit{});
}

// A thread block for each row (in a loop, without which the compiler runs out of registers).
template <Mode kMode, Form kForm>
__device__ __forceinline__ void residual_row(const KogPrefillParams& params) {
    constexpr bool kMayShare = kForm != Form::kExact && kLanes > 1 && kScales == 1;
    let_successors_begin();
    // Padding stays 0. It is not looked for where that would be waited for and is little: in small blocks, and far from the end.
    if (params.size >= 4 * kMostPadding && blockIdx.x + kMostPadding >= params.size && is_padding(params, blockIdx.x)) {
        if (kMayShare && params.is_shared && params.num_written > 1) clear_row<Kept<kForm != Form::kPlain>>(params, blockIdx.x);
        return;
    }
    for (u32 row = blockIdx.x; row < params.size; row += gridDim.x) {
        if (kMayShare && params.is_shared) residual<kMode, kForm, kMayShare>(params, row);
        else residual<kMode, kForm, false>(params, row);
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

KOG_KERNEL(load_cache, (kMaxThreads), load_position)
KOG_KERNEL(store_cache, (kMaxThreads), store_positions)
KOG_KERNEL(take_last, (kRowThreads), take_row<Form::kPlain>)
KOG_KERNEL(take_last_split, (kRowThreads), take_row<Form::kSplit>)
KOG_KERNEL(take_last_exact, (kRowThreads), take_row<Form::kExact>)
KOG_KERNEL(give_streams, (kRowThreads), give_row)

}  // extern "C"
