// Values of a row as a thread of the fused kernels has them: kUnit neighbouring ones, kept whole, as two rows of parts, or in float32.
#pragma once

#include "ptx.cuh"
#include "pdl.cuh"
#include "prefill_shape.cuh"
#include "unit.cuh"

namespace kog {

constexpr int kUnits = kHidden / kUnit, kFfnUnits = kFfn / kUnit;
constexpr int kPairs = kHeadDim / 2;                     // of one head
constexpr int kLanePairs = (kHeads + 2 * kKvHeads) * kPairs;  // queries, keys, values of a lane
constexpr int kKvPairs = kKvHeads * kPairs;
static_assert(kPairs % 2 == 0, "a thread takes two pairs of a head");
static_assert(kHidden % kUnit == 0 && kFfn % kUnit == 0, "rows are whole units");
using Lanes = LaneTree<kLanes>;

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

}  // namespace kog
