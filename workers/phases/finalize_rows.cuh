// Blocks of rows as the finaliser takes them from the matrix warps: their sums, the scale of a normed vector, and how rows are published.
#pragma once
#include "activation.cuh"

namespace kog {

// Of each token one value, in the thread of its number.
struct TokenScales {
    float own = 0;

    __device__ __forceinline__ float of(u32 token) const { return kTokens == 1 ? own : __shfl_sync(kFullWarp, own, token); }
};

// What the finaliser's warp has counted and was told, and what all of its products do with their blocks of rows.
struct FinalizedRows {
    const KogDecodeParams& params;
    const KogPeers& peers;
    const Role& role;
    u32 lane;
    u32 num_vectors = 0, num_blocks = 0, turn = 0, first_vector = 0, product = 0;
    Pass pass = {};
    u32 squares_parity = 0;  // one bit for each slot of `squares`

    // A product of kProductLanes lanes, `lane_idx` and those behind it, is done.
    template <u32 kProductLanes = 1>
    __device__ __forceinline__ void count_vector(u32 lane_idx) {
        stamp(role, kPublished, turn, num_vectors - first_vector);
        ++num_vectors;
        __syncwarp();
        if (lane == 0) {
            role.shared->num_finalized = num_vectors;
#pragma unroll 1
            for (u32 i = lane_idx; i < lane_idx + kProductLanes; ++i) {
                store_shared(role.base + KOG_OFFSET(done_cycles) + i * 4, clock_cycles());
                mbar_arrive(role.base + KOG_OFFSET(lane_done[i]));
            }
        }
    }

    // Scale of the vector that is being multiplied, of each token: 1 / rms for normed ones.
    __device__ __forceinline__ bool rms_scale(TokenScales& scales) {
        Shared& shared = *role.shared;
        const u32 at = num_vectors % kSquares;
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(squares_full[at]), squares_parity >> at & 1)) return false;
        squares_parity ^= 1u << at;
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < kMatrixWarps; ++warp) sum += shared.squares[at][token][warp][lane];
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
            const float scale = inverse_root_approx(sum * (1.0f / kHidden) + kNormEps) * kInverseXScale;
            scales.own = kTokens == 1 || lane == token ? scale : scales.own;
        }
        return true;
    }

    // The scale of row `lane` of a block of the present product, where each row of a quantised matrix has one.
    template <class O>
    __device__ __forceinline__ float row_scale(u32 block) const {
#ifdef KOG_CODE
        if constexpr (kRowScales) {
            const float* scales = reinterpret_cast<const float*>(params.tape_ptr + kNumCtas * kTapeBytes) + (product * kNumCtas + role.cta) * kScaleRows;
            if (lane < O::kRows) return scales[block * O::kRows + lane];
        }
#endif
        return 1.0f;
    }

    // Sum of row `lane` of the next block, over the matrix warps, of each token. Threads past the last row get 0.
    __device__ __forceinline__ bool row_sum(float (&sums)[kTokens], u32 num_rows) {
        Shared& shared = *role.shared;
        const u32 at = num_blocks % kSums;
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(red_full[at]), num_blocks / kSums & 1)) return false;
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            float parts[kMatrixWarps];
#pragma unroll
            for (int warp = 0; warp < kMatrixWarps; ++warp) parts[warp] = lane < num_rows ? shared.red[at][token][warp][lane] : 0.0f;
            if (token == 0) stamp(role, kMultiplied, turn, num_vectors - first_vector);
            static_assert(kMatrixWarps == 8 || kMatrixWarps == 12, "the tree");
            sums[token] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
            if constexpr (kMatrixWarps == 12) sums[token] += (parts[8] + parts[9]) + (parts[10] + parts[11]);
        }
        return true;
    }
    // Where a pass has one token.
    __device__ __forceinline__ bool rms_scale(float& scale) {
        TokenScales scales;
        const bool is_there = rms_scale(scales);
        scale = scales.own;
        return is_there;
    }
    __device__ __forceinline__ bool row_sum(float& sum, u32 num_rows) {
        float sums[kTokens];
        const bool is_there = row_sum(sums, num_rows);
        sum = sums[0];
        return is_there;
    }
    // The matrix warps may write the sums of a later block there.
    __device__ __forceinline__ void end_block() {
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(red_empty[num_blocks % kSums]));
        ++num_blocks;
    }

    // Publish kCount values to all replicas of a vector; value i is held by thread i * kStride. With kLaneRows they may be of several
    // lanes, each of which has so many; lanes' replicas lie one behind the other. `kApart`: values from a thread block's first to the next one's.
    template <int kCount, int kStride, u32 kLaneRows = 0, int kApart = kCount>
    __device__ __forceinline__ void publish(u64* vector, u32 stride_words, u32 first_row, u32 num_rows, float value, u32 tag) {
        constexpr int kUnit = kCount % 4 == 0 && kApart % 4 == 0 ? 4 : 2, kUnits = kCount / kUnit;
        const u32 half = make_half_word(value, (lane / kStride) & 1 ? tag >> 8 : tag);
#pragma unroll
        for (int first = 0; first < kUnits * kReplicas; first += 32) {
            const u32 i = first + lane, unit = i % kUnits, replica = i / kUnits;
            u32 v[kUnit];
#pragma unroll
            for (int k = 0; k < kUnit; ++k) v[k] = __shfl_sync(kFullWarp, half, (unit * kUnit + k) * kStride);
            const u32 row = first_row + unit * kUnit;
            if (i < kUnits * kReplicas && row < num_rows) {
                u64* at = vector + replica * stride_words + row / 2;
                if constexpr (kLaneRows != 0) at = vector + (row / kLaneRows * kReplicas + replica) * stride_words + row % kLaneRows / 2;
                if constexpr (kUnit == 4) store_relaxed_x2(at, join_halves(v[0], v[1]), join_halves(v[2], v[3]));
                else store_relaxed(at, join_halves(v[0], v[1]));
            }
        }
    }
};

}  // namespace kog
