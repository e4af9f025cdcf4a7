// Log-probabilities of a chosen token: made by the sampling warps while the layers of the next token run, merged by rank 0's first
// thread block, and written to the host as integers and logits, from which it makes the numbers (decode/sampling/logprobs.py).
//
// Every thread block has told all its best logit when it offered its token. It sends its mass. Of the best tokens only those thread blocks
// send a list whose own best one is among the first `num_top` of such: nothing that another one has can be among the first `num_top` of
// all. Words carry the number of the token. They are written once per token; rank 0's first thread block has read them before it takes
// part in the next token's exchanges, which everybody waits for before the next report.
#pragma once
#include "choose.cuh"

namespace kog {

constexpr u32 kReportHeader = 4, kReportList = 2 * kMaxTop;  // words of a thread block
static_assert(kMaxTop <= 32, "each thread merges one list");

// Wait for a pair of value words of each thread block of a rank. Called by a full warp: thread i has those of thread blocks i, i + 32, ...
// `words`: of thread block i; `stride`: from one to the next. False: leave.
constexpr u32 kCtasOfThread = (kNumCtas + 31) / 32;
__device__ __forceinline__ bool wait_for_pairs(u32 stopped, const u64* words, u32 stride, u32 tag, ulonglong2 (&pair)[kCtasOfThread]) {
    while (true) {
        bool ready = true;
#pragma unroll
        for (u32 k = 0; k < kCtasOfThread; ++k)
            if (32 * k + laneid() < kNumCtas) pair[k] = load_system_x2(words + 32 * k * stride);
#pragma unroll
        for (u32 k = 0; k < kCtasOfThread; ++k)
            if (32 * k + laneid() < kNumCtas) ready = ready && value_has_tag(pair[k].x, tag) && value_has_tag(pair[k].y, tag);
        if (__all_sync(kFullWarp, ready)) return true;
        if (must_leave(stopped)) return false;
    }
}

// Each thread block's largest logit, as all have told each other, as `order_of` it: a thread has those of its thread blocks of every rank.
// A place in their order is (order, source), larger orders first, equal ones by source.
struct LargestLogits {
    u32 order[kRanks * kCtasOfThread];

    // `tag`: number of the token. False: leave.
    __device__ __forceinline__ bool load(const OwnRows& rows, u32 tag) {
        while (true) {
            const u32 lane = opaque(laneid());
            bool ready = true;
#pragma unroll
            for (u32 rank = 0; rank < kRanks; ++rank) {
                const u64* words = rows.quads().aside(rows.peers.rank, tag & 1, rank, lane);
#pragma unroll
                for (u32 k = 0; k < kCtasOfThread; ++k) {
                    const bool mine = 32 * k + laneid() < kNumCtas;
                    const u64 word = mine ? load_system(words + 32 * k) : make_value_word(order_of(-INFINITY), tag);
                    ready = ready && value_has_tag(word, tag);
                    order[rank * kCtasOfThread + k] = static_cast<u32>(word);
                }
            }
            if (__all_sync(kFullWarp, ready)) return true;
            if (must_leave(rows.role.stopped())) return false;
        }
    }
    // Go on to the next one of all; false: there is none, and the place stays behind the last.
    __device__ __forceinline__ bool next(u32& last_order, u32& last_source) const {
        u32 mine = order_of(-INFINITY), source_of_mine = kNoPlace;
#pragma unroll
        for (u32 i = 0; i < kRanks * kCtasOfThread; ++i) {
            const u32 source = i / kCtasOfThread * kNumCtas + i % kCtasOfThread * 32 + laneid();
            const bool is_behind = order[i] < last_order || (order[i] == last_order && source > last_source);
            if (is_behind && order[i] > mine) mine = order[i], source_of_mine = source;  // in a thread sources grow
        }
        thread_of_first(mine, source_of_mine);
        last_order = mine, last_source = source_of_mine;
        return source_of_mine != kNoPlace;
    }
};

struct Reporter {
    const OwnRows& rows;
    const KogProcessorParams& processors;
    const Role& role;

    __device__ __forceinline__ u32 num_top() const { return processors.num_top; }
    // In rank 0's memory: the headers, then the lists, of a rank's thread blocks.
    __device__ __forceinline__ u64* row(u32 source_rank) const {
        u64* local = reinterpret_cast<u64*>(rows.params.words_ptr) + opaque(kReportOffset);  // not kept for a whole launch
        return (kRanks > 1 ? heap_of(rows.peers, 0) : local) + report_box().row(kRanks, 0, source_rank);
    }
    __device__ __forceinline__ u64* header(u32 source) const { return row(source / kNumCtas) + kReportHeader * (source % kNumCtas); }
    __device__ __forceinline__ u64* list(u32 source) const {
        return row(source / kNumCtas) + kReportHeader * kNumCtas + kReportList * (source % kNumCtas);
    }
    __device__ __forceinline__ float logit_of(u32 row) const {
        return __uint_as_float(load_relaxed_u32(reinterpret_cast<const u32*>(processors.raw_ptr) + row));
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
        const u32 lane = opaque(laneid()), own = opaque(rows.own_source()), first_row = opaque(rows.first_row()), num_rows = rows.num_rows();
        LargestLogits logits;
        if (!logits.load(rows, tag)) return false;
        u32 last_order = ~0u, last_source = 0;  // the last of the first `num_top` thread blocks, or behind all
        float largest = 0;
        u32 followed = kNoPlace;  // the thread block whose list this thread merges
#pragma unroll 1
        for (u32 i = 0; i == 0 || i < num_top(); ++i) {
            if (!logits.next(last_order, last_source)) break;
            if (i == 0) largest = in_order(last_order);
            if (i == lane) followed = last_source;
        }
        // Whether a token of this thread block, or `is_first`, its first one, is behind the last of those firsts.
        const auto ends_list = [&](const Element& token, bool is_first) {
            const u32 order = order_of(token.value);
            return order < last_order || (order == last_order && (own > last_source || (own == last_source && !is_first)));
        };
        u64 mass = 0;
        Element found = no_element();
#pragma unroll 1
        for (u32 row = lane; row < num_rows; row += 32) {
            const Element one{logit_of(first_row + row), place_of(own, row)};
            if (is_before(one, found)) found = one;
            mass += mass_of(__fadd_rn(one.value, -largest));
        }
        mass = sum_of_warp(mass);
        const float chosen = source_of(rows.chosen_place()) == own ? logit_of(first_row + row_of(rows.chosen_place())) : 0.0f;
        const u32 low = lane == 0 ? static_cast<u32>(mass) : __float_as_uint(chosen), high = lane == 0 ? mass >> 32 : 0;
        if (lane < 2) store_system_x2(header(own) + 2 * lane, make_value_word(low, tag), make_value_word(high, tag));
        found = first_of_warp(found);
        if (num_top() > 0 && found.place != kNoPlace && !ends_list(found, true)) {
#pragma unroll 1
            for (u32 i = 0; i < num_top() && found.place != kNoPlace; ++i) {
                if (i > 0) found = next_in_order(found, num_rows, [&](u32 row) { return Element{logit_of(first_row + row), place_of(own, row)}; });
                if (ends_list(found, i == 0)) found = no_element();
                if (lane == 0)
                    store_system_x2(list(own) + 2 * i, make_value_word(__float_as_uint(found.value), tag), make_value_word(found.place, tag));
            }
        }
        return !rows.is_root() || merge(tag, largest, followed, reinterpret_cast<u64*>(processors.report_ptr) + index * kReportEntry, request_tag);
    }

    // What rank 0's first thread block does besides: one entry of the host's ring, each word with the request's tag.
    __device__ __forceinline__ bool merge(u32 tag, float largest, u32 followed, u64* entry, u32 request_tag) {
        u64 mass = 0;
#pragma unroll 1
        for (u32 rank = 0; rank < kRanks; ++rank) {
            ulonglong2 pair[kCtasOfThread];
            if (!wait_for_pairs(role.stopped(), header(rank * kNumCtas + opaque(laneid())), kReportHeader, tag, pair)) return false;
#pragma unroll
            for (u32 k = 0; k < kCtasOfThread; ++k)
                if (32 * k + laneid() < kNumCtas) mass += (pair[k].x & 0xffffffffu) | pair[k].y << 32;
        }
        mass = sum_of_warp(mass);
        ulonglong2 pair;
        if (!wait_pair(header(source_of(rows.chosen_place())) + 2, true, tag, pair)) return false;
        const u32 words[4] = {static_cast<u32>(mass), static_cast<u32>(mass >> 32), __float_as_uint(largest), static_cast<u32>(pair.x)};
        if (laneid() < 2)
            store_system_x2(entry + 2 * laneid(), make_value_word(laneid() ? words[2] : words[0], request_tag),
                            make_value_word(laneid() ? words[3] : words[1], request_tag));
        u32 at = 0;
        bool moves = followed != kNoPlace;
        Element head = no_element();
#pragma unroll 1
        for (u32 i = 0; i < num_top(); ++i) {
            if (!wait_pair(list(moves ? followed : 0) + 2 * at, moves, tag, pair)) return false;
            if (moves) head = {__uint_as_float(static_cast<u32>(pair.x)), static_cast<u32>(pair.y)}, ++at;
            const Element best = first_of_warp(head);
            moves = best.place != kNoPlace && head.place == best.place;
            if (laneid() == 0)
                store_system_x2(entry + 4 + 2 * i, make_value_word(__float_as_uint(best.value), request_tag),
                                make_value_word(best.place == kNoPlace ? ~0u : id_of(processors, best.place), request_tag));
        }
        return true;
    }
};

}  // namespace kog
