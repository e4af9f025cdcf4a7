// Operands of `mma` (ptx.cuh) out of rows of binary16 in shared memory, and copies of such rows that threads do not wait for.
#pragma once

#include "async_copy.cuh"

namespace kog {

// Eight halves from global to shared memory, of which `copies_wait` knows; zeros where there is nothing.
__device__ __forceinline__ void copy_eight(u16* to, const u16* from, bool is_there = true) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
#else
    if (is_there) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
#endif
}
__device__ __forceinline__ void copies_commit() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all but the last `kPending` committed groups of this thread's copies are there.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

__device__ __forceinline__ u32 pair_at(const u16* at) { return *reinterpret_cast<const u32*>(at); }

// Four tiles of 8 x 8 halves, of which a thread of the warp gets two neighbours of row laneid / 4 of each. Those of 16 rows and 16 columns, the
// tiles of a row of tiles one after the other: as operand B two times (rows are its columns), b0 and b1 of the first 8 rows first.
__device__ __forceinline__ void load_rows(u32 (&v)[4], const u16* from, u32 stride) {
#ifdef __CUDA_ARCH__
    const u32 tile = laneid() / 8, at = shared_address(from + (laneid() % 8 + tile / 2 * 8) * stride + tile % 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
#else
    for (u32 tile = 0; tile < 4; ++tile) v[tile] = pair_at(from + (laneid() / 4 + tile / 2 * 8) * stride + tile % 2 * 8 + laneid() % 4 * 2);
#endif
}
// The same tiles, those of a column of tiles one after the other: as operand A.
__device__ __forceinline__ void load_operand(u32 (&v)[4], const u16* from, u32 stride) {
#ifdef __CUDA_ARCH__
    const u32 tile = laneid() / 8, at = shared_address(from + (laneid() % 8 + tile % 2 * 8) * stride + tile / 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
#else
    for (u32 tile = 0; tile < 4; ++tile) v[tile] = pair_at(from + (laneid() / 4 + tile % 2 * 8) * stride + tile / 2 * 8 + laneid() % 4 * 2);
#endif
}
// The same, each transposed: as operand B two times, whose columns are columns here, b0 and b1 of the first 8 columns first.
__device__ __forceinline__ void load_columns(u32 (&v)[4], const u16* from, u32 stride) {
#ifdef __CUDA_ARCH__
    const u32 tile = laneid() / 8, at = shared_address(from + (laneid() % 8 + tile % 2 * 8) * stride + tile / 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
#else
    load_operand(v, from, stride);
    for (u32 tile = 0; tile < 4; ++tile) v[tile] = transposed(v[tile]);
#endif
}

}  // namespace kog
