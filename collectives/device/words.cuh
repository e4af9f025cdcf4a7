// Words: 64-bit values that carry their own epoch, so that data is its own flag. Written once per epoch by one thread with a
// relaxed store, polled with relaxed loads; no fence, no counter, nothing to clear. Two formats:
//   pair word   two floats with 16 significant bits each (the low 8 mantissa bits hold a byte of the 16-bit tag)
//   value word  one 32-bit payload (low half) and a 32-bit tag (high half)
// A slot is rewritten only when a later value that depends on every reader has arrived, so a reader never meets an epoch that is
// older than the last one of its slot; 16 bits of tag are enough. Two words may travel in one 16-byte access: each has its tag.
#pragma once
#include "ptx.cuh"

namespace kog {

// Nearest float with 16 significant bits; infinities and NaNs stay what they are.
__device__ __forceinline__ u32 round_to_16_bits(float value) {
    u32 bits = __float_as_uint(value);
    return bits + ((bits & 0x7f800000u) == 0x7f800000u ? 0u : 0x80u);
}
__device__ __forceinline__ float rounded_half(float value) { return __uint_as_float(round_to_16_bits(value) & 0xffffff00u); }
// Half of a pair word: a value, and the byte of the tag that goes with the first (0) or second (1) value.
__device__ __forceinline__ u32 make_half_word(float value, u32 tag_byte) {
    return (round_to_16_bits(value) & 0xffffff00u) | (tag_byte & 0xffu);
}
__device__ __forceinline__ u64 join_halves(u32 first, u32 second) { return static_cast<u64>(second) << 32 | first; }
__device__ __forceinline__ u64 make_pair_word(float first, float second, u32 tag) {
    return join_halves(make_half_word(first, tag), make_half_word(second, tag >> 8));
}
__device__ __forceinline__ bool has_tag(u64 word, u32 tag) {
    u32 low = static_cast<u32>(word), high = static_cast<u32>(word >> 32);
    return (((low ^ tag) | (high ^ (tag >> 8))) & 0xffu) == 0;
}
// Not 0 if one of the two pair words carries another tag.
__device__ __forceinline__ u32 tag_difference(ulonglong2 words, u32 tag) {
    u32 low = (static_cast<u32>(words.x) ^ tag) | (static_cast<u32>(words.y) ^ tag);
    u32 high = (static_cast<u32>(words.x >> 32) ^ (tag >> 8)) | (static_cast<u32>(words.y >> 32) ^ (tag >> 8));
    return (low | high) & 0xffu;
}
__device__ __forceinline__ u32 tag_of(u64 word) {
    return (static_cast<u32>(word) & 0xffu) | (static_cast<u32>(word >> 32) & 0xffu) << 8;
}
__device__ __forceinline__ float first_of(u64 word) { return __uint_as_float(static_cast<u32>(word) & 0xffffff00u); }
__device__ __forceinline__ float second_of(u64 word) { return __uint_as_float(static_cast<u32>(word >> 32) & 0xffffff00u); }

__device__ __forceinline__ u64 make_value_word(u32 payload, u32 tag) { return static_cast<u64>(tag) << 32 | payload; }
__device__ __forceinline__ bool value_has_tag(u64 word, u32 tag) { return static_cast<u32>(word >> 32) == tag; }

}  // namespace kog
