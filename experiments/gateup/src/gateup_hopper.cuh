// What gateup.cu needs beside hopper.cuh: tensor copies to several thread blocks of a cluster, and one more shape of map.
#pragma once
#include "hopper.cuh"

namespace kog {

__device__ __forceinline__ void tensor_load3(u32 to, const TensorMap* map, int x, int y, int z, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
        : "memory");
}
// To the same place in all thread blocks of the cluster that `mask` names; each one's barrier is told of the bytes.
__device__ __forceinline__ void tensor_load3_many(u32 to, const TensorMap* map, int x, int y, int z, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(mask)
        : "memory");
}
__device__ __forceinline__ void tensor_load5_many(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(bar), "h"(mask)
        : "memory");
}
// Have a box read into L2 only.
__device__ __forceinline__ void tensor_prefetch3(const TensorMap* map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void tensor_prefetch5(const TensorMap* map, int x, int y, int z, int w, int v) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}
__device__ __forceinline__ float upper(u32 packed) {  // Fp16::high without a shift
    float value;
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, h;\n}" : "=f"(value) : "r"(packed));
    return value;
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ u64 clock64_cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void store_global(void* p, const uint4& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace kog
