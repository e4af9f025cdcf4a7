// Hopper's matrix units and bulk tensor copies: thin names for their PTX. Products themselves are generated (hopper_abi.py).
#pragma once
#include "ptx.cuh"

namespace kog {

// ---- shared memory ----
__device__ __forceinline__ u32 shared_memory() {  // as much as the launch asked for
    extern __shared__ unsigned char memory[];
    return shared_address(memory);
}
__device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_float4(u32 address, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// ---- tensor maps: the fastest dimension first; a map is 128 bytes of a kernel's parameters ----
struct alignas(64) TensorMap {
    u64 words[16];
};
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(bar)
        : "memory");
}
// To the same place in all thread blocks of the cluster that `mask` has a bit for; each one's barrier is told of the bytes.
__device__ __forceinline__ void tensor_load_many(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7], %8;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(bar), "h"(mask)
        : "memory");
}
__device__ __forceinline__ void tensor_load_many(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], "
        "[%6], %7;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar), "h"(mask)
        : "memory");
}
// Where address `address` of this thread block's shared memory lies in that of thread block `rank` of its cluster.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Not `.release.cluster`, which drains all stores of the thread: what the arrival must not overtake are loads whose values were used.
__device__ __forceinline__ void mbar_arrive_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// All threads of the cluster, but for those that have ended.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {  // of this thread block in its cluster
    u32 rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Until the barrier has passed the phase `parity`. What is waited for has always been queued, so a wait of seconds is a mistake in
// this file's users: it ends the launch with an error, instead of holding the card for ever.
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    if (mbar_try(bar, parity)) return;
    const u64 begin_ns = globaltimer_ns();
    while (!mbar_try(bar, parity)) {
        if (globaltimer_ns() - begin_ns > 2000000000ull) asm volatile("trap;");
    }
}

// ---- products by a group of four warps ----
__device__ __forceinline__ void group_sync(u32 barrier, u32 num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void group_arrive(u32 barrier, u32 num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler may not move what uses d over this place.
template <int kCount>
__device__ __forceinline__ void settle(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- beside products ----
// Fp16::high without a shift.
__device__ __forceinline__ float high_half(u32 packed) {
    float value;
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, h;\n}" : "=f"(value) : "r"(packed));
    return value;
}
// Stays where it is in the program.
__device__ __forceinline__ void store_global(void* p, const uint4& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace kog
