// What the finaliser does with experts: the router's logits, which all thread blocks publish a part of; the choice, which each makes by
// itself, the same one; and the chosen experts' activations, of which a thread block has some columns of one.
#pragma once
#include "finalize_rows.cuh"
#include "gather_vector.cuh"
#include "number_bits.cuh"

namespace kog {

#ifdef KOG_EXPERTS
constexpr int kLogits = (kNumExperts + 31) / 32;  // of a thread: experts `lane` + 32 i
#ifdef KOG_SHARED_EXPERT
constexpr u32 kRouterRows = kNumExperts + 1;  // the last one is the shared expert's gate
#else
constexpr u32 kRouterRows = kNumExperts;
#endif
// The router's weights have 16 bit, times kRouterScale, and x is `RouterX`.
constexpr float kRouteFactor = PlainX::kScale / (RouterX::kScale * kRouterScale);

// Words of router logits have all 32 bits of a value: 24 in the first half, the others in the second; and tags like pair words.
__device__ __forceinline__ u64 make_logit_word(float value, u32 tag) {
    const u32 bits = __float_as_uint(value);
    return join_halves((bits & 0xffffff00u) | (tag & 0xffu), bits << 24 | (tag >> 8 & 0xffu));
}
__device__ __forceinline__ float logit_of(u64 word) {
    return __uint_as_float((static_cast<u32>(word) & 0xffffff00u) | static_cast<u32>(word >> 56));
}

__device__ __forceinline__ u64* logit_words(const FinalizedRows& rows) { return reinterpret_cast<u64*>(rows.params.words_ptr) + kRouterLogitsOffset; }
// Of the router's row of an expert; the shared one's has none.
__device__ __forceinline__ float router_bias(const FinalizedRows& rows, u32 layer, u32 expert) {
    if (!kRouterBias || expert >= kNumExperts) return 0;
    return WeightFormat::low(reinterpret_cast<const u16*>(rows.params.router_bias_ptr)[layer * kNumExperts + expert]);
}
__device__ __forceinline__ bool publish_logits(FinalizedRows& rows, u32 layer, float scale, u32 tag) {
#pragma unroll 1
    for (u32 block = 0; block < RouteOp::kBlocks; ++block) {
        const u32 expert = rows.role.cta * RouteOp::kCtaRows + block * RouteOp::kRows + rows.lane;
        const bool is_mine = rows.lane < RouteOp::kRows && expert < kRouterRows;
        [[maybe_unused]] const float bias = is_mine ? router_bias(rows, layer, expert) : 0;
        float sum;
        if (!rows.row_sum(sum, RouteOp::kRows)) return false;
        sum = sum * kRouteFactor * scale;
        if constexpr (kRouterBias) sum += bias;
        if (is_mine)
#pragma unroll
            for (u32 copy = 0; copy < kReplicas; ++copy) store_relaxed(logit_words(rows) + copy * kRouterLogitsStride + expert, make_logit_word(sum, tag));
        rows.end_block();
    }
    return true;
}
// All logits of a layer for a token; what is missing is noted for the watchdog.
__device__ __forceinline__ bool collect_logits(const FinalizedRows& rows, u32 layer, u32 token, u32 tag, float (&logits)[kLogits]) {
    const u64* words = logit_words(rows) + (rows.role.cta % kReplicas * kTokens + token) * kRouterLogitsStride;
    u64 got[kLogits];
#pragma unroll
    for (int i = 0; i < kLogits; ++i) got[i] = i * 32 + rows.lane < kNumExperts ? load_relaxed(words + i * 32 + rows.lane) : 0;
    for (u32 rounds = 1;; ++rounds) {
        bool ready = true;
#pragma unroll
        for (int i = 0; i < kLogits; ++i)
            if (i * 32 + rows.lane < kNumExperts && !has_tag(got[i], tag)) ready = false, got[i] = load_relaxed(words + i * 32 + rows.lane);
        if (__all_sync(kFullWarp, ready)) break;
        if (must_leave(rows.role.stopped())) return false;
        if (rounds % 1024 == 0) {
            u32 behind = 0;  // the number of experts from the first one on that is missing
#pragma unroll
            for (int i = 0; i < kLogits; ++i)
                if (i * 32 + rows.lane < kNumExperts && !has_tag(got[i], tag)) behind = max(behind, kNumExperts - i * 32 - rows.lane);
            behind = __reduce_max_sync(kFullWarp, behind);
            if (behind == 0) continue;  // what was missing has just come
            const u32 first = kNumExperts - behind;
            WaitNote& note = rows.role.shared->note;
            note.phase = kSelectPhase + 1, note.layer = layer, note.lane = WaitNote::lane_and_expert(kNowhere, first);
            note.wanted = tag, note.set_words(words, kNumExperts);
        }
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) logits[i] = i * 32 + rows.lane < kNumExperts ? logit_of(got[i]) : -INFINITY;
    return true;
}
// The same where some of the largest are equal: one expert after the other.
__device__ __forceinline__ void choose_among_equal(const FinalizedRows& rows, u32 (&keys)[kLogits], u32 (&chosen)[kLogits]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) chosen[i] = 0;
#pragma unroll 1
    for (u32 k = 0; k < kChosen; ++k) {
        u32 most = keys[0];
#pragma unroll
        for (int i = 1; i < kLogits; ++i) most = max(most, keys[i]);
        most = __reduce_max_sync(kFullWarp, most);
        bool is_found = false;
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            const u32 equal = __ballot_sync(kFullWarp, keys[i] == most), first = equal & (0u - equal);
            if (is_found || equal == 0) continue;
            chosen[i] |= first, is_found = true;
            if (first >> rows.lane & 1) keys[i] = 0;
        }
    }
}
#ifdef KOG_CHOICES
// For hosts that compare choices: the numbers in the order in which they stand, 8 bits each; of the newest KOG_CHOICES positions.
__device__ __forceinline__ void keep_choice(const FinalizedRows& rows, u32 layer, u32 token) {
    static_assert(kChosen <= 8 && kNumExperts <= 256, "64 bits have room for a choice");
    if (rows.lane != 0 || (kTokens > 1 && rows.pass.position + token >= kMaxContext)) return;
    u64 numbers = 0;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) numbers |= static_cast<u64>(rows.role.shared->chosen[token][k]) << (8 * k);
    const u32 slot = (rows.pass.position + token) % KOG_CHOICES;
    reinterpret_cast<u64*>(rows.params.trace_ptr)[(slot * kLayers + layer) * kNumCtas + rows.role.cta] = numbers;
}
#endif
// Threads with few logits sort them by neighbours and weigh them all; others have Batcher's network, and weigh those that are chosen, one each.
constexpr bool kHasFewLogits = kLogits <= 4;
__device__ __forceinline__ void exchange_keys(u32& first, u32& second) {
    const u32 more = max(first, second);
    second = min(first, second), first = more;
}
// Runs of kSorted keys become runs of twice as many, and so on: in templates, since the compiler gives loops of loops up.
template <int kSorted, int kApart>
__device__ __forceinline__ void merge_runs(u32 (&keys)[kLogits]) {
    constexpr int kFirst = kApart % kSorted;
#pragma unroll
    for (int i = kFirst; i + kApart < kLogits; ++i)
        if ((i - kFirst) / kApart % 2 == 0 && i / (2 * kSorted) == (i + kApart) / (2 * kSorted)) exchange_keys(keys[i], keys[i + kApart]);
    if constexpr (kApart > 1) merge_runs<kSorted, kApart / 2>(keys);
    else if constexpr (2 * kSorted < kLogits) merge_runs<2 * kSorted, 2 * kSorted>(keys);
}
__device__ __forceinline__ void sort_falling(u32 (&keys)[kLogits]) {
    if constexpr (kHasFewLogits) {
#pragma unroll
        for (int round = 0; round < kLogits; ++round)
#pragma unroll
            for (int i = round & 1; i + 1 < kLogits; i += 2) exchange_keys(keys[i], keys[i + 1]);
    } else {
        merge_runs<1, 1>(keys);
    }
}
// The weights of a token's chosen ones, whose logits stand in their places.
__device__ __forceinline__ void weigh_chosen(const FinalizedRows& rows, u32 token, const float (&logits)[kLogits], float top) {
    static_assert(kChosen <= 32, "one of each thread");
    float& own = rows.role.shared->chosen_weights[token][rows.lane < kChosen ? rows.lane : 0];
    const float term = rows.lane < kChosen ? exp2_approx((own - top) * kLog2e) : 0.0f;
    float sum = term;
    if constexpr (!kChoiceIsNormalised) {
        sum = 0;
#pragma unroll
        for (int i = 0; i < kLogits; ++i) sum += exp2_approx((logits[i] - top) * kLog2e);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (rows.lane < kChosen) own = term / sum;
}
// A token's experts with the largest logits, of equal ones those with the smaller number, into shared memory; they stand in the order of
// their numbers.
__device__ __forceinline__ bool choose_experts(FinalizedRows& rows, u32 layer, u32 token, u32 tag) {
    float logits[kLogits];
    if (!collect_logits(rows, layer, token, tag, logits)) return false;
    u32 keys[kLogits], falling[kLogits], chosen[kLogits], largest, least, num_chosen = 0;
#pragma unroll
    for (int i = 0; i < kLogits; ++i) keys[i] = falling[i] = i * 32 + rows.lane < kNumExperts ? rising_key(logits[i]) : 0;
    sort_falling(falling);
    // The largest of all threads, so often as experts are chosen; those who have it go on to their next one.
#pragma unroll
    for (u32 k = 0; k < kChosen; ++k) {
        least = __reduce_max_sync(kFullWarp, falling[0]);
        if (k == 0) largest = least;
        if (falling[0] == least) {
#pragma unroll
            for (int i = 0; i + 1 < kLogits; ++i) falling[i] = falling[i + 1];
            falling[kLogits - 1] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) chosen[i] = __ballot_sync(kFullWarp, keys[i] >= least), num_chosen += __popc(chosen[i]);
    if (num_chosen != kChosen) choose_among_equal(rows, keys, chosen);  // several threads had the same one
    const float top = value_of_key(largest);
    u32 before = 0, place[kLogits];
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        place[i] = chosen[i] >> rows.lane & 1 ? before + __popc(chosen[i] & ((1u << rows.lane) - 1)) : kChosen;
        before += __popc(chosen[i]);
        if (place[i] < kChosen) rows.role.shared->chosen[token][place[i]] = i * 32 + rows.lane;
        if (!kHasFewLogits && place[i] < kChosen) rows.role.shared->chosen_weights[token][place[i]] = logits[i];
    }
    // The loader waits for these alone.
    __syncwarp();
    if (rows.lane == 0) mbar_arrive(rows.role.base + KOG_OFFSET(choice_full[token]));
    if constexpr (!kHasFewLogits) {
        weigh_chosen(rows, token, logits, top);
    } else {
        float terms[kLogits], sum = 0;
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            const bool is_chosen = place[i] < kChosen;
            terms[i] = exp2_approx((logits[i] - top) * kLog2e);
            if (is_chosen || !kChoiceIsNormalised) sum += terms[i];
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
#pragma unroll
        for (int i = 0; i < kLogits; ++i)
            if (place[i] < kChosen) rows.role.shared->chosen_weights[token][place[i]] = terms[i] / sum;
    }
    __syncwarp();
#ifdef KOG_CHOICES
    keep_choice(rows, layer, token);
#endif
    return true;
}

__device__ __forceinline__ float activation_of(float gate, float up) {
    if constexpr (!kClamps) return swiglu(gate, up);
    gate = fminf(gate, kClampLimit), up = fminf(fmaxf(up, -kClampLimit), kClampLimit);
    return gate * reciprocal_approx(1.0f + exp2_approx(gate * (-kClampAlpha * kLog2e))) * (up + 1.0f);
}
__device__ __forceinline__ u64* expert_activations(const FinalizedRows& rows, u32 place) {
    return reinterpret_cast<u64*>(rows.params.words_ptr) + kActivationOffset + place * (kFfn / 2);
}
// Rows of an expert's GATE_UP, of kColumns columns of each lane, which thread block `cta` of those that share them has: times `weight` into
// `words`. `first_bias`: of the expert's.
template <class O, u32 kColumns, bool kHasBias>
__device__ __forceinline__ bool gate_up_rows(FinalizedRows& rows, u64* words, u32 cta, u32 first_bias, float weight, float scale, u32 tag) {
#pragma unroll 1
    for (u32 block = 0; block < O::kBlocks; ++block) {
        const u32 row = cta * O::kCtaRows + block * O::kRows + rows.lane;
        [[maybe_unused]] float bias = 0;
        if (kHasBias && row < 2 * kLanes * kColumns)
            bias = WeightFormat::low(reinterpret_cast<const u16*>(rows.params.gate_up_bias_ptr)[first_bias + row]);
        float sum;
        if (!rows.row_sum(sum, O::kRows)) return false;
        sum *= scale;
        if constexpr (kHasBias) sum += bias;
        const float up = __shfl_down_sync(kFullWarp, sum, 1);
        const float activation = activation_of(sum, up) * weight;
        u32 end = kLanes * kColumns;
        if (O::kLastRows != O::kRows) end = min(end, (cta + 1) * O::kCtaRows / 2);
        rows.publish<O::kRows / 2, 2, kLanes == 1 ? 0 : kColumns, O::kCtaRows / 2>(words, kActivationStride, (cta * O::kCtaRows + block * O::kRows) / 2, end,
                                                                            activation, tag);
        rows.end_block();
    }
    return true;
}
#ifdef KOG_SHARED_EXPERT
// The shared expert's weight: the sigmoid of its gate's logit.
__device__ __forceinline__ bool collect_gate(const FinalizedRows& rows, u32 layer, u32 tag, float& weight) {
    const u64* word = logit_words(rows) + rows.role.cta % kReplicas * kRouterLogitsStride + kNumExperts;
    u64 got = load_relaxed(word);
    for (u32 rounds = 1; !__all_sync(kFullWarp, has_tag(got, tag)); ++rounds) {
        if (must_leave(rows.role.stopped())) return false;
        if (rounds % 1024 == 0) {
            WaitNote& note = rows.role.shared->note;
            note.phase = kSelectPhase + 1, note.layer = layer, note.lane = WaitNote::lane_and_expert(kNowhere, kNumExperts);
            note.wanted = tag, note.set_words(word, 1);
        }
        got = load_relaxed(word);
    }
    weight = sigmoid(logit_of(got));
    return true;
}
// Its activations, behind those of the chosen ones.
__device__ __forceinline__ bool gate_up_of_shared(FinalizedRows& rows, u32 layer, float scale, u32 tag) {
    float weight;
    if (!collect_gate(rows, layer, tag, weight)) return false;
    return gate_up_rows<SharedGateUpOp, kSharedFfn, false>(rows, expert_activations(rows, kChosen), rows.role.cta, 0, weight, scale, tag);
}
#endif
// GATE_UP of a share of the chosen experts' rows.
__device__ __forceinline__ bool gate_up_of_share(FinalizedRows& rows, u32 layer, u32 share, float scale, u32 tag) {
    const u32 place = share / kExpertCtas;
    const u32 expert = rows.role.shared->chosen[0][place];
    return gate_up_rows<GateUpOp, kFfn, kExpertBias>(rows, expert_activations(rows, place), share % kExpertCtas,
                                                     (layer * kNumExperts + expert) * (2 * kLanes * kFfn),
                                                     rows.role.shared->chosen_weights[0][place], scale, tag);
}
// The router and then GATE_UP. Matrix warps multiply the shared expert's rows in front of the chosen ones'; its weight comes with the logits.
__device__ __forceinline__ bool gate_up_of_experts(FinalizedRows& rows, u32 layer, u32 tag) {
    float scale;
    if (!rows.rms_scale(scale) || !publish_logits(rows, layer, scale, tag) || !choose_experts(rows, layer, 0, tag)) return false;
#ifdef KOG_SHARED_EXPERT
    if (!gate_up_of_shared(rows, layer, scale, tag)) return false;
#endif
    const u32 num = num_shares(rows.role.cta);
#pragma unroll 1
    for (u32 i = 0; i < num; ++i)
        if (!gate_up_of_share(rows, layer, rows.role.cta * kExpertShares + i, scale, tag)) return false;
    rows.count_vector<kLanes>(0);
    return true;
}
#endif

}  // namespace kog
