// Exchanges of all thread blocks of all ranks with all: four words from each, which every warp that collects them combines for itself,
// so that all decide alike and nobody waits for a decision to come back. Used for choosing a token (workers/phases/choose.cuh).
//
// A quad word is 48 bits of payload and a 16-bit tag, the number of the exchange. Memory contract as in peers.cuh, and: exchanges are
// numbered without gaps, all thread blocks take part in each of them, and number n uses slot n % 2. Who publishes number n + 2 has
// collected n + 1 from all, each of whom had collected n before: so the words that it overwrites have been read by everybody, and what
// stands in a slot before n is always n - 2, which 16 bits tell apart.
#pragma once
#include "peers.cuh"

namespace kog {

constexpr u64 kQuadPayload = (1ull << 48) - 1;

__device__ __forceinline__ u64 make_quad_word(u64 payload, u32 tag) { return payload | static_cast<u64>(tag) << 48; }
__device__ __forceinline__ bool quad_has_tag(u64 word, u32 tag) { return static_cast<u32>(word >> 48) == (tag & 0xffffu); }
// Payload of a float and 16 bits beside it.
__device__ __forceinline__ u64 join_float(float value, u32 beside) { return static_cast<u64>(__float_as_uint(value)) << 16 | beside; }
__device__ __forceinline__ float float_of(u64 word) { return __uint_as_float(static_cast<u32>(word >> 16)); }
__device__ __forceinline__ u32 beside_of(u64 word) { return static_cast<u32>(word) & 0xffffu; }

// Where quads lie: [slot][source rank][replica][thread block][4], in every rank's heap; with one rank in its own memory at `local`.
template <int kRanks, int kReplicas, int kNumCtas>
struct Quads {
    static constexpr u32 kCopyWords = (4 * kNumCtas + 15) / 16 * 16, kMany = (kNumCtas + 31) / 32;
    static_assert(kRanks <= 8 && kCopyWords % 16 == 0, "ranks");

    const KogPeers& peers;
    u64* local;
    Mailbox box;

    __device__ __forceinline__ u64* row(u32 rank, u32 number, u32 source) const {
        return (kRanks > 1 ? heap_of(peers, rank) : local) + box.row(kRanks, number & 1, source);
    }
    __device__ __forceinline__ const u64* own_copy(u32 cta, u32 number, u32 source) const {
        return row(peers.rank, number, source) + cta % kReplicas * kCopyWords;
    }

    // Send this thread block's payloads a, b, c, d. Called by a full warp, the same in all threads; does not wait.
    __device__ __forceinline__ void publish(u32 cta, u32 number, u64 a, u64 b, u64 c, u64 d) const {
        constexpr u32 kStores = 2 * kReplicas * kRanks;
        static_assert(kStores <= 32, "one store of the warp");
        const u32 i = laneid(), half = i & 1, copy = i / 2 % kReplicas, to = peers.rank + 1 + i / (2 * kReplicas);
        const u64 first = make_quad_word(half ? c : a, number), second = make_quad_word(half ? d : b, number);
        if (i < kStores)
            store_system_x2(row(to < kRanks ? to : to - kRanks, number, peers.rank) + copy * kCopyWords + 4 * cta + 2 * half, first, second);
    }

    // Wait for the quads of all thread blocks of all ranks and give each to `fold(source, first pair, second pair)` in one of the
    // warp's threads, in no particular order; source = rank * kNumCtas + thread block. False: leave.
    // So many quads are read at a time: each takes eight registers.
    template <u32 kBatch = (kRanks > 2 && kMany >= 4 ? 4 : kRanks), class Fold>
    __device__ __forceinline__ bool collect(u32 cta, u32 number, u32 stopped, PeerNote& note, Fold&& fold) const {
        constexpr u32 kBatches = (kMany + kBatch - 1) / kBatch;
        static_assert(kRanks * kBatches <= 32, "one bit for each");
        u32 pending = kRanks * kBatches == 32 ? ~0u : (1u << kRanks * kBatches) - 1, rounds = 0;
        while (pending) {
#pragma unroll 1
            for (u32 i = 0; i < kRanks * kBatches; ++i) {
                if (!(pending >> i & 1)) continue;
                const u32 source = i / kBatches, first_cta = i % kBatches * kBatch * 32 + laneid();
                const u64* quads = own_copy(cta, number, source) + 4 * first_cta;
                ulonglong2 first[kBatch], second[kBatch];
                bool ready = true;
#pragma unroll
                for (u32 k = 0; k < kBatch; ++k)
                    if (first_cta + 32 * k < kNumCtas) first[k] = load_system_x2(quads + 128 * k), second[k] = load_system_x2(quads + 128 * k + 2);
#pragma unroll
                for (u32 k = 0; k < kBatch; ++k)
                    if (first_cta + 32 * k < kNumCtas)
                        ready = ready && quad_has_tag(first[k].x, number) && quad_has_tag(first[k].y, number) &&
                                quad_has_tag(second[k].x, number) && quad_has_tag(second[k].y, number);
                if (!__all_sync(kFullWarp, ready)) continue;
                pending &= ~(1u << i);
#pragma unroll
                for (u32 k = 0; k < kBatch; ++k)
                    if (first_cta + 32 * k < kNumCtas) fold(source * kNumCtas + first_cta + 32 * k, first[k], second[k]);
            }
            if (pending && must_leave(stopped)) return false;
            if (++rounds == kRoundsBeforeNote && laneid() == 0)
                begin_note(note, number | 1u << 31, {kCollectOp, box.index, number & 1}, number & 0xffffu, own_copy(cta, number, 0),
                           4 * kNumCtas, kRanks, kNoRow, box.row_words, 48);
        }
        if (rounds >= kRoundsBeforeNote && laneid() == 0) note.waiting = 0;
        return true;
    }
};

}  // namespace kog
