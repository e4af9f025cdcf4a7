// What builds with processors use beyond ptx.cuh.
#pragma once
#include "ptx.cuh"

inline void __threadfence_block() {}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return static_cast<unsigned __int128>(a) * b >> 64; }
inline unsigned long long __float2ull_rz(float v) { return static_cast<unsigned long long>(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
template <class Combine>
unsigned twin_reduced(unsigned value, Combine combine) {
    const auto* all = twin::collective(value);
    unsigned result = all[0][0];
    for (int i = 1; i < 32; ++i) result = combine(result, static_cast<unsigned>(all[0][i]));
    return result;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return twin_reduced(value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    return twin_reduced(value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return twin_reduced(value, [](unsigned a, unsigned b) { return min(a, b); });
}
