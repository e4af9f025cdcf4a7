// The LM head's products: logits, and the best of them, which ends the pass.
#pragma once
#include "finalize_rows.cuh"
#include "sample.cuh"
#ifdef KOG_PROCESSORS
#include "logits_processors.cuh"
#endif

namespace kog {

// Thread `lane`'s row of a block of the LM head's rows, among this rank's; and whether there is such a row.
__device__ __forceinline__ u32 vocab_row(const FinalizedRows& rows, u32 block) {
    return first_vocab_row(rows.role.cta) + block * HeadOp::kRows + rows.lane;
}
__device__ __forceinline__ bool is_own_row(const FinalizedRows& rows, u32 block) {
    return rows.lane < HeadOp::kRows && vocab_row(rows, block) < end_vocab_row(rows.role.cta);
}

// What sums of row `lane` of a block are multiplied by in that product, where the head is quantised.
__device__ __forceinline__ float head_row_scale(const FinalizedRows& rows, u32 product, u32 block) {
#ifdef KOG_HEAD_FORMAT
    const float* scales = reinterpret_cast<const float*>(rows.params.tape_ptr + kHeadScalesOffset) + (product * kNumCtas + rows.role.cta) * HeadOp::kCtaRows;
    if (rows.lane < HeadOp::kRows) return scales[block * HeadOp::kRows + rows.lane] * kHeadFactor;
#endif
    return 1.0f;
}

// Product number `product` of the LM head. Those of several streams are summed in `logits`, in the order of the model's lanes; the last
// one's are the logits that are chosen from. Of several tokens their logits lie one behind the other.
__device__ __forceinline__ bool finalize_head(FinalizedRows& rows, u32 product, Candidate (&best)[kTokens]) {
    float* logits = reinterpret_cast<float*>(rows.params.logits_ptr);
    [[maybe_unused]] const float inverse_temperature = __uint_as_float(rows.params.inverse_temperature_bits);
    [[maybe_unused]] TokenScales scale{kInverseXScale};
#pragma unroll 1
    for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
        float sums[kTokens];
        [[maybe_unused]] float before = 0;
        if constexpr (kStreamHead) {
            if (product > 0 && is_own_row(rows, block)) before = logits[vocab_row(rows, block)];
            if (block == 0 && !rows.rms_scale(scale)) return false;
        }
        const float own_scale = head_row_scale(rows, product, block);
        if (!rows.row_sum(sums, HeadOp::kRows)) return false;
        rows.end_block();
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            float logit = of_token(sums, token);
            if constexpr (HeadOp::kCoded) logit *= own_scale;
            logit *= scale.of(token);
            const u32 row = vocab_row(rows, block);
            if constexpr (kStreamHead) {
                logit += before;
                if (product + 1 < kHeadProducts) {
                    if (is_own_row(rows, block)) logits[row] = logit;
                    continue;
                }
            }
#ifdef KOG_PROCESSORS
            if constexpr (kTokens == 1) hand_logits(rows.role, block, row, logit, logits);
            else if (is_own_row(rows, block)) logits[token * kVocabRows + row] = logit;
            continue;
#endif
            if (is_own_row(rows, block)) {
                const u32 id = rows.params.vocab_first + row;
                logits[token * kVocabRows + row] = logit;
                float score = logit;
#ifdef KOG_COMPANY
                const u32 seat = rows.pass.seat_of(token);
                const float inverse_temperature = __uint_as_float(rows.role.company.inverse_temperature_bits[seat]);
                const u64 seed = rows.role.company.seed[seat];
#else
                const u64 seed = rows.params.seed;
#endif
                if (inverse_temperature > 0)
                    score = __fadd_rn(__fmul_rn(logit, inverse_temperature), gumbel(id, rows.pass.noise_position(token), seed));
                const bool finite = fabsf(logit) < INFINITY;
                set_of_token(best, token, better(of_token(best, token), {finite ? score : -INFINITY, finite ? id : id | kNotFinite}));
            }
        }
    }
    ++rows.num_vectors;
    return true;
}

// Every thread block publishes a candidate in every pass, an empty one if it has none: the end of a pass is an exchange
// of all with all, which is also what makes the words' slots safe to write again.
__device__ __forceinline__ void end_pass(const FinalizedRows& rows, Candidate (&candidates)[kTokens]) {
#ifdef KOG_PROCESSORS  // the sampler does it
    if constexpr (kTokens > 1) __syncwarp();  // all threads' logits are there
    if (rows.lane == 0) mbar_arrive(rows.role.base + KOG_OFFSET(pass_ended));
    return;
#endif
    const u32 tag = rows.pass.number + 1;
    const bool hears_host = rows.role.cta == 0 && (kRanks == 1 || rows.peers.rank == 0);
#ifdef KOG_COMPANY
    const u32 cancelled = hears_host ? rows.role.shared->cancelled : 0;  // seats
#else
    const bool is_cancelled = hears_host && rows.role.shared->cancelled;
#endif
#if defined KOG_DRAFTS || defined KOG_COMPANY
    const u32 of_host = hears_host && rows.role.shared->others_wait ? kOthersWait : 0;
#else
    constexpr u32 of_host = 0;
#endif
#pragma unroll 1
    for (u32 token = 0; token < kTokens; ++token) {
    Candidate best = best_of_warp(of_token(candidates, token));
#ifdef KOG_COMPANY
    const bool is_cancelled = cancelled >> token & 1;
#endif
    if (is_cancelled) best.id |= kCancelled;
    best.id |= of_host;
    if constexpr (kRanks > 1) {
        publish_candidate<kRanks, kReplicas>(rows.peers, candidate_box().behind(token * kCandidateCopyWords), tag & 1, kTokens * kCandidateCopyWords,
                                             rows.role.cta, __float_as_uint(best.score), best.id, tag);
    } else {
        u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + kCandidateOffset;
        if (rows.lane < kReplicas)
            store_relaxed_x2(words + (rows.lane * kTokens + token) * kCandidateStride + 2 * rows.role.cta, make_value_word(__float_as_uint(best.score), tag),
                             make_value_word(best.id, tag));
    }
    }
    __syncwarp();
    if (rows.lane == 0) mbar_arrive(rows.role.base + KOG_OFFSET(pass_ended));
}

}  // namespace kog
