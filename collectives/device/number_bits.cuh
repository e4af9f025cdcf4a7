// Numbers by their bits: codes of E2M1 in a word, and floats as integers in the same order.
#pragma once
#include "ptx.cuh"

namespace kog {

// Eight codes of E2M1 lie in a word as four pairs (kog_dist/decode/coded_packing.py). A pair has its signs and the rest of it in these bits:
// pairs 0, 1 and 2 of a word that is shifted to the left by 0, 3 and 6; the last one is in what `last_e2m1_pair` gives.
constexpr u32 kE2m1Signs = 0x80008000u, kE2m1Magnitudes = 0x01c001c0u;
__device__ __forceinline__ u32 last_e2m1_pair(u32 word) {
    return (word >> 4 & 0x00c000c0u) | (word >> 5 & 0x01000100u) | (word << 1 & kE2m1Signs);
}
// A pair in binary16, 2^-14 of it: exponents of binary16 are 14 higher.
__device__ __forceinline__ u32 e2m1_as_binary16(u32 pair) { return (pair & kE2m1Magnitudes) << 3 | (pair & kE2m1Signs); }

// Keys of larger values are larger; 0 is that of no value.
__device__ __forceinline__ u32 rising_key(float value) {
    const u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

}  // namespace kog
