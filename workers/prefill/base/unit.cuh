// Neighbouring values of a row as a thread of prefill's fused kernels has them. Behind a header that says what kUnit is.
#pragma once

#include "ptx.cuh"

namespace kog {

static_assert(kUnit == 8, "a unit is 16 bytes");

struct Unit {
    float v[kUnit];
};
template <class Format>
__device__ __forceinline__ Unit widened_as(const uint4& packed) {
    return {{Format::low(packed.x), Format::high(packed.x), Format::low(packed.y), Format::high(packed.y), Format::low(packed.z),
             Format::high(packed.z), Format::low(packed.w), Format::high(packed.w)}};
}
__device__ __forceinline__ Unit widened(const uint4& packed) { return widened_as<Fp16>(packed); }
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

// Binary tree over the partials of `kCount` lanes, fed lane by lane in order.
template <int kCount>
struct LaneTree {
    static_assert(kCount <= 32 && (kCount & (kCount - 1)) == 0, "lanes are a power of two");
    Unit waiting[5];  // by level: a sum that waits for its neighbour
    Unit sum;         // after the last lane

    __device__ __forceinline__ void add(int lane, const Unit& partial) {  // `lane` is a constant in unrolled loops
        sum = partial;
#pragma unroll
        for (int level = 0; level < 5; ++level) {
            if (1 << level >= kCount) break;
            if ((lane >> level & 1) == 0) {
                waiting[level] = sum;
                break;
            }
#pragma unroll
            for (int k = 0; k < kUnit; ++k) sum.v[k] = waiting[level].v[k] + sum.v[k];
        }
    }
};

}  // namespace kog
