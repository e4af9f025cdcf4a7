// The matrix warps: y = W x for the rows of this thread block. K is split over the warps, so that each needs only its own few values
// of x; the finaliser adds the twelve partial sums in a fixed order. One mma takes eight rows and 32 columns: the upper eight rows of
// its A operand are the first halves of the columns, the lower eight the second; the columns of B are x in two 16-bit parts (high,
// low) of the first half, then of the second. Useful results are column 0 + 1 of the upper rows and column 2 + 3 of the lower rows.
#pragma once
#include "layout.cuh"

namespace kog {

struct Multiplier {
    const Role& role;
    u32 warp, lane;
    u32 slot = 0, slot_parity = 0;
    u32 num_vectors = 0, num_blocks = 0;

    template <class O>
    __device__ __forceinline__ void tile(u32 ring_address, u32 x_address, float (&sums)[O::kRowGroups][4]) {
        uint4 weights[O::kSteps][O::kRowGroups];
        uint2 x[O::kSteps];
#pragma unroll
        for (int step = 0; step < O::kSteps; ++step) {
            load_shared(x_address + step * 128, x[step]);
#pragma unroll
            for (int group = 0; group < O::kRowGroups; ++group) {
                // The last group may have fewer than eight rows; its missing ones are zero.
                const bool whole = group * 8 + 8 <= O::kRows;
                if (whole || (lane >> 2) < O::kRows - group * 8)
                    load_shared(ring_address + step * O::kRows * 64 + group * 512, weights[step][group]);
                else
                    weights[step][group] = make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int step = 0; step < O::kSteps; ++step)
#pragma unroll
            for (int group = 0; group < O::kRowGroups; ++group) {
                const uint4& w = weights[step][group];
                WeightFormat::mma(sums[group], w.x, w.z, w.y, w.w, x[step].x, x[step].y);
            }
    }

    template <class O>
    __device__ __forceinline__ bool block(u32 x_address, const Place& place) {
        Shared& shared = *role.shared;
        float sums[O::kRowGroups][4] = {};
#pragma unroll 1
        for (int i = 0; i < O::kTiles; ++i) {
            if (!mbar_wait(role.watch, bar(shared.full[slot]), slot_parity, place)) return false;
            tile<O>(shared_address(shared.ring[slot]) + warp * O::kWarpBytes + lane * 16, x_address, sums);
            __syncwarp();
            if (lane == 0) mbar_arrive(bar(shared.empty[slot]));
            x_address += O::kSteps * 128;
            if (++slot == kNumSlots) slot = 0, slot_parity ^= 1;
        }
        const u32 half = num_blocks & 1;
        if (!mbar_wait(role.watch, bar(shared.red_empty[half]), ((num_blocks >> 1) & 1) ^ 1, place)) return false;
#pragma unroll
        for (int group = 0; group < O::kRowGroups; ++group) {
            float part = (lane & 1) ? sums[group][2] + sums[group][3] : sums[group][0] + sums[group][1];
            part += __shfl_xor_sync(kFullWarp, part, 1);
            const u32 row = group * 8 + (lane >> 2);
            if ((lane & 3) == 0 && row < O::kRows) shared.red[half][warp][row] = part;
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(bar(shared.red_full[half]));
        ++num_blocks;
        return true;
    }

    template <class O>
    __device__ __forceinline__ bool vector(const Place& place) {
        Shared& shared = *role.shared;
        const u32 half = num_vectors & 1;
        if (!mbar_wait(role.watch, bar(shared.x_full[half]), (num_vectors >> 1) & 1, place)) return false;
        const u32 x_address = shared_address(shared.x[half]) + warp * O::kPer * 128 + (lane & 15) * 8;
#pragma unroll 1
        for (int i = 0; i < O::kBlocks; ++i)
            if (!block<O>(x_address, place)) return false;
        __syncwarp();
        if (lane == 0) mbar_arrive(bar(shared.x_empty[half]));
        ++num_vectors;
        return true;
    }

    template <class O>
    __device__ __forceinline__ bool lanes(u32 phase, u32 layer) {
#pragma unroll 1
        for (u32 lane_idx = 0; lane_idx < kLanes; ++lane_idx)
            if (!vector<O>({phase, layer, lane_idx})) return false;
        return true;
    }
};

__device__ __forceinline__ void multiply(const Role& role, u32 warp) {
    Multiplier multiplier{role, warp, laneid()};
    u32 token;
    for (u32 step = 0; begin_token(role, step, token); ++step) {
#pragma unroll 1
        for (u32 layer = 0; layer < kLayers; ++layer) {
            if (!multiplier.lanes<QkvOp>(kQkvPhase, layer)) return;
            if (!multiplier.lanes<OutOp>(kOutPhase, layer)) return;
            if (!multiplier.lanes<GateUpOp>(kGateUpPhase, layer)) return;
            if (!multiplier.lanes<DownOp>(kDownPhase, layer)) return;
        }
        if (has_head(role, step) && !multiplier.vector<HeadOp>({kHeadPhase, 0, 0})) return;
    }
}

}  // namespace kog
