// What the finaliser does with the experts of a pass of several tokens: logits and choice of each, their union, and blocks of rows of GATE_UP
// for the tokens that have chosen the expert.
#pragma once
#include "finalize_turns.cuh"
#include "union.cuh"

namespace kog {

#ifdef KOG_UNION
// ---- the choices ----
template <bool kMissing>
__device__ __forceinline__ void look_at_logits(const FinalizedRows& rows, u32 token, u32 tag, u64 (&got)[kLogits]) {
    const u64* words = own_logits(rows, token);
#pragma unroll
    for (int i = 0; i < kLogits; ++i)
        if (i * 32 + rows.lane < kNumExperts && (!kMissing || !has_tag(got[i], tag))) got[i] = load_relaxed(words + i * 32 + rows.lane);
}
// The number of experts from the first one on whose logit is missing, or 0.
__device__ __forceinline__ u32 num_behind(const FinalizedRows& rows, u32 tag, const u64 (&got)[kLogits]) {
    u32 behind = 0;
#pragma unroll
    for (int i = 0; i < kLogits; ++i)
        if (i * 32 + rows.lane < kNumExperts && !has_tag(got[i], tag)) behind = max(behind, kNumExperts - i * 32 - rows.lane);
    return __reduce_max_sync(kFullWarp, behind);
}
// Until all logits of a token, of which `got` has words already, have come; what is missing is noted for the watchdog.
__device__ __forceinline__ bool wait_for_logits(const FinalizedRows& rows, u32 layer, u32 token, u32 tag, u64 (&got)[kLogits]) {
    u32 behind;
    for (u32 rounds = 1; (behind = num_behind(rows, tag, got)) != 0; ++rounds) {
        if (must_leave(rows.role.stopped())) return false;
        if (rounds % 1024 == 0) {
            WaitNote& note = rows.role.shared->note;
            note.phase = kSelectPhase + 1, note.layer = layer, note.lane = WaitNote::lane_and_expert(kNowhere, kNumExperts - behind);
            note.wanted = tag, note.set_words(own_logits(rows, token), kNumExperts);
        }
        look_at_logits<true>(rows, token, tag, got);
    }
    return true;
}
// A token's choice, of its logits, into shared memory; `chosen`: a bit for each expert.
__device__ __forceinline__ void choose_of(const FinalizedRows& rows, u32 token, const u64 (&got)[kLogits], u32 (&chosen)[kLogits]) {
    float logits[kLogits], sum = 0;
    u32 keys[kLogits], most = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        logits[i] = i * 32 + rows.lane < kNumExperts ? logit_of(got[i]) : -INFINITY;
        keys[i] = i * 32 + rows.lane < kNumExperts ? rising_key(logits[i]) : 0, most = max(most, keys[i]);
    }
    const float top = value_of_key(__reduce_max_sync(kFullWarp, most));
    choose_among_equal(rows, keys, chosen);
    float terms[kLogits];
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        terms[i] = exp2_approx((logits[i] - top) * kLog2e);
        if ((chosen[i] >> rows.lane & 1) || !kChoiceIsNormalised) sum += terms[i];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        const u32 slot = before + __popc(chosen[i] & ((1u << rows.lane) - 1));
        if (chosen[i] >> rows.lane & 1)
            rows.role.shared->chosen[token][slot] = i * 32 + rows.lane, rows.role.shared->chosen_weights[token][slot] = terms[i] / sum;
        before += __popc(chosen[i]);
    }
    __syncwarp();
}
// Experts by bits, and who has them in which slot, into shared memory.
__device__ __forceinline__ void unite(const FinalizedRows& rows, const u32 (&experts)[kLogits]) {
    Shared& shared = *rows.role.shared;
    const u32 token = rows.lane / kChosen, slot = rows.lane % kChosen;
    const u32 own = token < kTokens ? shared.chosen[token][slot] : 0;
    u32 before = 0, own_place = 0;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        if (experts[i] >> rows.lane & 1) {
            const u32 place = before + __popc(experts[i] & ((1u << rows.lane) - 1));
            shared.united[place] = i * 32 + rows.lane, shared.united_slots[place] = kNoSlots;
        }
        if (own / 32 == i) own_place = before + __popc(experts[i] & ((1u << own % 32) - 1));
        before += __popc(experts[i]);
    }
    if (rows.lane == 0) shared.num_united = before;
    __syncwarp();
    if (token < kTokens) reinterpret_cast<unsigned char*>(shared.united_slots)[own_place * 4 + token] = static_cast<unsigned char>(slot);
}
// The choices of all tokens, and their union. The next token's logits are on their way meanwhile.
__device__ __forceinline__ bool choose_of_pass(FinalizedRows& rows, u32 layer, u32 tag) {
    u64 got[kLogits] = {};
    u32 united[kLogits] = {};
    look_at_logits<false>(rows, 0, tag, got);
#pragma unroll 1
    for (u32 token = 0; token < kTokens; ++token) {
        if (!wait_for_logits(rows, layer, token, tag, got)) return false;
        u64 own[kLogits];
        u32 chosen[kLogits];
#pragma unroll
        for (int i = 0; i < kLogits; ++i) own[i] = got[i];
        if (token + 1 < kTokens) look_at_logits<false>(rows, token + 1, tag, got);
        choose_of(rows, token, own, chosen);
#pragma unroll
        for (int i = 0; i < kLogits; ++i) united[i] |= chosen[i];
#ifdef KOG_CHOICES
        keep_choice(rows, layer, token);
#endif
    }
    unite(rows, united);
    __syncwarp();
    if (rows.lane == 0) mbar_arrive(rows.role.base + KOG_OFFSET(choice_full));
    return true;
}

// ---- GATE_UP ----
__device__ __forceinline__ bool gate_up_of_union(FinalizedRows& rows, u32 layer, u32 tag) {
    TokenScales scales;
    if (!rows.rms_scale(scales) || !publish_logits_of_pass(rows, layer, scales, tag) || !choose_of_pass(rows, layer, tag)) return false;
    const u32 cta = rows.role.cta % kExpertCtas;
    u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + kActivationOffset;
#pragma unroll 1
    for (UnitedBlocks blocks(rows.role); blocks.is_left(); blocks.go_on()) {
        const u32 expert = united_at(rows.role, blocks.place), slots = slots_at(rows.role, blocks.place);
        const u32 first_row = cta * GateUpOp::kCtaRows + blocks.block * GateUpOp::kRows, row = first_row + rows.lane;
        [[maybe_unused]] float bias = 0;
        if (kExpertBias && row < 2 * kLanes * kFfn)
            bias = WeightFormat::low(reinterpret_cast<const u16*>(rows.params.gate_up_bias_ptr)[(layer * kNumExperts + expert) * (2 * kLanes * kFfn) + row]);
        float sums[kTokens];
        if (!rows.row_sum(sums, GateUpOp::kRows)) return false;
        u32 end = kLanes * kFfn;
        if (GateUpOp::kLastRows != GateUpOp::kRows) end = min(end, (cta + 1) * GateUpOp::kCtaRows / 2);
#pragma unroll 1
        for (u32 token = next_member(slots, 0); token < kTokens; token = next_member(slots, token + 1)) {
            const u32 slot = slot_of(slots, token);
            const float weight = rows.role.shared->chosen_weights[token][slot];
            float sum = of_token(sums, token);
            sum *= scales.of(token);
            if constexpr (kExpertBias) sum += bias;
            publish_activations<GateUpOp, kFfn>(rows, words + token * kActivationStride + slot * (kFfn / 2), first_row, end, sum, weight, tag);
        }
        rows.end_block();
    }
    rows.count_vector<kLanes>(0);
    return true;
}
#endif

}  // namespace kog
