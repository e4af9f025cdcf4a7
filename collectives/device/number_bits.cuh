// Numbers by their bits: codes of E2M1 in a word, and floats as integers in the same order.
#pragma once
#include "ptx.cuh"

namespace kog {

// Eight codes of E2M1 lie in a word as four pairs (kog_dist/decode/coded_packing.py). A pair has a code in each half: its sign in bit 15, its
// magnitude in bits 6 to 8, where bfloat16 has the last bits of the exponent and the first one of the significand.
constexpr u32 kE2m1Signs = 0x80008000u, kE2m1Magnitudes = 0x01c001c0u;
__device__ __forceinline__ u32 e2m1_pair(u32 word, int pair) {
    if (pair == 3) return (word << 6 & 0x80c080c0u) | (word >> 2 & 0x01000100u);  // what the others have left
    return (pair == 0 ? word : pair == 1 ? word << 4 : word << 10 | word >> 22) & (kE2m1Signs | kE2m1Magnitudes);
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
