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
    __device__ __forceinline__ bool block(u32 x_address, u32 num_tiles) {
        Shared& shared = *role.shared;
        float sums[O::kRowGroups][4] = {};
#pragma unroll 1
        for (u32 i = 0; i < num_tiles; ++i) {
            if (!mbar_wait(shared.note, bar(shared.full[slot]), slot_parity)) return false;
            tile<O>(shared_address(shared.ring[slot]) + warp * O::kWarpBytes + lane * 16, x_address, sums);
            __syncwarp();
            if (lane == 0) mbar_arrive(bar(shared.empty[slot]));
            x_address += O::kSteps * 128;
            if (++slot == kNumSlots) slot = 0, slot_parity ^= 1;
        }
        const u32 half = num_blocks & 1;
        if (!mbar_wait(shared.note, bar(shared.red_empty[half]), ((num_blocks >> 1) & 1) ^ 1)) return false;
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

    // `num_tiles` of O::kSteps steps each; O is the shape of the tiles.
    template <class O>
    __device__ __forceinline__ bool vector(u32 num_blocks_of_rows, u32 num_tiles) {
        Shared& shared = *role.shared;
        const u32 half = num_vectors & 1;
        if (!mbar_wait(shared.note, bar(shared.x_full[half]), (num_vectors >> 1) & 1)) return false;
        const u32 x_address = shared_address(shared.x[half]) + warp * num_tiles * O::kSteps * 128 + (lane & 15) * 8;
#pragma unroll 1
        for (u32 i = 0; i < num_blocks_of_rows; ++i)
            if (!block<O>(x_address, num_tiles)) return false;
        __syncwarp();
        if (lane == 0) mbar_arrive(bar(shared.x_empty[half]));
        ++num_vectors;
        return true;
    }

    template <class O>
    __device__ __forceinline__ bool lanes(u32 num_blocks_of_rows, u32 num_tiles) {
#pragma unroll 1
        for (u32 lane_idx = 0; lane_idx < kLanes; ++lane_idx)
            if (!vector<O>(num_blocks_of_rows, num_tiles)) return false;
        return true;
    }

    // The three products after attention. Where their tiles have one shape they are one piece of code: it stays in the
    // instruction cache.
    __device__ __forceinline__ bool out_gate_up_down() {
        if constexpr (OutOp::kRows == GateUpOp::kRows && OutOp::kSteps == GateUpOp::kSteps && GateUpOp::kSteps == DownOp::kSteps) {
#pragma unroll 1
            for (int i = 0; i < 3; ++i) {
                const u32 num_blocks_of_rows = i == 1 ? GateUpOp::kBlocks : OutOp::kBlocks;
                if (!lanes<OutOp>(num_blocks_of_rows, i == 0 ? OutOp::kTiles : i == 1 ? GateUpOp::kTiles : DownOp::kTiles)) return false;
            }
            return true;
        } else {
            return lanes<OutOp>(OutOp::kBlocks, OutOp::kTiles) && lanes<GateUpOp>(GateUpOp::kBlocks, GateUpOp::kTiles) &&
                   lanes<DownOp>(DownOp::kBlocks, DownOp::kTiles);
        }
    }
};

__device__ __forceinline__ void multiply(const Role& role, u32 warp) {
    Multiplier multiplier{role, warp, laneid()};
    u32 token;
    for (u32 step = 0; begin_token(role, step, token); ++step) {
#pragma unroll 1
        for (u32 layer = 0; layer < kLayers; ++layer)
            if (!multiplier.lanes<QkvOp>(QkvOp::kBlocks, QkvOp::kTiles) || !multiplier.out_gate_up_down()) return;
        if (has_head(role, step) && !multiplier.vector<HeadOp>(HeadOp::kBlocks, HeadOp::kTiles)) return;
    }
}

}  // namespace kog
