// Hopper's matrix units and bulk tensor copies: thin names for their PTX. Products themselves are generated (attention_abi.py).
#pragma once
#include "ptx.cuh"

namespace kog {

// ---- tensor maps: the fastest dimension first; a map is 128 bytes of a kernel's parameters ----
struct alignas(64) TensorMap {
    u64 words[16];
};
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

// Operands in shared memory stand in panels: all rows of `kPanel` 16-bit values (16, 32 or 64, which a tensor map swizzles over as many
// bytes as they have), then all rows of the next ones. Eight rows repeat themselves.
template <int kPanel>
constexpr u64 kEightRows = static_cast<u64>(8 * kPanel * 2 >> 4) << 32 | static_cast<u64>(kPanel == 64 ? 1 : kPanel == 32 ? 2 : 3) << 62;

// Rows of an operand whose products are summed over the values of a row.
template <int kPanel>
__device__ __forceinline__ u64 rows_at(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | kEightRows<kPanel>;
}
// Rows of an operand whose products are summed over the rows; `panel_bytes` from one panel to the next.
template <int kPanel>
__device__ __forceinline__ u64 columns_at(u32 address, u32 panel_bytes) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(panel_bytes >> 4) << 16 | kEightRows<kPanel>;
}

}  // namespace kog
