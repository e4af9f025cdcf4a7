// The sampling warp's choice of a token for a request with processors: the definition of kog_dist/decode/sampling/processors.py, made of maxima,
// counts and integer masses alone, so that neither thread blocks nor ranks show in the result. See docs/sampling.md.
#pragma once
#include "choose_rows.cuh"

namespace kog {

// ---- exchanges; see quads.cuh. All thread blocks of all ranks take part in each and combine what all have said alike. ----
// Into a slot that is written again two tokens later, by who has collected the next token's offers: those who made them had read it.
__device__ __forceinline__ void publish_largest(const OwnRows& rows, u32 tag, float logit) {
    const u32 order = __reduce_max_sync(kFullWarp, order_of(logit)), rank = opaque(laneid());
    if (rank < kRanks) store_system(rows.quads().aside(rank, tag & 1, rows.peers.rank, rows.role.cta), make_value_word(order, tag));
}
// Of this thread block before, of all after. `reports`: tell everybody the own largest logit, too, for the report of token number `tag`.
// False: leave.
__device__ __forceinline__ bool exchange_offers(const OwnRows& rows, Offers& offers, bool reports, float largest_logit, u32 tag) {
    const u32 next = rows.number() + 1;
    offers.combine();
    if (rows.is_root() && rows.role.shared->cancelled) offers.flags |= kCancelFlag;
    rows.quads().publish(rows.role.cta, next, offers.first_word(), offers.second_word(), 0, 0);
    rows.set_number(next);
    if (reports) publish_largest(rows, tag, largest_logit);
    HeardOffers heard;
    const auto fold = [&](u32 source, const ulonglong2& pair) { heard.take(source, pair); };
    if (!rows.quads().collect(rows.role.cta, next, 0, rows.role.stopped(), rows.role.shared->peer_notes[1], fold)) return false;
    offers = heard.combine();
    return true;
}

// ---- filters ----
// Keys grow with the distance from the largest x: the bits of a float that is not negative. Equal keys have equal masses.
__device__ __forceinline__ u32 key_of(float distance) { return __float_as_uint(fabsf(distance)); }
// What is before `pivot` in the order of all tokens not below min-p; those with keys below `bound` count for the total. The tokens among
// that, how many and the best one, are only collected by `collect_tokens`. False: leave.
__device__ __forceinline__ bool count_before(const OwnRows& rows, const Offer& pivot, float largest, u32 bound, Before& before) {
    const float lowest = __uint_as_float(rows.processors.lowest_bits);
    const u32 next = rows.number() + 1;
    before = Before{};
#pragma unroll 1
    for (u32 row = laneid(); row < rows.num_rows(); row += 32) {
        const float x = load_shared_f32(x_at(rows.role, row)), distance = __fadd_rn(x, -largest);
        if (!(x > -INFINITY) || !(distance >= lowest)) continue;
        const u64 mass = mass_of(distance);
        const u32 place = place_of(rows.own_source(), row);
        if (key_of(distance) < bound) before.total += mass;
        if (!is_before({x, place}, {pivot.x, pivot.place})) continue;
        before.mass += mass, ++before.num;
        before.best.take(load_shared_f32(score_at(rows.role, row)), x, place);
    }
    before.combine_masses();
    before.combine_tokens();
    const u64 token = static_cast<u64>(__float_as_uint(before.best.score)) << 24 | row_of(before.best.place) << 12 | before.num;
    rows.quads().publish(rows.role.cta, next, before.mass, before.total, token, __float_as_uint(before.best.x));
    rows.set_number(next);
    before = Before{};
    const auto fold = [&](u32, const ulonglong2& pair) { before.mass += payload_of(pair.x), before.total += payload_of(pair.y); };
    if (!rows.quads().collect(rows.role.cta, next, 0, rows.role.stopped(), rows.role.shared->peer_notes[1], fold)) return false;
    before.combine_masses();
    return true;
}
static_assert(kRowBits + 40 <= kQuadTagBit, "the mass of a thread block's rows");
__device__ __forceinline__ bool collect_tokens(const OwnRows& rows, Before& before) {
    const auto fold = [&](u32 source, const ulonglong2& pair) {
        const u32 low = static_cast<u32>(pair.x);
        before.num += low & kNoRowOfCta;
        before.best.take(__uint_as_float(static_cast<u32>(pair.x >> 24)), __uint_as_float(static_cast<u32>(pair.y)),
                         place_of(source, low >> 12 & kNoRowOfCta));
    };
    if (!rows.quads().collect(rows.role.cta, rows.number(), 1, rows.role.stopped(), rows.role.shared->peer_notes[1], fold)) return false;
    before.combine_tokens();
    return true;
}


// The mass of the first top_k tokens is that of the keys below `bound`, and `rest`. A search for the k-th key, sixteen ranges at a
// time: thread i keeps the number of tokens in range i. At most eight exchanges; fewer, once the k-th stands at the end of a range.
__device__ __forceinline__ bool find_top_k(const OwnRows& rows, float largest, u32& bound, u64& rest) {
    const float lowest = __uint_as_float(rows.processors.lowest_bits);
    u32 low = 0, shift = 27, num_below = 0;
    while (true) {
        const u32 next = rows.number() + 1;
        u32 mine = 0;
#pragma unroll 1
        for (u32 first = 0; first < HeadOp::kCtaRows; first += 32) {
            const u32 row = first + laneid();
            const float x = row < rows.num_rows() ? load_shared_f32(x_at(rows.role, row)) : -INFINITY, distance = __fadd_rn(x, -largest);
            const u32 range = x > -INFINITY && distance >= lowest ? (key_of(distance) - low) >> shift : ~0u;
#pragma unroll
            for (u32 i = 0; i < 16; ++i) {
                const u32 found = __popc(__ballot_sync(kFullWarp, range == i));
                if (laneid() == i) mine += found;
            }
        }
        u64 counts[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            counts[i] = 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) counts[i] |= static_cast<u64>(__shfl_sync(kFullWarp, mine, 4 * i + j)) << (12 * j);
        }
        rows.quads().publish(rows.role.cta, next, counts[0], counts[1], counts[2], counts[3]);
        rows.set_number(next);
        // Each thread adds up few sources: 16 bits for each range.
        static_assert((kNumCtas + 31) / 32 * kRanks * HeadOp::kCtaRows < 65536, "counts of a thread");
        const auto spread = [](u64 word) {
            return (word & 0xfff) | (word & 0xfff000) << 4 | (word & 0xfff000000) << 8 | (word & 0xfff000000000) << 12;
        };
        u32 range = 16;
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) {
            u64 sums[2] = {};
            const auto fold = [&](u32, const ulonglong2& pair) { sums[0] += spread(pair.x), sums[1] += spread(pair.y); };
            if (!rows.quads().collect(rows.role.cta, next, half, rows.role.stopped(), rows.role.shared->peer_notes[1], fold)) return false;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 found = __reduce_add_sync(kFullWarp, static_cast<u32>(sums[i / 4] >> (16 * (i % 4))) & 0xffff);
                if (range != 16) continue;
                if (num_below + found >= rows.processors.top_k) range = 8 * half + i, mine = found;
                else num_below += found;
            }
        }
        if (range == 16) return true;  // there are fewer: all count (only the first search ends so)
        low += range << shift;
        if (num_below + mine == rows.processors.top_k) {
            bound = low + (1u << shift);
            return true;
        }
        if (shift == 0) {
            bound = low, rest = (rows.processors.top_k - num_below) * mass_of(-__uint_as_float(low));
            return true;
        }
        shift = shift > 4 ? shift - 4 : 0;
    }
}

// Mass before which a token must stand to be among top-p.
__device__ __forceinline__ u64 mass_limit(const OwnRows& rows) {
    uint2 halves;
    load_shared(rows.role.base + KOG_OFFSET(top_p_limit), halves);
    return join_halves(halves.x, halves.y);
}
__device__ __forceinline__ void set_mass_limit(const OwnRows& rows, u64 limit) {
    __syncwarp();
    store_shared(rows.role.base + KOG_OFFSET(top_p_limit), make_uint2(static_cast<u32>(limit), static_cast<u32>(limit >> 32)));
    __syncwarp();
}
// Draw: the best of all is the token if the filters keep it. If not, they keep nothing behind it in the order either, so the
// next one is the best of those before it. False: leave.
__device__ __forceinline__ bool filter_tokens(const OwnRows& rows, const Offers& offers, Offer& offer) {
    if (offers.first.place == offer.place) return true;  // nothing stands before it
    const float largest = offers.first.value;
    u32 bound = ~0u;
    u64 rest = 0;
    bool has_limit = !(rows.processors.flags & kTopP);
    if (!has_limit && rows.processors.top_k > 0 && !find_top_k(rows, largest, bound, rest)) return false;
    set_mass_limit(rows, has_limit ? ~0ull : rest);  // what top-k adds to the total is kept in its place until that is known
    while (true) {
        Before before;
        if (!count_before(rows, offer, largest, bound, before)) return false;
        if (!has_limit) {  // rounded up
            const u64 total = before.total + mass_limit(rows);
            set_mass_limit(rows, __umul64hi(total, rows.processors.top_p) + (total * rows.processors.top_p != 0));
            has_limit = true;
        }
        const bool in_rest = before.mass < mass_limit(rows) && __fadd_rn(offer.x, -largest) >= __uint_as_float(rows.processors.lowest_bits);
        if (in_rest && rows.processors.top_k == 0) return true;
        if (!collect_tokens(rows, before)) return false;
        if (in_rest && before.num < rows.processors.top_k) return true;
        offer = before.best;
    }
}

// Count the newest token among those said, if it is one of the own rows.
__device__ __forceinline__ void remember_chosen(const OwnRows& rows) {
    if (laneid() == 0 && source_of(rows.chosen_place()) == rows.own_source()) {
        u32* said = reinterpret_cast<u32*>(rows.processors.history_ptr) + rows.first_row() + row_of(rows.chosen_place());
        store_relaxed_u32(said, load_relaxed_u32(said) + 1);
    }
    __syncwarp();
}

// Whether the successor of the token at `position` may not end the answer, if there is another one.
__device__ __forceinline__ bool is_too_early(const OwnRows& rows, u32 position) {
    return position + 1 - rows.role.num_prompt < rows.processors.min_tokens && rows.params.num_stop_ids > 0;
}
// Choose the successor of the pass's token, unless the prompt has it; or say why there is none. False: leave.
__device__ __forceinline__ bool choose_token(const OwnRows& rows, u32& finish) {
    Offers offers;
    float largest_logit = -INFINITY;
    const u32 now = rows.turn(), position = rows.position();
    if (rows.chooses(now)) {
        if ((rows.processors.flags & kMasked) && !rows.fetch_mask(now, position + 1 - rows.role.num_prompt, offers.flags)) return false;
        if (!rows.look_at_rows(now, position, is_too_early(rows, position), offers, largest_logit)) return false;
    } else if (!mbar_wait(rows.role.stopped(), rows.role.base + KOG_OFFSET(pass_ended), now & 1)) {
        return false;
    }
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
        const bool has_logits = rows.chooses(rows.turn());
        if (!exchange_offers(rows, offers, has_logits && (rows.processors.flags & kReports), largest_logit, rows.report_tag())) return false;
        if (!is_first || !has_logits || !is_too_early(rows, rows.position()) || offers.flags != 0 || offers.best.place != kNoPlace) break;
        rows.look_at_end_ids(rows.position(), offers);  // nothing else is left
    }
    if (offers.flags & kCancelFlag) finish = kCancelledFinish;
    else if (!rows.chooses(rows.turn())) return true;
    else if (offers.flags & kNoMaskFlag) finish = kNoMaskFinish;
    else if (offers.flags & kFaultFlag) finish = kNumericalFaultFinish;
    else if (offers.best.place == kNoPlace) finish = kNoMaskFinish;
    else if ((rows.processors.flags & kFiltered) && !filter_tokens(rows, offers, offers.best)) return false;
    store_shared(rows.role.base + KOG_OFFSET(chosen_place), offers.best.place);
    __syncwarp();
    return true;
}

}  // namespace kog
