// What the finaliser does with the experts of a pass of several tokens: logits of each token; and, where there is no union of their choices, each
// token's choice and shares of GATE_UP, one token's behind another's, as a token alone has them. A shared expert's rows are those of all tokens.
#pragma once
#include "finalize_experts.cuh"

namespace kog {

#ifdef KOG_EXPERTS
__device__ __forceinline__ bool publish_logits_of_pass(FinalizedRows& rows, u32 layer, const TokenScales& scales, u32 tag) {
#pragma unroll 1
    for (u32 block = 0; block < RouteOp::kBlocks; ++block) {
        const u32 expert = rows.role.cta * RouteOp::kCtaRows + block * RouteOp::kRows + rows.lane;
        const bool is_mine = rows.lane < RouteOp::kRows && expert < kRouterRows;
        [[maybe_unused]] const float bias = is_mine ? router_bias(rows, layer, expert) : 0;
        float sums[kTokens];
        if (!rows.row_sum(sums, RouteOp::kRows)) return false;
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = of_token(sums, token) * kRouteFactor * scales.of(token);
            if constexpr (kRouterBias) sum += bias;
            if (is_mine)
#pragma unroll
                for (u32 copy = 0; copy < kReplicas; ++copy)
                    store_relaxed(logit_words(rows) + (copy * kTokens + token) * kRouterLogitsStride + expert, make_logit_word(sum, tag));
        }
        rows.end_block();
    }
    return true;
}
// Where a token's logits lie for this thread block.
__device__ __forceinline__ const u64* own_logits(const FinalizedRows& rows, u32 token) {
    return logit_words(rows) + (rows.role.cta % kReplicas * kTokens + token) * kRouterLogitsStride;
}
// Activations of a token, of a block of an expert's rows from `first_row` on, times `weight`, into `words`.
template <class O, u32 kColumns>
__device__ __forceinline__ void publish_activations(FinalizedRows& rows, u64* words, u32 first_row, u32 end, float sum, float weight, u32 tag) {
    const float up = __shfl_down_sync(kFullWarp, sum, 1);
    const float activation = activation_of(sum, up) * weight;
    rows.publish<O::kRows / 2, 2, kLanes == 1 ? 0 : kColumns, O::kCtaRows / 2>(words, kTokens * kActivationStride, first_row / 2, end, activation, tag);
}

#ifndef KOG_UNION
// Rows of an expert's GATE_UP as `gate_up_rows` has them, of the tokens from `first` to before `end`.
template <class O, u32 kColumns, bool kHasBias>
__device__ __forceinline__ bool gate_up_of_tokens(FinalizedRows& rows, u64* words, u32 cta, u32 first_bias, u32 first, u32 end, const TokenScales& weights,
                                                  const TokenScales& scales, u32 tag) {
#pragma unroll 1
    for (u32 block = 0; block < O::kBlocks; ++block) {
        const u32 first_row = cta * O::kCtaRows + block * O::kRows, row = first_row + rows.lane;
        [[maybe_unused]] float bias = 0;
        if (kHasBias && row < 2 * kLanes * kColumns)
            bias = WeightFormat::low(reinterpret_cast<const u16*>(rows.params.gate_up_bias_ptr)[first_bias + row]);
        float sums[kTokens];
        if (!rows.row_sum(sums, O::kRows)) return false;
        u32 end_column = kLanes * kColumns;
        if (O::kLastRows != O::kRows) end_column = min(end_column, (cta + 1) * O::kCtaRows / 2);
#pragma unroll 1
        for (u32 token = first; token < end; ++token) {
            float sum = of_token(sums, token) * scales.of(token);
            if constexpr (kHasBias) sum += bias;
            publish_activations<O, kColumns>(rows, words + token * kActivationStride, first_row, end_column, sum, weights.of(token), tag);
        }
        rows.end_block();
    }
    return true;
}
#ifdef KOG_SHARED_EXPERT
// The shared expert's weight for each token: the sigmoid of its gate's logit.
__device__ __forceinline__ bool collect_gates(const FinalizedRows& rows, u32 layer, u32 tag, TokenScales& weights) {
    const u64* word = own_logits(rows, rows.lane % kTokens) + kNumExperts;
    u64 got = load_relaxed(word);
    for (u32 rounds = 1; !__all_sync(kFullWarp, has_tag(got, tag)); ++rounds) {
        if (must_leave(rows.role.stopped())) return false;
        if (rounds % 1024 == 0 && !has_tag(got, tag)) {
            WaitNote& note = rows.role.shared->note;
            note.phase = kSelectPhase + 1, note.layer = layer, note.lane = WaitNote::lane_and_expert(kNowhere, kNumExperts);
            note.wanted = tag, note.set_words(word, 1);
        }
        got = load_relaxed(word);
    }
    weights.own = sigmoid(logit_of(got));
    return true;
}
#endif
// The router and then GATE_UP, as `gate_up_of_experts`. Choices are made at once, so that the loader need not wait for the next token's.
__device__ __forceinline__ bool gate_up_of_pass(FinalizedRows& rows, u32 layer, u32 tag) {
    TokenScales scales;
    if (!rows.rms_scale(scales) || !publish_logits_of_pass(rows, layer, scales, tag)) return false;
#pragma unroll 1
    for (u32 token = 0; token < kTokens; ++token)
        if (!choose_experts(rows, layer, token, tag)) return false;
#ifdef KOG_SHARED_EXPERT
    TokenScales gates;
    if (!collect_gates(rows, layer, tag, gates)) return false;
    if (!gate_up_of_tokens<SharedGateUpOp, kSharedFfn, false>(rows, expert_activations(rows, kChosen), rows.role.cta, 0, 0, kTokens, gates, scales, tag)) return false;
#endif
    const u32 num = num_shares(rows.role.cta);
#pragma unroll 1
    for (u32 i = 0; i < kTokens * num; ++i) {
        const u32 token = i / num, share = rows.role.cta * kExpertShares + i % num, slot = share / kExpertCtas;
        const u32 first_bias = (layer * kNumExperts + rows.role.shared->chosen[token][slot]) * (2 * kLanes * kFfn);
        const TokenScales weight{rows.role.shared->chosen_weights[token][slot]};
        if (!gate_up_of_tokens<GateUpOp, kFfn, kExpertBias>(rows, expert_activations(rows, slot), share % kExpertCtas, first_bias, token, token + 1, weight, scales, tag))
            return false;
    }
    rows.count_vector<kLanes>(0);
    return true;
}
#endif
#endif

}  // namespace kog
