// Choosing a token, bit for bit as kog_dist/decode/sampling/ (bits.py, choice.py) defines it: every operation is rounded on its own.
#pragma once
#include "layout.cuh"

namespace kog {

// Candidates travel as two value words: the score, and the id with these flags.
constexpr u32 kNotFinite = 1u << 31, kCancelled = 1u << 30, kOthersWait = 1u << 29, kIdMask = (1u << 29) - 1;

__device__ __forceinline__ float log_exactly(float x) {
    const u32 bits = __float_as_uint(x);
    int exponent = static_cast<int>(bits >> 23) - 126;
    const float mantissa = __uint_as_float((bits & 0x007fffffu) | 0x3f000000u);
    const bool low = mantissa < 0.70710678f;
    const float f = __fadd_rn(low ? __fadd_rn(mantissa, mantissa) : mantissa, -1.0f);
    const float e = static_cast<float>(exponent - (low ? 1 : 0));
    const float z = __fmul_rn(f, f);
    float p = 7.0376836292e-2f;
    p = __fadd_rn(__fmul_rn(p, f), -1.1514610310e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 1.1676998740e-1f);
    p = __fadd_rn(__fmul_rn(p, f), -1.2420140846e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 1.4249322787e-1f);
    p = __fadd_rn(__fmul_rn(p, f), -1.6668057665e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 2.0000714765e-1f);
    p = __fadd_rn(__fmul_rn(p, f), -2.4999993993e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 3.3333331174e-1f);
    float y = __fmul_rn(__fmul_rn(p, f), z);
    y = __fadd_rn(y, __fmul_rn(e, -2.12194440e-4f));
    y = __fadd_rn(y, -__fmul_rn(0.5f, z));
    return __fadd_rn(__fadd_rn(f, y), __fmul_rn(e, 0.693359375f));
}

// Gumbel noise of one vocabulary id; Philox4x32-10.
__device__ __forceinline__ float gumbel(u32 id, u32 position, u64 seed) {
    u32 c0 = id >> 2, c1 = position, c2 = 0, c3 = 0;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const u32 part = id & 3, word = part == 0 ? c0 : part == 1 ? c1 : part == 2 ? c2 : c3;
    const float uniform = __fmul_rn(__fadd_rn(static_cast<float>(word >> 9), 0.5f), 1.1920928955078125e-07f);
    return -log_exactly(-log_exactly(uniform));
}

struct Candidate {
    float score;
    u32 id;  // with flags
};

// The larger score, ties to the lower id; flags are kept.
__device__ __forceinline__ Candidate better(const Candidate& a, const Candidate& b) {
    const u32 flags = (a.id | b.id) & ~kIdMask;
    const bool second = b.score > a.score || (b.score == a.score && (b.id & kIdMask) < (a.id & kIdMask));
    return second ? Candidate{b.score, b.id | flags} : Candidate{a.score, a.id | flags};
}
__device__ __forceinline__ Candidate best_of_warp(Candidate mine) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        Candidate other{__shfl_xor_sync(kFullWarp, mine.score, offset), __shfl_xor_sync(kFullWarp, mine.id, offset)};
        mine = better(mine, other);
    }
    return mine;
}

// Ranks whose candidates are asked for at a time: one where the sampler goes by drafts, or has several requests, and no registers for two.
#if defined KOG_DRAFTS || defined KOG_COMPANY
constexpr int kSourcesTogether = 1;
#else
constexpr int kSourcesTogether = kRanks % 2 == 0 ? 2 : 1;
#endif

// The best candidate of all thread blocks of all ranks for the successor of a token of the pass. False: leave.
__device__ __forceinline__ bool collect_best(const KogDecodeParams& params, const KogPeers& peers, const Role& role, u32 tag, u32 token,
                                             Candidate& best) {
    const u32 copy = role.cta % kReplicas;
    if constexpr (kRanks > 1) {
        Candidate mine{-INFINITY, kIdMask};
        const auto fold = [&](u32 score, u32 id) { mine = better(mine, {__uint_as_float(score), id}); };
        if (!collect_candidates<kRanks, kNumCtas, kSourcesTogether>(peers, candidate_box(), tag & 1, kCandidateCopyWords, copy * kTokens + token, tag, role.stopped(),
                                                  role.shared->peer_notes[1], fold))
            return false;
        best = best_of_warp(mine);
        return true;
    }
    const u64* candidates = reinterpret_cast<const u64*>(params.words_ptr) + kCandidateOffset + (copy * kTokens + token) * kCandidateStride;
    while (true) {
        bool ready = true;
        Candidate mine{-INFINITY, kIdMask};
#pragma unroll
        for (u32 first = 0; first < kNumCtas; first += 32) {
            if (first + laneid() < kNumCtas) {
                const ulonglong2 words = load_relaxed_x2(candidates + 2 * (first + laneid()));
                const bool here = value_has_tag(words.x, tag) && value_has_tag(words.y, tag);
                ready = ready && here;
                mine = better(mine, {__uint_as_float(static_cast<u32>(words.x)), static_cast<u32>(words.y)});
            }
        }
        if (__all_sync(kFullWarp, ready)) {
            best = best_of_warp(mine);
            return true;
        }
        if (must_leave(role.stopped())) return false;
    }
}

#ifdef KOG_HASHES
// Of every token so far and the bits of its score, so of everything that could have changed either (FNV-1a, in words). Not of whether others wait.
__device__ __forceinline__ u64 hashed(u64 hash, const Candidate& best) {
    return (hash ^ (static_cast<u64>(__float_as_uint(best.score)) << 32 | (best.id & ~kOthersWait))) * 0x100000001b3ull;
}
#endif

// The sampling warp of every thread block: gathers all candidates and decides, like all others, what the next token is.
__device__ __forceinline__ void sample(const KogDecodeParams& params, const KogPeers& peers, const Role& role, u32 num_steps) {
    KogDecodeState* state = reinterpret_cast<KogDecodeState*>(params.state_ptr);
    const u32* prompt = reinterpret_cast<const u32*>(params.prompt_ptr);
    u64* ring = reinterpret_cast<u64*>(params.ring_ptr);
    u64* stamps = reinterpret_cast<u64*>(params.stamps_ptr);
    const u32 lane = laneid();
    const u32 max_tokens = state->max_tokens;
    u32 token = state->token, finish = state->finish, position = state->position, number = state->epoch;
#ifdef KOG_HASHES
    u64 hash = static_cast<u64>(state->hash[1]) << 32 | state->hash[0];
#endif
    for (u32 turn = 0;; ++turn) {
        const bool leave = turn == num_steps || finish != kNoneFinish;
        if (leave && role.cta == 0 && lane == 0 && turn > 0) {
#ifdef KOG_HASHES
            state->hash[0] = static_cast<u32>(hash), state->hash[1] = static_cast<u32>(hash >> 32);
#endif
            state->token = token;
            state->position = position;
            state->epoch = number;
            state->finish = finish;
        }
        if (lane == 0) announce(role, turn, {position, number, leave, {token}});
        __syncwarp();
        if (leave || !mbar_wait(role.stopped(), role.base + KOG_OFFSET(pass_ended), turn & 1)) return;
        const u32 tag = ++number;
        Candidate best;
        if (!collect_best(params, peers, role, tag, 0, best)) return;
#ifdef KOG_HASHES
        hash = hashed(hash, best);
        if (role.cta == 0 && lane == 0 && tag % KOG_HASH_TOKENS == 0)
            reinterpret_cast<u64*>(params.trace_ptr)[tag / KOG_HASH_TOKENS % KOG_HASHES] = hash;
#endif
        const bool is_inner = position + 1 < role.num_prompt;
        if (is_inner) {
            token = prompt[position + 1];
            if (best.id & kCancelled) finish = kCancelledFinish;
        } else {
            token = best.id & kIdMask;
            const u32 index = position + 1 - role.num_prompt;
            bool stops = false;
            for (u32 k = 0; k < params.num_stop_ids; ++k) stops = stops || params.stop_ids[k] == token;
            if (best.id & kCancelled) finish = kCancelledFinish;
            else if (best.id & kNotFinite) finish = kNumericalFaultFinish;
            else if (stops) finish = kStopFinish;
            else if (index + 1 >= max_tokens || position + 2 >= kMaxContext) finish = kLengthFinish;
        }
        if (role.cta == 0 && lane == 0) {
            const u64 now = globaltimer_ns();
            if (stamps != nullptr) stamps[turn] = now;
            // One entry of the host's ring: each word carries the request's tag.
            const bool is_told = !is_inner || finish != kNoneFinish;
            const u32 entry = is_inner ? 0 : position + 1 - role.num_prompt;
            const bool has_token = finish != kCancelledFinish && finish != kNumericalFaultFinish;
            if (is_told)
                store_system_x2(ring + 2 * entry, make_value_word(has_token ? token : 0xffffffffu, params.request_tag),
                                make_value_word(finish, params.request_tag));
        }
        ++position;
    }
}

}  // namespace kog
