// From a logit to what is chosen from: penalties, biases, temperature, what is allowed; and probability masses. Bit for bit as
// kog_dist/decode/sampling/ (processors.py, bits.py) defines it: every operation is rounded on its own.
#pragma once
#include "sample.cuh"

namespace kog {

// Shared memory of the rows' x (of those that are not allowed: minus infinity), and of their scores.
__device__ __forceinline__ u32 x_at(const Role& role, u32 row) {
    return role.base + (kScoresFit ? KOG_OFFSET(attended) : KOG_OFFSET(scores)) + 4 * row;
}
__device__ __forceinline__ u32 score_at(const Role& role, u32 row) { return x_at(role, HeadOp::kCtaRows + row); }

// The finaliser gives a block of logits to the sampler; rows are those of the rank. All but a token's last block are counted: behind that
// one `pass_ended` follows, which the sampler sees sooner.
constexpr u32 kCountedBlocks = HeadOp::kBlocks - 1;
__device__ __forceinline__ void hand_logits(const Role& role, u32 block, u32 row, float logit, float* logits) {
    const bool mine = laneid() < HeadOp::kRows && row < end_vocab_row(role.cta);
    if (mine) store_shared(x_at(role, row - first_vocab_row(role.cta)), logit);
    if (block < kCountedBlocks) __threadfence_block();
    __syncwarp();
    if (block < kCountedBlocks && laneid() == 0) {
        const u32 counter = role.base + KOG_OFFSET(num_handed);
        store_shared(counter, load_shared_u32(counter) + 1);
    }
    if (mine) logits[row] = logit;
}

// What a row's logit meets besides the temperature; loaded before the logit is there.
struct Adjustment {
    float bias;
    u32 said;  // times in the answer; the highest bit: in the prompt

    __device__ __forceinline__ Adjustment(const KogProcessorParams& processors, u32 row) : bias(0), said(0) {
        if (processors.flags & kBiased) bias = __uint_as_float(load_relaxed_u32(reinterpret_cast<const u32*>(processors.bias_ptr) + row));
        if (processors.flags & kRemembers) said = load_relaxed_u32(reinterpret_cast<const u32*>(processors.history_ptr) + row);
    }
    // The logit after bias and penalties, times 1 / temperature.
    __device__ __forceinline__ float apply(const KogDecodeParams& params, const KogProcessorParams& processors, float logit) const {
        if (processors.flags & kBiased) logit = __fadd_rn(logit, bias);
        const float penalty = __uint_as_float(processors.repetition_bits);
        if (said) logit = logit < 0 ? __fmul_rn(logit, penalty) : __fdiv_rn(logit, penalty);
        if (const u32 times = said & 0x7fffffffu) {
            logit = __fadd_rn(logit, -__fmul_rn(__uint_as_float(processors.frequency_bits), static_cast<float>(times)));
            logit = __fadd_rn(logit, -__uint_as_float(processors.presence_bits));
        }
        const float inverse_temperature = __uint_as_float(params.inverse_temperature_bits);
        return inverse_temperature > 0 ? __fmul_rn(logit, inverse_temperature) : logit;
    }
};

// exp(distance) * 2**40, cut off; `bits.masses`. `distance` is not above 0.
__device__ __forceinline__ u64 mass_of(float distance) {
    const float x = fmaxf(distance, -28.0f), n = floorf(__fadd_rn(__fmul_rn(x, 1.44269504088896341f), 0.5f));
    float f = __fadd_rn(x, -__fmul_rn(n, 0.693359375f));
    f = __fadd_rn(f, -__fmul_rn(n, -2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, f), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, f), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, f), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, f), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 5.0000001201e-1f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(f, f)), f), 1.0f);
    return __float2ull_rz(__fmul_rn(p, __uint_as_float((127 + 40 + static_cast<int>(n)) << 23)));  // a power of two: exact
}

// 27 bits at a time, of which 32 threads' sums fit into 32.
__device__ __forceinline__ u64 sum_of_warp(u64 mine) {
    constexpr u32 kPart = (1u << 27) - 1;
    const u32 low = __reduce_add_sync(kFullWarp, static_cast<u32>(mine) & kPart);
    const u32 middle = __reduce_add_sync(kFullWarp, static_cast<u32>(mine >> 27) & kPart);
    const u32 high = __reduce_add_sync(kFullWarp, static_cast<u32>(mine >> 54));
    return low + (static_cast<u64>(middle) << 27) + (static_cast<u64>(high) << 54);
}
// A token's place in the order of ids, which every rank computes alike: (rank * kNumCtas + thread block) << 12 | row.
constexpr u32 kRowBits = 12, kNoRowOfCta = (1u << kRowBits) - 1, kNoPlace = ~0u;
static_assert(HeadOp::kCtaRows < kNoRowOfCta, "rows of a thread block");
__device__ __forceinline__ u32 place_of(u32 source, u32 row) { return row == kNoRowOfCta ? kNoPlace : source << kRowBits | row; }
__device__ __forceinline__ u32 source_of(u32 place) { return place >> kRowBits; }
__device__ __forceinline__ u32 row_of(u32 place) { return place & kNoRowOfCta; }
__device__ __forceinline__ u32 id_of(const KogProcessorParams& processors, u32 place) {
    const u32 rank = source_of(place) / kNumCtas;
    if constexpr (kVocabParallelHead) return processors.first_ids[rank] + first_vocab_row(source_of(place) % kNumCtas) + row_of(place);
    else return processors.first_ids[rank] + source_of(place) % kNumCtas * processors.cta_rows[rank] + row_of(place);  // the last rank may own fewer
}

// A token with a value: the larger value comes first, equal ones by id.
struct Element {
    float value;
    u32 place;
};
__device__ __forceinline__ Element no_element() { return {-INFINITY, kNoPlace}; }  // behind all that exist

__device__ __forceinline__ bool is_before(const Element& a, const Element& b) {
    return a.value > b.value || (a.value == b.value && a.place < b.place);
}
// Unsigned numbers in the order of floats that are no NaNs; both zeros are the same. None is 0.
__device__ __forceinline__ u32 order_of(float value) {
    const u32 bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float in_order(u32 order) { return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

// Which thread of the warp has what comes first: the largest `order`, equal ones by `place`. That becomes everybody's.
__device__ __forceinline__ u32 thread_of_first(u32& order, u32& place) {
    const u32 largest = __reduce_max_sync(kFullWarp, order);
    const u32 first = __reduce_min_sync(kFullWarp, order == largest ? place : kNoPlace);
    const u32 thread = __ffs(__ballot_sync(kFullWarp, order == largest && place == first)) - 1;
    order = largest, place = first;
    return thread;
}
__device__ __forceinline__ Element first_of_warp(Element mine) {
    u32 order = order_of(mine.value);
    const u32 thread = thread_of_first(order, mine.place);
    return {__shfl_sync(kFullWarp, mine.value, thread), mine.place};
}
// The first in the order of those behind `last`, among `element(0)` to `element(count - 1)`; no_element() if there is none.
template <class At>
__device__ __forceinline__ Element next_in_order(const Element& last, u32 count, At&& element) {
    Element mine = no_element();
#pragma unroll 1
    for (u32 i = laneid(); i < count; i += 32) {
        const Element found = element(i);
        if (is_before(last, found) && is_before(found, mine)) mine = found;
    }
    return first_of_warp(mine);
}

}  // namespace kog
