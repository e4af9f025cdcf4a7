// The loader: one thread streams the tape into the ring, ahead of everything, and never looks at what the weights are for.
#pragma once
#include "layout.cuh"

namespace kog {

__device__ __forceinline__ void init_ring(const Role& role) {
    for (int i = 0; i < kRingPieces; ++i) {
        mbar_init(role.base + KOG_OFFSET(full[i]), 1);
        mbar_init(role.base + KOG_OFFSET(empty[i]), kMatrixWarps / kPieces);
    }
}

// Reading ahead of the ring into L2. Where lanes wait for each other, in layers that sum blocking, the ring is full and memory would stand
// still; what it reads meanwhile comes from L2 later. A bounded number of slots, one at a time: nothing tells when they have come. All thread
// blocks read about the same place of the tape, and each asks for its share of what comes next: its own tile, where tiles fill their slots.
struct Ahead {
    static constexpr u32 kShares = kNumCtas * kSlotBytes, kCycles = 1000;  // of all thread blocks; as long as memory takes for them
    const unsigned char *copied, *asked;  // to where, in the tapes of all: tiles that were copied; shares that memory was asked for
    const unsigned char* end;             // of what the present token reads
    bool is_on = false;                   // in the present layer
    u32 asked_cycles = 0;                 // when memory was last asked for anything

    __device__ __forceinline__ void begin(const unsigned char* from, const unsigned char* to) { copied = asked = from, end = to; }
    __device__ __forceinline__ void read(u32 cta) {
        if (asked >= end || asked - copied >= kAheadTiles * kShares || clock_cycles() - asked_cycles < kCycles) return;
        const unsigned char* from = asked + cta * kSlotBytes;
        if (from < end) bulk_prefetch(from, static_cast<u32>(min(u64{kSlotBytes}, static_cast<u64>(end - from))));
        asked += kShares;
        asked_cycles = clock_cycles();
    }
    __device__ __forceinline__ void copy(u32 tile_bytes) {
        copied += kNumCtas * tile_bytes;
        if (asked < copied) asked = copied, asked_cycles = clock_cycles();  // memory was asked for the rest
    }
};

// Copies are of pieces of tiles, so that how much is under way can be bounded finely: less leaves memory idle, and with more the polls
// of those who wait for words queue behind it.
struct Loader {
    const Role& role;
    const unsigned char* source;  // of the next copy
    u64 policy;
    u32 num_issued = 0, num_landed = 0;
    u32 piece = 0, parity = 1;  // of the next copy: `empty` barriers start as if they had been passed
    u32 landed_piece = 0, landed_parity = 0;
    Ahead ahead;

    // Until the slot of the next copy is empty. False: leave.
    __device__ __forceinline__ bool wait_for_room() {
        const u32 bar = role.base + KOG_OFFSET(empty[piece]), finished = role.base + KOG_OFFSET(finished);
        if constexpr (kAheadTiles > 0) {
            while (ahead.is_on && !mbar_test(bar, parity)) {
                if (load_shared_u32(role.stopped()) || load_shared_u32(finished)) return false;
                ahead.read(role.cta);
            }
        }
        return mbar_wait_alone(role.stopped(), bar, parity, finished);
    }
    __device__ __forceinline__ u32 next_to_land() const { return role.base + KOG_OFFSET(full[landed_piece]); }
    __device__ __forceinline__ void count_landed() {
        ++num_landed;
        if (++landed_piece == kRingPieces) landed_piece = 0, landed_parity ^= 1;
    }
    __device__ __forceinline__ bool issue(u32 to, u32 bytes) {
        if (!wait_for_room()) return false;
        const u32 full = role.base + KOG_OFFSET(full[piece]);
        mbar_arrive_expect(full, bytes);
        // All is prepared when the turn comes: between a landing and the next copy memory has less to do.
        while (num_issued - num_landed >= kPiecesInFlight) {
            if (!mbar_wait_alone(role.stopped(), next_to_land(), landed_parity, role.stopped())) return false;
            count_landed();
        }
        bulk_load(to, source, bytes, full, policy);
        source += bytes;
        ++num_issued;
        if (++piece == kRingPieces) piece = 0, parity ^= 1;
        return true;
    }
    // Of a product: `source` is where its first tiles lie, those of all thread blocks side by side. It becomes the next product's.
    __device__ __forceinline__ bool issue_tiles(u32 count, u32 bytes) {
        source += role.cta * bytes;
#pragma unroll 1
        for (u32 i = 0; i < count; ++i) {
            u32 to = role.base + KOG_OFFSET(ring) + piece / kPieces * kSlotBytes;
#pragma unroll
            for (u32 k = 0; k < kPieces; ++k, to += bytes / kPieces)
                if (!issue(to, bytes / kPieces)) return false;
            source += (kNumCtas - 1) * bytes;
            if constexpr (kAheadTiles > 0) ahead.copy(bytes);
        }
        source -= role.cta * bytes;
        return true;
    }
    __device__ __forceinline__ bool issue_token(const unsigned char* tape, u32 step) {
        source = tape + (kHeadOnly ? kNumCtas * kLayerBytes : 0);
        if constexpr (kAheadTiles > 0) ahead.begin(source, tape + kNumCtas * (has_head(role, step) ? kTapeBytes : kLayerBytes));
#pragma unroll 1
        for (u32 number = first_product(); number < kNumProducts + (has_head(role, step) ? kHeadProducts : 0); ++number) {
            const Place at(number);
            u32 count = HeadOp::kBlocks * HeadOp::kTiles, bytes = HeadOp::kTileBytes;
            if (!at.is_last()) {
                if (at.phase() == 0) count = QkvOp::kBlocks * QkvOp::kTiles, bytes = QkvOp::kTileBytes;
                if (at.phase() == 1) count = OutOp::kBlocks * OutOp::kTiles, bytes = OutOp::kTileBytes;
                if (at.phase() == 2) count = GateUpOp::kBlocks * GateUpOp::kTiles, bytes = GateUpOp::kTileBytes;
                if (at.phase() == 3) count = DownOp::kBlocks * DownOp::kTiles, bytes = DownOp::kTileBytes;
            }
            if constexpr (kAheadTiles > 0) ahead.is_on = !at.is_last() && in_mask(kAttentionBlocking | kMlpBlocking, at.layer());
            if (!issue_tiles(count, bytes)) return false;
        }
        return true;
    }
    // Copies still under way write into shared memory: a thread block must not end before they have landed.
    __device__ __forceinline__ void drain() {
        while (num_landed != num_issued) {
            while (!mbar_try(next_to_land(), landed_parity)) {  // ends: memory answers every copy
            }
            count_landed();
        }
    }
};

// `tape`: of all thread blocks, [product][tile][thread block].
__device__ __forceinline__ void load_tape(const Role& role, const unsigned char* tape, u32 num_steps) {
    if (laneid() != 0) return;
    Loader loader{role, tape, evict_first_policy()};
    for (u32 step = 0; step < num_steps; ++step)
        if (!loader.issue_token(tape, step)) break;
    loader.drain();
}

}  // namespace kog
