// Exchanges of all thread blocks of all ranks with all: four words from each, which every warp that collects them combines for itself,
// so that all decide alike and nobody waits for a decision to come back. Used for choosing a token (workers/phases/choose.cuh).
//
// A quad word is 56 bits of payload and an 8-bit tag, the number of the exchange. The four are two pairs; those of all thread blocks
// lie together, so that who needs the first pairs only reads half as much. Memory contract as in peers.cuh, and: exchanges are
// numbered without gaps, all thread blocks take part in each of them, and number n uses slot n % 2. Who publishes number n + 2 has
// collected n + 1 from all, each of whom had collected of n before what it wanted: so the words that it overwrites are read by nobody
// any more, and what stands in a slot before n is always n - 2 (or 0, before number 1 or 2), which 8 bits tell apart.
#pragma once
#include "peers.cuh"

namespace kog {

constexpr u32 kQuadTagBit = 56;

__device__ __forceinline__ u64 make_quad_word(u64 payload, u32 tag) { return payload | static_cast<u64>(tag) << kQuadTagBit; }
__device__ __forceinline__ bool quad_has_tag(u64 word, u32 tag) { return static_cast<u32>(word >> kQuadTagBit) == (tag & 0xffu); }
// Its upper eight bits are 0 if the word has the tag.
__device__ __forceinline__ u32 tag_difference(u64 word, u32 tag) { return static_cast<u32>(word >> 32) ^ tag << 24; }
__device__ __forceinline__ u64 payload_of(u64 word) { return word & ((1ull << kQuadTagBit) - 1); }

// Where quads lie: [slot][source rank][replica][first or second pair][thread block][2], in every rank's heap; with one rank in its own
// memory at `local`. Behind the replicas of a source rank there is one more word of each thread block (`aside`).
template <int kRanks, int kReplicas, int kNumCtas>
struct Quads {
    static constexpr u32 kPairWords = 2 * kNumCtas, kCopyWords = (2 * kPairWords + 15) / 16 * 16, kMany = (kNumCtas + 31) / 32;
    static constexpr u32 kTogether = kRanks % 2 == 0 ? 2 : 1;  // sources that are asked for at a time
    static_assert(kRanks <= 8, "ranks");

    const KogPeers& peers;
    u64* local;
    Mailbox box;

    __device__ __forceinline__ u64* row(u32 rank, u32 slot, u32 source) const {
        return (kRanks > 1 ? heap_of(peers, rank) : local) + box.row(kRanks, slot, source);
    }
    // The first thread block's pair among the first (0) or second (1) ones of a source rank, in the copy that thread block `cta` reads.
    __device__ __forceinline__ const u64* pairs(u32 cta, u32 number, u32 source, u32 half) const {
        return row(peers.rank, number & 1, source) + cta % kReplicas * kCopyWords + half * kPairWords;
    }
    // What a thread block tells everybody beside an exchange: a value word, in two slots. The caller sees to it that a slot is written again
    // only when all have read it, or do not want it.
    __device__ __forceinline__ u64* aside(u32 rank, u32 slot, u32 source, u32 cta) const {
        return row(rank, slot, source) + kReplicas * kCopyWords + cta;
    }

    // Send this thread block's payloads. Called by a full warp, the same in all threads; does not wait. Second pairs that nobody wants are
    // sent, too: what is left in a slot is always of number n - 2.
    __device__ __forceinline__ void publish(u32 cta, u32 number, u64 a, u64 b, u64 c, u64 d) const {
        constexpr u32 kStores = 2 * kReplicas * kRanks;
        static_assert(kStores <= 32, "one store of the warp");
        const u32 i = opaque(laneid()), half = i & 1, copy = i / 2 % kReplicas, to = peers.rank + 1 + i / (2 * kReplicas);
        const u64 first = make_quad_word(half ? c : a, number), second = make_quad_word(half ? d : b, number);
        if (i < kStores)
            store_system_x2(row(to < kRanks ? to : to - kRanks, number & 1, peers.rank) + copy * kCopyWords + half * kPairWords + 2 * cta,
                            first, second);
    }

    // Wait for the first (0) or second (1) pairs of all thread blocks of all ranks and give each to `fold(source, pair)` in one of the
    // warp's threads, in no particular order; source = rank * kNumCtas + thread block. False: leave.
    template <class Fold>
    __device__ __forceinline__ bool collect(u32 cta, u32 number, u32 half, u32 stopped, PeerNote& note, Fold&& fold) const {
        u32 pending = (1u << kRanks) - 1, rounds = 0;
        while (pending) {
#pragma unroll 1
            for (u32 source = 0; source < kRanks; source += kTogether) {
                if (!(pending >> source & ((1u << kTogether) - 1))) continue;
                const u64* words = pairs(cta, number, source, half) + 2 * opaque(laneid());  // not kept from one exchange to the next
                ulonglong2 pair[kTogether][kMany];
#pragma unroll
                for (u32 i = 0; i < kTogether; ++i)
#pragma unroll
                    for (u32 k = 0; k < kMany; ++k)
                        if (32 * k + laneid() < kNumCtas) pair[i][k] = load_system_x2(words + i * box.row_words + 64 * k);
#pragma unroll
                for (u32 i = 0; i < kTogether; ++i) {
                    u32 wrong = 0;
#pragma unroll
                    for (u32 k = 0; k < kMany; ++k)
                        if (32 * k + laneid() < kNumCtas) wrong |= tag_difference(pair[i][k].x, number) | tag_difference(pair[i][k].y, number);
                    if (!__all_sync(kFullWarp, wrong >> 24 == 0) || !(pending >> (source + i) & 1)) continue;
                    pending &= ~(1u << (source + i));
#pragma unroll
                    for (u32 k = 0; k < kMany; ++k)
                        if (32 * k + laneid() < kNumCtas) fold((source + i) * kNumCtas + 32 * k + laneid(), pair[i][k]);
                }
            }
            if (pending && must_leave(stopped)) return false;
            if (++rounds == kRoundsBeforeNote && laneid() == 0)
                begin_note(note, number | 1u << 31, {kCollectOp, box.index, number & 1}, number & 0xffu, pairs(cta, number, 0, half),
                           kPairWords, kRanks, kNoRow, box.row_words, kQuadTagBit);
        }
        if (rounds >= kRoundsBeforeNote && laneid() == 0) note.waiting = 0;
        return true;
    }
};

}  // namespace kog
