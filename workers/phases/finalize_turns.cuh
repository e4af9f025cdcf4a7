// What the finaliser does with the experts of a pass of several tokens: logits of each token; and, where there is no union of their choices, each
// token's choice and shares of GATE_UP, one token's behind another's, as a token alone has them. A shared expert's rows are those of all tokens.
#pragma once
#include "finalize_experts.cuh"

namespace kog {

#ifdef KOG_EXPERTS
struct FinalizedTurns : FinalizedExperts {
    __device__ __forceinline__ bool publish_logits_of_pass(u32 layer, const TokenScales& scales, u32 tag) {
#pragma unroll 1
        for (u32 block = 0; block < RouteOp::kBlocks; ++block) {
            const u32 expert = role.cta * RouteOp::kCtaRows + block * RouteOp::kRows + lane;
            const bool is_mine = lane < RouteOp::kRows && expert < kRouterRows;
            [[maybe_unused]] float bias = 0;
            if (kRouterBias && is_mine && expert < kNumExperts)
                bias = WeightFormat::low(reinterpret_cast<const u16*>(params.router_bias_ptr)[layer * kNumExperts + expert]);
            float sums[kTokens];
            if (!row_sum(sums, RouteOp::kRows)) return false;
#pragma unroll 1
            for (u32 token = 0; token < kTokens; ++token) {
                float sum = of_token(sums, token) * kRouteFactor * scales.of(token);
                if constexpr (kRouterBias) sum += bias;
                if (is_mine)
#pragma unroll
                    for (u32 copy = 0; copy < kReplicas; ++copy)
                        store_relaxed(logit_words() + (copy * kTokens + token) * kRouterLogitsStride + expert, make_logit_word(sum, tag));
            }
            end_block();
        }
        return true;
    }
    // Where a token's logits lie for this thread block.
    __device__ __forceinline__ const u64* own_logits(u32 token) const { return logit_words() + (role.cta % kReplicas * kTokens + token) * kRouterLogitsStride; }
    // Activations of a token, of a block of an expert's rows from `first_row` on, times `weight`, into `words`.
    template <class O, u32 kColumns>
    __device__ __forceinline__ void publish_activations(u64* words, u32 first_row, u32 end, float sum, float weight, u32 tag) {
        const float up = __shfl_down_sync(kFullWarp, sum, 1);
        const float activation = activation_of(sum, up) * weight;
        publish<O::kRows / 2, 2, kLanes == 1 ? 0 : kColumns, O::kCtaRows / 2>(words, kTokens * kActivationStride, first_row / 2, end, activation, tag);
    }

#ifndef KOG_UNION
    // Rows of an expert's GATE_UP as `gate_up_rows` has them, of the tokens from `first` to before `end`.
    template <class O, u32 kColumns, bool kHasBias>
    __device__ __forceinline__ bool gate_up_of_tokens(u64* words, u32 cta, u32 first_bias, u32 first, u32 end, const TokenScales& weights,
                                                      const TokenScales& scales, u32 tag) {
#pragma unroll 1
        for (u32 block = 0; block < O::kBlocks; ++block) {
            const u32 first_row = cta * O::kCtaRows + block * O::kRows, row = first_row + lane;
            [[maybe_unused]] float bias = 0;
            if (kHasBias && row < 2 * kLanes * kColumns)
                bias = WeightFormat::low(reinterpret_cast<const u16*>(params.gate_up_bias_ptr)[first_bias + row]);
            float sums[kTokens];
            if (!row_sum(sums, O::kRows)) return false;
            u32 end_column = kLanes * kColumns;
            if (O::kLastRows != O::kRows) end_column = min(end_column, (cta + 1) * O::kCtaRows / 2);
#pragma unroll 1
            for (u32 token = first; token < end; ++token) {
                float sum = of_token(sums, token) * scales.of(token);
                if constexpr (kHasBias) sum += bias;
                publish_activations<O, kColumns>(words + token * kActivationStride, first_row, end_column, sum, weights.of(token), tag);
            }
            end_block();
        }
        return true;
    }
#ifdef KOG_SHARED_EXPERT
    // The shared expert's weight for each token: the sigmoid of its gate's logit.
    __device__ __forceinline__ bool collect_gates(u32 layer, u32 tag, TokenScales& weights) {
        const u64* word = own_logits(lane % kTokens) + kNumExperts;
        u64 got = load_relaxed(word);
        for (u32 rounds = 1; !__all_sync(kFullWarp, has_tag(got, tag)); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0 && !has_tag(got, tag)) {
                WaitNote& note = role.shared->note;
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
    __device__ __forceinline__ bool gate_up_of_pass(u32 layer, u32 tag) {
        TokenScales scales;
        if (!rms_scale(scales) || !publish_logits_of_pass(layer, scales, tag)) return false;
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token)
            if (!choose(layer, token, tag)) return false;
#ifdef KOG_SHARED_EXPERT
        TokenScales gates;
        if (!collect_gates(layer, tag, gates)) return false;
        if (!gate_up_of_tokens<SharedGateUpOp, kSharedFfn, false>(activations(kChosen), role.cta, 0, 0, kTokens, gates, scales, tag)) return false;
#endif
        const u32 num = num_shares(role.cta);
#pragma unroll 1
        for (u32 i = 0; i < kTokens * num; ++i) {
            const u32 token = i / num, share = role.cta * kExpertShares + i % num, slot = share / kExpertCtas;
            const u32 first_bias = (layer * kNumExperts + role.shared->chosen[token][slot]) * (2 * kLanes * kFfn);
            const TokenScales weight{role.shared->chosen_weights[token][slot]};
            if (!gate_up_of_tokens<GateUpOp, kFfn, kExpertBias>(activations(slot), share % kExpertCtas, first_bias, token, token + 1, weight, scales, tag))
                return false;
        }
        count_vector<kLanes>(0);
        return true;
    }
#endif
};
#else
using FinalizedTurns = FinalizedExperts;
#endif

}  // namespace kog
