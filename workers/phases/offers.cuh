// What thread blocks tell each other when a token of a request with processors is chosen (choose.cuh), and how a warp combines what it has heard.
#pragma once
#include "quads.cuh"
#include "logits_processors.cuh"

namespace kog {

// What a thread block's offer says besides numbers.
enum OfferFlag : u32 { kFaultFlag = 1, kCancelFlag = 2, kNoMaskFlag = 4, kFirstFlag = 8 };

// The token with the best score; x decides its place in the order that filters cut.
struct Offer {
    float score, x;
    u32 place;

    __device__ __forceinline__ void take(float other_score, float other_x, u32 other_place) {
        if (other_score > score || (other_score == score && other_place < place)) score = other_score, x = other_x, place = other_place;
    }
    // That of the whole warp.
    __device__ __forceinline__ void combine() {
        u32 order = order_of(score);
        const u32 thread = thread_of_first(order, place);
        score = in_order(order), x = __shfl_sync(kFullWarp, x, thread);
    }
};
__device__ __forceinline__ Offer no_offer() { return {-INFINITY, -INFINITY, kNoPlace}; }

// What a thread block tells the others first: its best token, the largest x, and flags. Others know its first token in the order of filters
// only if that is the best one, too: that is what they ask.
struct Offers {
    Offer best = no_offer();
    Element first = no_element();
    u32 flags = 0;

    // Those of the whole warp.
    __device__ __forceinline__ void combine() {
        best.combine();
        first = first_of_warp(first);
        flags = __reduce_or_sync(kFullWarp, flags);
    }
    // As the words of a pair, 56 bits each: from above score, row, flags, and the end of x; the beginning of x, and the largest x.
    __device__ __forceinline__ u64 first_word() const {
        const u32 more = flags | (first.place == best.place ? kFirstFlag : 0);
        return static_cast<u64>(order_of(best.score)) << 24 | row_of(best.place) << 12 | more << 8 | (__float_as_uint(best.x) & 0xff);
    }
    __device__ __forceinline__ u64 second_word() const {
        return static_cast<u64>(__float_as_uint(best.x) >> 8) << 32 | order_of(first.value);
    }
};

// What is heard of everybody's offers: of the best one its words, of the one with the largest x, and all flags.
struct HeardOffers {
    u32 score = 0, source = kNoPlace, low = 0, high = 0;
    u32 largest = 0, source_of_largest = kNoPlace, low_of_largest = 0;
    u32 said = 0;

    __device__ __forceinline__ void take(u32 from, const ulonglong2& pair) {
        const u32 its_score = static_cast<u32>(pair.x >> 24), its_largest = static_cast<u32>(pair.y), its_low = static_cast<u32>(pair.x);
        if (its_score > score || (its_score == score && from < source))
            score = its_score, source = from, low = its_low, high = static_cast<u32>(pair.y >> 32);
        if (its_largest > largest || (its_largest == largest && from < source_of_largest))
            largest = its_largest, source_of_largest = from, low_of_largest = its_low;
        said |= its_low;
    }
    static __device__ __forceinline__ u32 row(u32 low) { return low >> 12 & kNoRowOfCta; }

    // Those of the whole warp.
    __device__ __forceinline__ Offers combine() {
        const u32 thread = thread_of_first(score, source), other = thread_of_first(largest, source_of_largest);
        low = __shfl_sync(kFullWarp, low, thread), high = __shfl_sync(kFullWarp, high, thread);
        low_of_largest = __shfl_sync(kFullWarp, low_of_largest, other);
        Offers offers;
        offers.best = {in_order(score), __uint_as_float(high << 8 | (low & 0xff)), place_of(source, row(low))};
        const bool is_known = low_of_largest >> 8 & kFirstFlag;
        offers.first = {in_order(largest), is_known ? place_of(source_of_largest, row(low_of_largest)) : kNoPlace};
        offers.flags = __reduce_or_sync(kFullWarp, said) >> 8 & (kFirstFlag - 1);
        return offers;
    }
};

// What stands before a token in the order: how many tokens with how much mass, and the best of them; and the mass of all that count.
struct Before {
    u64 total = 0, mass = 0;
    u32 num = 0;
    Offer best = no_offer();

    __device__ __forceinline__ void combine_masses() { total = sum_of_warp(total), mass = sum_of_warp(mass); }
    __device__ __forceinline__ void combine_tokens() {
        best.combine();
        num = __reduce_add_sync(kFullWarp, num);
    }
};

}  // namespace kog
