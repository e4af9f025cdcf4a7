// Products of a normed vector, but experts': their sums are scaled, and published as what attention, delta nets and DOWN take.
#pragma once
#include "finalize_rows.cuh"
#include "gather_vector.cuh"

namespace kog {

// Of sums with delta nets' weights of 16 bit beside codes: these are multiplied by kNetScale, and x is `RouterX`.
constexpr float kNetFactor = PlainX::kScale / (RouterX::kScale * kNetScale);

// Scale of the normed vector that a lane's product has. Of a stream that all lanes share, the first one has the squares.
__device__ __forceinline__ bool norm_scale(FinalizedRows& rows, TokenScales& shared_scale, u32 lane_idx, TokenScales& scale) {
    if constexpr (!kOneStream) return rows.rms_scale(scale);
    if (lane_idx == 0 && !rows.rms_scale(shared_scale)) return false;
    scale = shared_scale;
    return true;
}

// Biases are added here; where heads are normed, attention does that and turns them, since it has whole heads.
__device__ __forceinline__ bool finalize_qkv(FinalizedRows& rows, TokenScales& shared_scale, u32 layer, u32 lane_idx, u32 tag) {
    u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
    const float2* rope = reinterpret_cast<const float2*>(rows.params.rope_ptr);
    TokenScales scale;
#pragma unroll 1
    for (u32 block = 0; block < QkvOp::kBlocks; ++block) {
        const u32 row = rows.role.cta * QkvOp::kCtaRows + block * QkvOp::kRows + rows.lane;
        const u32 lane_row = kQkvLanes > 1 ? row % kQkvRows : row;
        float2 turns[kTokens];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            turns[token] = make_float2(1.0f, 0.0f);
            if (!kQkNorm && lane_row < kQueryRows + kKvRows && (kRotary == kHeadDim || lane_row % kHeadDim < kRotary))
                turns[token] = rope[rows.pass.position_of(token) * (kRotary / 2) + (lane_row % kHeadDim) / 2];
        }
        [[maybe_unused]] float bias = 0;
        if (kQkvBias && row < kQkvLanes * kQkvRows)
            bias = WeightFormat::low(reinterpret_cast<const u16*>(rows.params.qkv_bias_ptr)[(layer * kLanes + lane_idx) * kQkvRows + row]);
        float sums[kTokens];
        const float own_scale = rows.row_scale<QkvOp>(block);
        if (block == 0 && !norm_scale(rows, shared_scale, lane_idx, scale)) return false;
        if (!rows.row_sum(sums, QkvOp::kRows)) return false;
#pragma unroll
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = of_token(sums, token);
            const float2 turn = of_token(turns, token);
            if constexpr (kRowScales) sum *= own_scale;
            sum *= scale.of(token);
            if constexpr (kQkvBias) sum += bias;
            const float other = __shfl_xor_sync(kFullWarp, sum, 1);
            const float turned = sum_of_products(sum, turn.x, rows.lane & 1 ? other : -other, turn.y);
            const u32 half = make_half_word(turned, rows.lane & 1 ? tag >> 8 : tag), next = __shfl_down_sync(kFullWarp, half, 1);
            if ((rows.lane & 1) == 0 && rows.lane < QkvOp::kRows && row < kQkvLanes * kQkvRows) {
                u64* to = (kQkvLanes > 1 ? words + row / kQkvRows * (kTokens * kQkvStride) : words) + token * kQkvStride;
                store_relaxed(to + lane_row / 2, join_halves(half, next));
            }
        }
        rows.end_block();
    }
    rows.count_vector<kQkvLanes>(lane_idx);
    return true;
}

#ifdef KOG_DELTA
// Of a row of a lane's matrix that is a term of a factor: the sum of the factor's terms, and its place among the lane's inputs. Called by a full
// warp; terms of a factor are rows of one block.
__device__ __forceinline__ void join_terms(const FinalizedRows& rows, float& sum, u32& lane_row) {
    float whole = sum;
#pragma unroll
    for (int width = 1; width < kFactorTerms; width *= 2) whole += __shfl_xor_sync(kFullWarp, whole, width);
    if (lane_row < kDeltaPlainRows) return;
    sum = whole, lane_row = kDeltaPlainRows + (lane_row - kDeltaPlainRows) / kFactorTerms;
}
// All that a delta net projects, as it is.
__device__ __forceinline__ bool finalize_delta_in(FinalizedRows& rows, TokenScales& shared_scale, u32 lane_idx, u32 tag) {
    u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + kDeltaInOffset + lane_idx * (kTokens * kDeltaInStride);
    u32 end = kDeltaInLanes * kDeltaMatrixRows;
    if (DeltaInOp::kLastRows != DeltaInOp::kRows) end = min(end, (rows.role.cta + 1) * DeltaInOp::kCtaRows);
    TokenScales scale;
#pragma unroll 1
    for (u32 block = 0; block < DeltaInOp::kBlocks; ++block) {
        const u32 row = rows.role.cta * DeltaInOp::kCtaRows + block * DeltaInOp::kRows + rows.lane;
        float sums[kTokens];
        const float own_scale = rows.row_scale<DeltaInOp>(block);
        if (block == 0 && !norm_scale(rows, shared_scale, lane_idx, scale)) return false;
        if (!rows.row_sum(sums, DeltaInOp::kRows)) return false;
#pragma unroll
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = of_token(sums, token);
            if constexpr (kRowScales) sum *= own_scale;
            if constexpr (kPlainNetInputs) sum *= kNetFactor;
            sum *= scale.of(token);
            if constexpr (kFactorTerms == 1) {
                const u32 half = make_half_word(sum, rows.lane & 1 ? tag >> 8 : tag), next = __shfl_down_sync(kFullWarp, half, 1);
                if ((rows.lane & 1) == 0 && rows.lane < DeltaInOp::kRows && row < end)
                    store_relaxed(words + (row / kDeltaRows * kTokens + token) * kDeltaInStride + row % kDeltaRows / 2, join_halves(half, next));
            } else {
                const u32 matrix_row = row % kDeltaMatrixRows, apart = matrix_row < kDeltaPlainRows ? 1 : kFactorTerms;
                u32 lane_row = matrix_row;
                join_terms(rows, sum, lane_row);
                const u32 half = make_half_word(sum, lane_row & 1 ? tag >> 8 : tag), next = __shfl_sync(kFullWarp, half, (rows.lane + apart) % 32);
                if (rows.lane % (2 * apart) == 0 && rows.lane < DeltaInOp::kRows && row < end)
                    store_relaxed(words + (row / kDeltaMatrixRows * kTokens + token) * kDeltaInStride + lane_row / 2, join_halves(half, next));
            }
        }
        rows.end_block();
    }
    rows.count_vector<kDeltaInLanes>(lane_idx);
    return true;
}
#endif

__device__ __forceinline__ bool finalize_gate_up(FinalizedRows& rows, TokenScales& shared_scale, u32 lane_idx, u32 tag) {
    u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + kActivationOffset + lane_idx * (kReplicas * kTokens * kActivationStride);
    TokenScales scale;
#pragma unroll 1
    for (u32 block = 0; block < GateUpOp::kBlocks; ++block) {
        float sums[kTokens];
        const float own_scale = rows.row_scale<GateUpOp>(block);
        if (block == 0 && !norm_scale(rows, shared_scale, lane_idx, scale)) return false;
        if (!rows.row_sum(sums, GateUpOp::kRows)) return false;
        u32 end = kGateUpLanes * kFfn;
        if (GateUpOp::kLastRows != GateUpOp::kRows) end = min(end, (rows.role.cta + 1) * GateUpOp::kCtaRows / 2);
#pragma unroll
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = of_token(sums, token);
            if constexpr (kRowScales) sum *= own_scale;
            sum *= scale.of(token);
            const float up = __shfl_down_sync(kFullWarp, sum, 1);
            const float activation = swiglu(sum, up);
            rows.publish<GateUpOp::kRows / 2, 2, kGateUpLanes == 1 ? 0 : kFfn, GateUpOp::kCtaRows / 2>(
                words + token * kActivationStride, kTokens * kActivationStride, (rows.role.cta * GateUpOp::kCtaRows + block * GateUpOp::kRows) / 2, end,
                activation, tag);
        }
        rows.end_block();
    }
    rows.count_vector<kGateUpLanes>(lane_idx);
    return true;
}

}  // namespace kog
