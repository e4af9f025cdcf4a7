// The sampling warp in builds with drafts, whose passes have kTokens tokens: as `sample`, but of a pass those tokens count that are what is chosen in
// front of them; behind the first that is not, the next pass begins. What both have in common stands in both, since the plain build's instructions are
// to stay what they were measured with. Where another number of tokens pays, the launch ends, and the other build goes on. See docs/passes.md.
#pragma once
#include "drafts.cuh"
#include "sample.cuh"

namespace kog {

// Of a build's own words.
__device__ __forceinline__ u32& passes_of(KogDecodeState& state) { return kTokens == 1 ? state.epoch : state.pass_epoch; }

// `stop_position`: of models with delta nets, behind how many tokens states are to stand when the launch ends, if it comes so far.
__device__ __forceinline__ void sample_drafts(const KogDecodeParams& params, const KogPeers& peers, const KogDraftParams& drafts, const Role& role,
                                              u32 num_steps, u32 stop_position) {
    KogDecodeState& state = *reinterpret_cast<KogDecodeState*>(params.state_ptr);
    const u32* prompt = reinterpret_cast<const u32*>(params.prompt_ptr);
    const u32* fixed = reinterpret_cast<const u32*>(params.drafts_ptr);  // by position, instead of looking up
    u64* ring = reinterpret_cast<u64*>(params.ring_ptr);
    u64* stamps = reinterpret_cast<u64*>(params.stamps_ptr);
    const u32 lane = laneid(), max_tokens = state.max_tokens, num_prompt = role.num_prompt;
    u32 token = state.token, finish = state.finish, position = state.position, number = passes_of(state), num_kept = 0, others_wait = 0;
    Drafter drafter{drafts, role, state};
    if (fixed == nullptr && finish == kNoneFinish && drafter.per_pass == kTokens && position == num_prompt && state.draft_looked < position) {
        drafter.push(drafter.index_of(position), token);  // behind a first step that was an LM head alone
        drafter.find(drafter.index_of(position), token, kTokens);
    }
#ifdef KOG_HASHES
    u64 hash = static_cast<u64>(state.hash[1]) << 32 | state.hash[0];
#endif
    for (u32 turn = 0;; ++turn) {
        const bool leave = turn == num_steps || finish != kNoneFinish || others_wait || (fixed == nullptr && drafter.per_pass != kTokens) ||
                           (kDeltaLayers > 0 && position >= stop_position);
        if (leave && role.cta == 0 && lane == 0 && turn > 0) {
#ifdef KOG_HASHES
            state.hash[0] = static_cast<u32>(hash), state.hash[1] = static_cast<u32>(hash >> 32);
#endif
            state.token = token, state.position = position, state.finish = finish, state.num_kept = num_kept;
            passes_of(state) = number;
            state.draft_looked = position;
            drafter.leave_to(state);
        }
        // The first token is known, and those of the prompt; drafts stand behind them.
        const u32 lead = position + 1 < num_prompt ? min(num_prompt - 1 - position, kTokens - 1u) : 0;
        const u32 last = position + lead, num_answered = last + 1 - min(num_prompt, last + 1);
        const u32 most = min(max_tokens, kMaxContext - num_prompt);  // tokens of the answer
        const u32 num_drafted = min(min(drafter.num, kTokens - 1u - lead), most - min(most, num_answered + 1));
        u32 mine = token;
        if (lane > 0 && lane < kTokens && position + lane < kMaxContext) {
            const u32 at = position + lane;
            if (at < num_prompt) mine = prompt[at];
            else if (fixed != nullptr) mine = fixed[at];
            else if (lane - lead <= num_drafted) mine = drafter.token(lane - lead - 1, drafter.index_of(last));
        }
        Pass pass{position, number, leave, {token}};
#pragma unroll
        for (u32 i = 1; i < kTokens; ++i) pass.tokens[i] = __shfl_sync(kFullWarp, mine, i);
        if (lane == 0) announce(role, turn, pass);
        __syncwarp();
        if (leave) return;
        const u32 num_there = fixed != nullptr ? kTokens : 1 + lead + num_drafted;
        const u32 num_known = kDeltaLayers > 0 ? min(num_there, stop_position - position) : num_there;
        if (fixed == nullptr && position + kTokens >= num_prompt)
            drafter.prepare(drafter.index_of(last), kTokens - lead, role.shared->passes[turn & 1].tokens + 1 + lead);
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(pass_ended), turn & 1)) return;
        const u32 tag = ++number;
        u32 num_new = 0;  // tokens of the answer
        bool counts = true;
        num_kept = 0;
#pragma unroll 1
        for (u32 i = 0; i < kTokens; ++i) {
            Candidate best;  // of all tokens, whether they count or not: who has them all may write words anew
            if (!collect_best(params, peers, role, tag, i, best)) return;
            if (!counts) continue;
            others_wait = best.id & kOthersWait;
            const bool is_inner = position + 1 < num_prompt;
#ifdef KOG_HASHES
            hash = hashed(hash, kTokens > 1 && is_inner ? Candidate{-INFINITY, kIdMask} : best);
            if (role.cta == 0 && lane == 0 && tag % KOG_HASH_TOKENS == 0)
                reinterpret_cast<u64*>(params.trace_ptr)[tag / KOG_HASH_TOKENS % KOG_HASHES] = hash;
#endif
            if (is_inner) {
                token = prompt[position + 1];
                if (best.id & kCancelled) finish = kCancelledFinish;
            } else {
                token = best.id & kIdMask;
                const u32 index = position + 1 - num_prompt;
                bool stops = false;
                for (u32 k = 0; k < params.num_stop_ids; ++k) stops = stops || params.stop_ids[k] == token;
                if (best.id & kCancelled) finish = kCancelledFinish;
                else if (best.id & kNotFinite) finish = kNumericalFaultFinish;
                else if (stops) finish = kStopFinish;
                else if (index + 1 >= max_tokens || position + 2 >= kMaxContext) finish = kLengthFinish;
                ++num_new;
            }
            ++num_kept;  // behind an LM head alone the other tokens' layers have not run
            counts = !kHeadOnly && finish == kNoneFinish && i + 1 < num_known && token == role.shared->passes[turn & 1].tokens[(i + 1) % kTokens];
            if (role.cta == 0 && lane == 0) {
                const u64 now = globaltimer_ns();
                if (stamps != nullptr) stamps[turn] = now;
                // One entry of the host's ring: each word carries the request's tag. The pass's last one says what was drafted.
                const bool is_told = !is_inner || finish != kNoneFinish;
                const u32 entry = is_inner ? 0 : position + 1 - num_prompt;
                const bool has_token = finish != kCancelledFinish && finish != kNumericalFaultFinish;
                u32 ending = finish;
                if (!counts && fixed == nullptr && num_new > 0)
                    ending |= num_drafted << 8 | min(num_new - 1, num_drafted) << 16 | (num_drafted > 0 && drafter.is_predicted(drafter.start)) << 24;
                if (is_told)
                    store_system_x2(ring + 2 * entry, make_value_word(has_token ? token : 0xffffffffu, params.request_tag),
                                    make_value_word(ending, params.request_tag));
            }
            ++position;
            if (fixed == nullptr && !is_inner && finish == kNoneFinish) drafter.push(drafter.index_of(position), token);
        }
        if (fixed == nullptr && num_new > 0 && finish == kNoneFinish)
            drafter.took(num_new, min(num_new - 1, num_drafted), drafter.index_of(position), token);
    }
}

}  // namespace kog
