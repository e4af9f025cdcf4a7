// The loader: one thread streams the tape into the ring, ahead of everything, and never looks at what the weights are for.
#pragma once
#include "layout.cuh"

namespace kog {

struct Loader {
    const Role& role;
    const unsigned char* source;
    u64 policy;
    u32 num_issued = 0;
    u32 slot = 0, parity = 1;        // of the next tile: `empty` barriers start as if they had been passed
    u32 landed_slot = 0, landed_parity = 0;

    __device__ __forceinline__ bool issue(u32 bytes) {
        Shared& shared = *role.shared;
        // At most kTilesInFlight copies at a time: a drained ring would refill in one burst, behind which polls queue.
        if (num_issued >= kTilesInFlight) {
            if (!mbar_wait_alone(role.stopped(), role.bar(shared.full[landed_slot]), landed_parity, role.stopped())) return false;
            if (++landed_slot == kNumSlots) landed_slot = 0, landed_parity ^= 1;
        }
        if (!mbar_wait_alone(role.stopped(), role.bar(shared.empty[slot]), parity, role.address(const_cast<u32*>(&shared.finished)))) return false;
        mbar_arrive_expect(role.bar(shared.full[slot]), bytes);
        bulk_load(role.address(shared.ring[slot]), source, bytes, role.bar(shared.full[slot]), policy);
        source += bytes;
        ++num_issued;
        if (++slot == kNumSlots) slot = 0, parity ^= 1;
        return true;
    }
    __device__ __forceinline__ bool issue_tiles(u32 count, u32 bytes) {
        for (u32 i = 0; i < count; ++i)
            if (!issue(bytes)) return false;
        return true;
    }
    __device__ __forceinline__ bool issue_token(const unsigned char* tape, u32 step) {
        source = tape;
#pragma unroll 1
        for (u32 number = 0; number < kNumProducts + (has_head(role, step) ? 1 : 0); ++number) {
            const Place at(number);
            u32 count = HeadOp::kBlocks * HeadOp::kTiles, bytes = HeadOp::kTileBytes;
            if (!at.is_last()) {
                if (at.phase() == 0) count = QkvOp::kBlocks * QkvOp::kTiles, bytes = QkvOp::kTileBytes;
                if (at.phase() == 1) count = OutOp::kBlocks * OutOp::kTiles, bytes = OutOp::kTileBytes;
                if (at.phase() == 2) count = GateUpOp::kBlocks * GateUpOp::kTiles, bytes = GateUpOp::kTileBytes;
                if (at.phase() == 3) count = DownOp::kBlocks * DownOp::kTiles, bytes = DownOp::kTileBytes;
            }
            if (!issue_tiles(count, bytes)) return false;
        }
        return true;
    }
    // Copies still under way write into shared memory: a thread block must not end before they have landed.
    __device__ __forceinline__ void drain() {
        u32 behind = num_issued < kNumSlots ? num_issued : kNumSlots;
        u32 at = slot, at_parity = parity;
        for (u32 i = 0; i < behind; ++i) {
            if (at == 0) at = kNumSlots, at_parity ^= 1;
            --at;
            while (!mbar_try(role.bar(role.shared->full[at]), at_parity ^ 1)) {  // ends: memory answers every copy
            }
        }
    }
};

__device__ __forceinline__ void load_tape(const Role& role, const unsigned char* tape, u32 num_steps) {
    if (laneid() != 0) return;
    Loader loader{role, tape, evict_first_policy()};
    for (u32 step = 0; step < num_steps; ++step)
        if (!loader.issue_token(tape, step)) break;
    loader.drain();
}

}  // namespace kog
