// What the monokernel's sampling uses beyond KCCL's device code; the rest of the twin is kccl_twin/ptx.cuh.
#pragma once
#include "ptx.cuh"

#define __constant__

struct uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class A>
A max(A a, A b) {
    return a < b ? b : a;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return static_cast<unsigned __int128>(a) * b >> 64; }
inline unsigned long long __float2ull_rz(float v) { return static_cast<unsigned long long>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline void __threadfence_block() {}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const unsigned long long* all = twin::collective(predicate);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (all[i] != 0) << i;
    return result;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    const unsigned long long* all = twin::collective(value);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= all[i];
    return result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned long long* all = twin::collective(value);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result = result > all[i] ? result : all[i];
    return result;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    const unsigned long long* all = twin::collective(value);
    unsigned result = ~0u;
    for (int i = 0; i < 32; ++i) result = result < all[i] ? result : all[i];
    return result;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const unsigned long long* all = twin::collective(value);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result += all[i];
    return result;
}

namespace kog {
struct Bf16 {};
template <class T>
T& shared_at(u32 address) {
    twin::maybe_yield();
    return *reinterpret_cast<T*>(twin::arena + address);
}
inline float load_shared_f32(u32 address) { return shared_at<float>(address); }
inline void load_shared(u32 address, uint2& v) { v = shared_at<uint2>(address); }
inline void store_shared(u32 address, float v) { shared_at<float>(address) = v; }
inline void store_shared(u32 address, u32 v) { shared_at<u32>(address) = v; }
inline void store_shared(u32 address, uint2 v) { shared_at<uint2>(address) = v; }
inline void store_relaxed_u32(u32* p, u32 a) { *p = a; }
inline u32 clock_cycles() { return static_cast<u32>(twin::now_ns); }
inline bool mbar_test(u32 bar, u32 parity) { return mbar_try(bar, parity); }
}  // namespace kog
