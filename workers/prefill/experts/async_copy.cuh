// Copies of a few bytes from global to shared memory that threads do not wait for, and products of halves.
#pragma once

#include "hopper.cuh"

namespace kog {

#ifdef __CUDACC__
extern __shared__ unsigned char all_shared_memory[];
// What lies at an address within the memory that the launch asked for.
__device__ __forceinline__ unsigned char* at_shared(u32 address) { return all_shared_memory + (address - shared_address(all_shared_memory)); }
#else
inline unsigned char* at_shared(u32 address) { return own(address); }
#endif

// kBytes (4 or 16) to `to`, or as many zeros.
template <int kBytes>
__device__ __forceinline__ void copy_async(u32 to, const unsigned char* from, bool is_there) {
#ifdef __CUDA_ARCH__
    const u32 num_bytes = is_there ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(num_bytes) : "memory");
#else
    for (int i = 0; i < kBytes; ++i) at_shared(to)[i] = is_there ? from[i] : 0;
#endif
}
// What this thread has queued is a group.
__device__ __forceinline__ void copies_commit() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the kPending newest groups are there, also for products; for other threads behind a barrier.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Products of both halves, each rounded.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return Fp16::pack(Fp16::low(a) * Fp16::low(b), Fp16::high(a) * Fp16::high(b));
#endif
}

}  // namespace kog
