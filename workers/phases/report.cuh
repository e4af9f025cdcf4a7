// Log-probabilities of a chosen token: made by the sampling warps while the layers of the next token run, merged by rank 0's first
// thread block, and written to the host as integers and logits, from which it makes the numbers (decode/sampling/logprobs.py).
//
// Every thread block sends its mass. Of the best tokens only those thread blocks send a list whose own best one is among the first
// `num_top` of such: nothing that another one has can be among the first `num_top` of all. Words carry the number of the token. They
// are written once per token; rank 0's first thread block has read them before it takes part in the next token's exchanges, which
// everybody waits for before the next report.
#pragma once
#include "choose.cuh"

namespace kog {

constexpr u32 kReportHeader = 4, kReportList = 2 * kMaxTop;  // words of a thread block

struct Reporter {
    const Chooser& chooser;
    const KogShapingParams& shaping;
    const Role& role;

    __device__ __forceinline__ u32 num_top() const { return shaping.num_top; }
    // In rank 0's memory: the headers, then the lists, of a rank's thread blocks.
    __device__ __forceinline__ u64* row(u32 source_rank) const {
        u64* local = reinterpret_cast<u64*>(chooser.params.words_ptr) + kReportOffset;
        return (kRanks > 1 ? heap_of(chooser.peers, 0) : local) + report_box().row(kRanks, 0, source_rank);
    }
    __device__ __forceinline__ u64* header(u32 source) const { return row(source / kNumCtas) + kReportHeader * (source % kNumCtas); }
    __device__ __forceinline__ u64* list(u32 source) const {
        return row(source / kNumCtas) + kReportHeader * kNumCtas + kReportList * (source % kNumCtas);
    }
    __device__ __forceinline__ float logit_of(u32 row) const {
        return __uint_as_float(load_relaxed_u32(reinterpret_cast<const u32*>(shaping.raw_ptr) + row));
    }
    // The best token of a thread block by its logit, as it said with the exchange.
    __device__ __forceinline__ Element best_of(u32 source) const {
        const u64 word = load_relaxed(reinterpret_cast<const u64*>(shaping.maxima_ptr) + role.cta * (kRanks * kNumCtas) + source);
        return {float_of(word), place_of(source, beside_of(word) & kNoRowOfCta)};
    }
    __device__ __forceinline__ bool lists(u32 source, const Element& last) const {
        const Element found = best_of(source);
        return found.place != kNoPlace && !is_before(last, found);
    }

    // Wait for a pair of value words. Called by a full warp, each thread with its own; `mine`: it has one. False: leave.
    __device__ __forceinline__ bool wait_pair(const u64* words, bool mine, u32 tag, ulonglong2& pair) const {
        pair = make_ulonglong2(0, 0);
        while (true) {
            if (mine) pair = load_system_x2(words);
            if (__all_sync(kFullWarp, !mine || (value_has_tag(pair.x, tag) && value_has_tag(pair.y, tag)))) return true;
            if (must_leave(role.stopped())) return false;
        }
    }

    // What every thread block does. `tag`: number of the token.
    __device__ __forceinline__ bool report(u32 tag, u32 index, u32 request_tag) {
        const u32 own = opaque(chooser.own_source()), first_row = chooser.first_row(), num_rows = chooser.num_rows();
        const float largest = chooser.largest_logit();
        u64 mass = 0;
#pragma unroll 1
        for (u32 row = laneid(); row < num_rows; row += 32) mass += mass_of(__fadd_rn(logit_of(first_row + row), -largest));
        mass = sum_of_warp(mass);
        const float chosen = source_of(chooser.chosen_place()) == own ? logit_of(first_row + row_of(chooser.chosen_place())) : 0.0f;
        const u32 low = laneid() == 0 ? static_cast<u32>(mass) : __float_as_uint(chosen), high = laneid() == 0 ? mass >> 32 : 0;
        if (laneid() < 2) store_system_x2(header(own) + 2 * laneid(), make_value_word(low, tag), make_value_word(high, tag));
        Element last{INFINITY, 0};  // the last of the first `num_top` thread blocks
        for (u32 i = 0; i < num_top(); ++i) {
            const Element next = next_in_order(last, kRanks * kNumCtas, [&](u32 source) { return best_of(source); });
            last = next;
            if (next.place == kNoPlace) break;  // there are fewer, so nothing is left out
        }
        if (num_top() > 0 && lists(own, last)) {
            Element found{INFINITY, 0};
            for (u32 i = 0; i < num_top() && found.place != kNoPlace; ++i) {
                found = next_in_order(found, num_rows, [&](u32 row) { return Element{logit_of(first_row + row), place_of(own, row)}; });
                if (found.place == kNoPlace || is_before(last, found)) found = no_element();  // the end of the list
                if (laneid() == 0)
                    store_system_x2(list(own) + 2 * i, make_value_word(__float_as_uint(found.value), tag), make_value_word(found.place, tag));
            }
        }
        return !chooser.is_root() || merge(tag, last, reinterpret_cast<u64*>(shaping.report_ptr) + index * kReportEntry, request_tag);
    }

    // What rank 0's first thread block does besides: one entry of the host's ring, each word with the request's tag.
    __device__ __forceinline__ bool merge(u32 tag, const Element& last, u64* entry, u32 request_tag) {
        u64 mass = 0;
        ulonglong2 pair;
#pragma unroll 1
        for (u32 first = 0; first < kRanks * kNumCtas; first += 32) {
            const bool mine = first + laneid() < kRanks * kNumCtas;
            if (!wait_pair(header(mine ? first + laneid() : 0), mine, tag, pair)) return false;
            mass += (pair.x & 0xffffffffu) | pair.y << 32;
        }
        mass = sum_of_warp(mass);
        if (!wait_pair(header(source_of(chooser.chosen_place())) + 2, true, tag, pair)) return false;
        const u32 words[4] = {static_cast<u32>(mass), static_cast<u32>(mass >> 32), __float_as_uint(chooser.largest_logit()), static_cast<u32>(pair.x)};
        if (laneid() < 2)
            store_system_x2(entry + 2 * laneid(), make_value_word(laneid() ? words[2] : words[0], request_tag),
                            make_value_word(laneid() ? words[3] : words[1], request_tag));
        if (num_top() == 0) return true;

        // Each thread follows one list.
        u32 source = kNoPlace, num_lists = 0;
#pragma unroll 1
        for (u32 first = 0; first < kRanks * kNumCtas; first += 32) {
            const bool one = first + laneid() < kRanks * kNumCtas && lists(first + laneid(), last);
            u32 left = __ballot_sync(kFullWarp, one);
            while (left) {
                if (num_lists++ == laneid()) source = first + __ffs(left) - 1;
                left &= left - 1;
            }
        }
        u32 at = 0;
        bool moves = source != kNoPlace;
        Element head = no_element();
#pragma unroll 1
        for (u32 i = 0; i < num_top(); ++i) {
            if (!wait_pair(list(moves ? source : 0) + 2 * at, moves, tag, pair)) return false;
            if (moves) head = {__uint_as_float(static_cast<u32>(pair.x)), static_cast<u32>(pair.y)}, ++at;
            const Element best = first_of_warp(head);
            moves = best.place != kNoPlace && head.place == best.place;
            if (laneid() == 0)
                store_system_x2(entry + 4 + 2 * i, make_value_word(__float_as_uint(best.value), request_tag),
                                make_value_word(best.place == kNoPlace ? ~0u : id_of(shaping, best.place), request_tag));
        }
        return true;
    }
};

}  // namespace kog
