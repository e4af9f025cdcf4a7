// Values of a row as a thread of the fused kernels has them: kUnit neighbouring ones, kept whole, as two rows of parts, or in float32.
#pragma once

#include "ptx.cuh"
#include "pdl.cuh"
#include "prefill_shape.cuh"

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
// How a chunk keeps a value. Exact ones have twice the rows: binary16 values that go into products and what rounding left of them,
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

// 1 / rms of a row in every lane from the threads' sums of squares. Called by all threads of a thread block, whole warps.
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

}  // namespace kog
