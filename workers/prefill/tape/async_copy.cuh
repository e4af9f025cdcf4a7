// Copies from global to shared memory that threads do not wait for, and what else tape_product.cuh does with bits.
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

// `bytes` (a multiple of 16) by the copy engine, of which barrier `bar` is told.
__device__ __forceinline__ void copy_bulk(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
#else
    std::memcpy(at_shared(to), from, bytes);
    update(cluster_address(bar, my_rank), 0, -static_cast<int>(bytes));
#endif
}
// The compiler may not move what uses it over this place, nor use its register otherwise before.
__device__ __forceinline__ void kept(u32& value) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(value)::"memory");
#endif
}

// (value & mask) | bits, as one instruction: the compiler makes two of it where it knows both constants.
template <u32 kMask>
__device__ __forceinline__ u32 masked_or(u32 value, u32 bits) {
#ifdef __CUDA_ARCH__
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(value), "n"(kMask), "r"(bits));
    return v;
#else
    return (value & kMask) | bits;
#endif
}

// Of both halves, each rounded.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#else
    return Fp16::pack(Fp16::low(a) * Fp16::low(b), Fp16::high(a) * Fp16::high(b));
#endif
}

// A warp has 8 x 8 halves, of which a thread holds two neighbours of row laneid / 4; so it does of what comes back, whose rows are the
// columns. A full warp calls it.
__device__ __forceinline__ u32 transposed(u32 pair) {
#ifdef __CUDA_ARCH__
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
#else
    auto* const all = fragments[my_rank] + threadIdx.x / 32 * 32;
    all[laneid()][0] = pair;
    __syncwarp();
    u32 halves[2];
    for (u32 k = 0; k < 2; ++k) halves[k] = all[(laneid() % 4 * 2 + k) * 4 + laneid() / 8][0] >> 16 * (laneid() / 4 % 2) & 0xffff;
    __syncwarp();
    return halves[0] | halves[1] << 16;
#endif
}

}  // namespace kog
