// What ranks push into each other's memory, and how it is collected: 64-bit words with their own epoch, row owner to row owner.
//
// Memory contract. A word is written by one thread of one rank with a relaxed system-scope store into the reader's heap, and polled
// there, in local memory, with relaxed system-scope loads: no fence, no flag, nothing remote is ever read. Two words may share one
// 16-byte store; each has its tag, so nothing rests on 16 bytes arriving at once. Words may arrive in any order. A slot may be
// written again when the writer knows, from data it has received, that the reader is done with it (see docs/kccl.md).
//
// `KogPeers` travels by value in the kernel's parameters. `kRanks` is a compile-time number: loops over ranks are straight code, and
// with one rank nothing is left of them. After a wait that returned false the caller must unwind without publishing.
#pragma once
#include "peer_wait.cuh"
#include "tree.cuh"

namespace kog {

// A mailbox of the symmetric heap, as collectives/mailbox.py places it: [slot][source rank][row_words].
struct Mailbox {
    u32 first_word, row_words, num_slots, index;

    // First word of a row of a slot. The own row's place is the same on every rank.
    __device__ __forceinline__ u64 row(u32 num_ranks, u32 slot, u32 source) const {
        return first_word + static_cast<u64>(slot * num_ranks + source) * row_words;
    }
    // The same rows, from so many of their words on.
    __device__ __forceinline__ Mailbox behind(u32 num_words) const { return {first_word + num_words, row_words, num_slots, index}; }
};

__device__ __forceinline__ u64* heap_of(const KogPeers& peers, u32 rank) { return reinterpret_cast<u64*>(peers.heap_ptr[rank]); }

// The i-th peer of this rank (0 <= i < kRanks - 1). Every rank begins with another one.
template <int kRanks>
__device__ __forceinline__ u32 peer_of(const KogPeers& peers, u32 i) {
    const u32 peer = peers.rank + 1 + i;
    return peer < kRanks ? peer : peer - kRanks;
}

// Push kCount payloads to word `at` (even) and the following of every peer's heap. Called by a full warp; payload i is held by
// thread i * kStride. `count` <= kCount of them exist, an even number. Does not wait.
template <int kRanks, int kCount, int kStride = 1>
__device__ __forceinline__ void publish_to_peers(const KogPeers& peers, u64 at, u32 payload, u32 count, u32 tag) {
    static_assert(kCount % 2 == 0 && kCount * kStride <= 32, "two words travel in one store");
    if constexpr (kRanks > 1) {
        constexpr u32 kPairs = kCount / 2, kUnits = kPairs * (kRanks - 1);
#pragma unroll
        for (u32 first = 0; first < kUnits; first += 32) {
            const u32 i = first + laneid(), pair = i % kPairs;
            const u32 low = __shfl_sync(kFullWarp, payload, 2 * pair * kStride);
            const u32 high = __shfl_sync(kFullWarp, payload, (2 * pair + 1) * kStride);
            if (i < kUnits && 2 * pair < count)
                store_system_x2(heap_of(peers, peer_of<kRanks>(peers, i / kPairs)) + at + 2 * pair, make_value_word(low, tag),
                                make_value_word(high, tag));
        }
    }
}

// One word from each peer, for one thread: read early, checked late.
template <int kRanks>
struct PeerWords {
    static constexpr int kPeers = kRanks - 1;
    u64 word[kPeers > 0 ? kPeers : 1];  // in the order of ranks, the own one left out

    static __device__ __forceinline__ u32 source(u32 rank, u32 i) { return i + (i >= rank); }

    // Read this thread's word of every peer's row; `row_of_0` is its place in rank 0's row. Never waits.
    __device__ __forceinline__ void load(const u64* row_of_0, u32 row_words, u32 rank) {
#pragma unroll
        for (int i = 0; i < kPeers; ++i) word[i] = load_system(row_of_0 + source(rank, i) * row_words);
    }
    __device__ __forceinline__ bool ready(u32 tag) const {
        u32 wrong = 0;
#pragma unroll
        for (int i = 0; i < kPeers; ++i) wrong |= static_cast<u32>(word[i] >> 32) ^ tag;
        return wrong == 0;
    }
    // Payload of rank r, which is a compile-time number; `own` is this rank's.
    __device__ __forceinline__ u32 payload(int r, u32 rank, u32 own) const {
        const u32 before = r < kPeers ? static_cast<u32>(word[r < kPeers ? r : 0]) : 0;
        const u32 after = r > 0 ? static_cast<u32>(word[r > 0 ? r - 1 : 0]) : 0;
        return r == static_cast<int>(rank) ? own : r < static_cast<int>(rank) ? before : after;
    }
    // Sum over ranks in the fixed tree. `kRoundsHalves`: of both halves' sums, each rounded as a pair word would.
    template <bool kRoundsHalves = false>
    __device__ __forceinline__ float total(u32 rank, float own) const {
        float part[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) part[r] = __uint_as_float(payload(r, rank, __float_as_uint(own)));
        if constexpr (kRoundsHalves && kRanks % 2 == 0) {
            float first[kRanks / 2], second[kRanks / 2];
#pragma unroll
            for (int r = 0; r < kRanks / 2; ++r) first[r] = part[r], second[r] = part[r + kRanks / 2];
            return rounded_half(tree_sum<kRanks / 2>(first)) + rounded_half(tree_sum<kRanks / 2>(second));
        }
        return tree_sum<kRanks>(part);
    }
};

// Wait until every peer's word has the tag. Called by a full warp; thread i < count has word i of the rows, and `got` may have been
// loaded already. False after a stop, the same in all threads.
template <int kRanks>
__device__ __forceinline__ bool wait_for_peers(PeerWords<kRanks>& got, const u64* rows, u32 row_words, u32 rank, u32 count, u32 tag,
                                               u32 stopped, PeerNote& note, const PeerPlace& place) {
    if constexpr (kRanks == 1) return true;
    const bool mine = laneid() < count;
    u32 rounds = 0;
    while (!__all_sync(kFullWarp, !mine || got.ready(tag))) {
        if (must_leave(stopped)) return false;
        if (++rounds == kRoundsBeforeNote && laneid() == 0) begin_note(note, tag | 1u << 31, place, tag, rows, count, kRanks, rank, row_words);
        if (mine) got.load(rows + laneid(), row_words, rank);
    }
    if (rounds >= kRoundsBeforeNote && laneid() == 0) note.waiting = 0;
    return true;
}

// ---- sums: what the owner of rows does ----

// Push the own lanes' sums of kRows rows to the same rows' owners on every peer. Called by a full warp; thread i < kRows holds row
// `first_row` + i (both even), of which those below `num_rows` exist. `tag`: the message's epoch; slot: the epoch modulo the slots.
template <int kRanks, int kRows>
__device__ __forceinline__ void publish_sum_to_peers(const KogPeers& peers, const Mailbox& box, u32 slot, u32 first_row, u32 num_rows,
                                                     float own_sum, u32 tag) {
    const u32 count = first_row < num_rows ? num_rows - first_row : 0;
    publish_to_peers<kRanks, kRows>(peers, box.row(kRanks, slot, peers.rank) + first_row, __float_as_uint(own_sum), count, tag);
}

// The same rows' sums from the peers: `load` early, `total` when they are needed (delayed), or at once (blocking).
template <int kRanks, int kRows>
struct SumFromPeers {
    PeerWords<kRanks> got;
    const u64* rows;
    u32 count, slot;

    // Where they arrive. Arguments as in `publish_sum_to_peers`. Who has loaded long ago calls it again rather than keep the place.
    __device__ __forceinline__ void locate(const KogPeers& peers, const Mailbox& box, u32 slot_, u32 first_row, u32 num_rows) {
        if constexpr (kRanks == 1) return;
        slot = slot_, count = first_row < num_rows ? min(num_rows - first_row, static_cast<u32>(kRows)) : 0;
        rows = heap_of(peers, peers.rank) + box.row(kRanks, slot, 0) + first_row;
    }
    // Start reading; never waits.
    __device__ __forceinline__ void load(const KogPeers& peers, const Mailbox& box, u32 slot_, u32 first_row, u32 num_rows) {
        if constexpr (kRanks == 1) return;
        locate(peers, box, slot_, first_row, num_rows);
        if (laneid() < count) got.load(rows + laneid(), box.row_words, peers.rank);
    }
    // The sum over ranks of each thread's row, in the fixed tree; `own_sum` is this rank's part, as it was published. False: leave.
    template <bool kRoundsHalves = false>
    __device__ __forceinline__ bool total(const KogPeers& peers, const Mailbox& box, float own_sum, u32 tag, u32 stopped, PeerNote& note,
                                          float& sum) {
        sum = own_sum;
        if constexpr (kRanks == 1) return true;
        const PeerPlace place{kCollectOp, box.index, slot};
        if (!wait_for_peers<kRanks>(got, rows, box.row_words, peers.rank, count, tag, stopped, note, place)) return false;
        if (laneid() < count) sum = got.template total<kRoundsHalves>(peers.rank, own_sum);
        return true;
    }
};

// Load and total in one: for blocking layers.
template <int kRanks, int kRows>
__device__ __forceinline__ bool collect_total(const KogPeers& peers, const Mailbox& box, u32 slot, u32 first_row, u32 num_rows,
                                              float own_sum, u32 tag, u32 stopped, PeerNote& note, float& sum) {
    SumFromPeers<kRanks, kRows> from;
    from.load(peers, box, slot, first_row, num_rows);
    return from.total(peers, box, own_sum, tag, stopped, note, sum);
}

// The same of kCount vectors, the words of which are `apart` in the mailbox's rows, asked for at once. `sums`: the own parts, as they
// were published, and then the sums over ranks. False: leave.
template <int kRanks, int kRows, bool kRoundsHalves, int kCount>
__device__ __forceinline__ bool collect_totals(const KogPeers& peers, const Mailbox& box, u32 slot, u32 apart, u32 first_row, u32 num_rows,
                                               float (&sums)[kCount], u32 tag, u32 stopped, PeerNote& note) {
    const u32 count = first_row < num_rows ? min(num_rows - first_row, static_cast<u32>(kRows)) : 0;
    const u64* rows = heap_of(peers, peers.rank) + box.row(kRanks, slot, 0) + first_row;
    const bool mine = laneid() < count;
    PeerWords<kRanks> got[kCount];
    u32 rounds = 0;
    while (true) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (mine) got[i].load(rows + i * apart + laneid(), box.row_words, peers.rank);
        u32 missing = kCount;  // the first vector that is
#pragma unroll
        for (int i = kCount - 1; i >= 0; --i)
            if (__any_sync(kFullWarp, mine && !got[i].ready(tag))) missing = i;
        if (missing == kCount) break;
        if (must_leave(stopped)) return false;
        if (++rounds % kRoundsBeforeNote == 0 && laneid() == 0)
            begin_note(note, tag | 1u << 31, {kCollectOp, box.index, slot}, tag, rows + missing * apart, count, kRanks, peers.rank, box.row_words);
    }
    if (rounds >= kRoundsBeforeNote && laneid() == 0) note.waiting = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (mine) sums[i] = got[i].template total<kRoundsHalves>(peers.rank, sums[i]);
    return true;
}

// ---- vectors of pair words: what every thread block of every rank reads (the streams before the LM head) ----

// Write kCount values (threads 0 .. kCount - 1, a multiple of 4) as pair words into kReplicas copies of a vector on every rank, this
// one included. `at`: first word of copy 0, the same in all heaps; `stride_words`: from copy to copy. Called by a full warp.
template <int kRanks, int kCount, int kReplicas>
__device__ __forceinline__ void publish_vector_to_all(const KogPeers& peers, u64 at, u32 stride_words, u32 first_row, u32 num_rows,
                                                      float value, u32 tag) {
    constexpr u32 kUnit = kCount % 4 == 0 ? 4 : 2, kQuads = kCount / kUnit, kUnits = kQuads * kReplicas * kRanks;
#pragma unroll 1
    for (u32 first = 0; first < kUnits; first += 32) {
        const u32 i = first + laneid(), quad = i % kQuads, copy = i / kQuads % kReplicas, to = i / (kQuads * kReplicas);
        float v[kUnit];
#pragma unroll
        for (u32 k = 0; k < kUnit; ++k) v[k] = __shfl_sync(kFullWarp, value, quad * kUnit + k);
        const u32 row = first_row + quad * kUnit;
        if (i < kUnits && row < num_rows) {
            const u32 rank = peers.rank + 1 + to;  // the own copy last: it has the shortest way
            u64* word = heap_of(peers, rank < kRanks ? rank : rank - kRanks) + at + copy * stride_words + row / 2;
            if constexpr (kUnit == 4) store_system_x2(word, make_pair_word(v[0], v[1], tag), make_pair_word(v[2], v[3], tag));
            else store_system(word, make_pair_word(v[0], v[1], tag));
        }
    }
}

// ---- candidates: every thread block of every rank tells all of them; one hop, the same decision everywhere ----

// [slot][source rank][replica][thread block][2]: a mailbox whose rows hold `kReplicas` copies of two value words per thread block.
template <int kRanks, int kReplicas>
__device__ __forceinline__ void publish_candidate(const KogPeers& peers, const Mailbox& box, u32 slot, u32 copy_words, u32 cta,
                                                  u32 score_bits, u32 id_bits, u32 tag) {
    static_assert(kRanks * kReplicas <= 32, "one store of the warp");
    const u32 i = laneid(), copy = i % kReplicas, to = peers.rank + 1 + i / kReplicas;
    if (i < kRanks * kReplicas)
        store_system_x2(heap_of(peers, to < kRanks ? to : to - kRanks) + box.row(kRanks, slot, peers.rank) + copy * copy_words + 2 * cta,
                        make_value_word(score_bits, tag), make_value_word(id_bits, tag));
}

// Wait for the candidates of all thread blocks of all ranks and give each to `fold(score_bits, id_bits)`, in no particular order:
// it must not matter. Called by a full warp, which then has to combine what its threads folded. `kTogether`: sources that are asked for at
// a time, which takes registers. False: leave.
template <int kRanks, int kNumCtas, int kTogether = kRanks % 2 == 0 ? 2 : 1, class Fold>
__device__ __forceinline__ bool collect_candidates(const KogPeers& peers, const Mailbox& box, u32 slot, u32 copy_words, u32 copy, u32 tag,
                                                   u32 stopped, PeerNote& note, Fold&& fold) {
    const u64* rows = heap_of(peers, peers.rank) + box.row(kRanks, slot, 0) + copy * copy_words;
    u32 pending = (1u << kRanks) - 1, rounds = 0;
    constexpr int kMany = (kNumCtas + 31) / 32;
    while (pending) {
#pragma unroll 1
        for (u32 first = 0; first < kRanks; first += kTogether) {
            if (!(pending >> first & ((1u << kTogether) - 1))) continue;
            ulonglong2 words[kTogether][kMany];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
#pragma unroll
                for (int k = 0; k < kMany; ++k)
                    if (32 * k + laneid() < kNumCtas) words[i][k] = load_system_x2(rows + (first + i) * box.row_words + 2 * (32 * k + laneid()));
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                bool ready = true;
#pragma unroll
                for (int k = 0; k < kMany; ++k)
                    if (32 * k + laneid() < kNumCtas)
                        ready = ready && value_has_tag(words[i][k].x, tag) && value_has_tag(words[i][k].y, tag);
                if (!__all_sync(kFullWarp, ready) || !(pending >> (first + i) & 1)) continue;
                pending &= ~(1u << (first + i));
#pragma unroll
                for (int k = 0; k < kMany; ++k)
                    if (32 * k + laneid() < kNumCtas) fold(static_cast<u32>(words[i][k].x), static_cast<u32>(words[i][k].y));
            }
        }
        if (pending && must_leave(stopped)) return false;
        if (++rounds == kRoundsBeforeNote && laneid() == 0)
            begin_note(note, tag | 1u << 31, {kCollectOp, box.index, slot}, tag, rows, 2 * kNumCtas, kRanks, kNoRow, box.row_words);
    }
    if (rounds >= kRoundsBeforeNote && laneid() == 0) note.waiting = 0;
    return true;
}

}  // namespace kog
