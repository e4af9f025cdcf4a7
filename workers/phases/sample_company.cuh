// The sampling warp in builds whose passes have tokens of several requests: seat i's request has token i of a pass, and thread i of the warp keeps what
// `sample` keeps of its only one. A seat that is empty, or whose request has ended, stands in for the first one that goes on: it has the same token,
// position, cache and sampling, and nobody uses what is chosen there. A launch ends behind its last pass, or when no seat goes on. See docs/passes.md.
#pragma once
#include "sample.cuh"

namespace kog {

// Of a launch: passes without an LM head, which are those in which all requests are inside their prompts; and the furthest position.
struct CompanyStart {
    u32 num_headless = 0, position = 0;
};
__device__ __forceinline__ CompanyStart start_of(const KogCompanyParams& company) {
    u32 num_inner = ~0u, position = 0;
#pragma unroll 1
    for (u32 seat = 0; seat < kTokens; ++seat) {
        if (!(company.taken >> seat & 1)) continue;
        const KogDecodeState& state = *reinterpret_cast<const KogDecodeState*>(company.state_ptr[seat]);
        if (state.finish != kNoneFinish) continue;
        num_inner = min(num_inner, state.num_prompt - min(state.num_prompt, state.position + 1));
        position = max(position, state.position);
    }
    return {num_inner == ~0u ? 0 : num_inner, position};
}

// For the watchdog: seats whose requests are to end, and in bit 31 whether others wait. Their pages lie in the host's memory: all looks are under way
// together.
constexpr u32 kAllSeats = (1u << kTokens) - 1;
__device__ __forceinline__ u32 told_seats(const KogCompanyParams& company) {
    u32 tags[kTokens], seats = 0;
#pragma unroll
    for (u32 seat = 0; seat < kTokens; ++seat)
        tags[seat] = company.taken >> seat & 1 ? load_system_u32(&reinterpret_cast<const KogHostPage*>(company.host_ptr[seat])->cancelled_tag) : 0;
#pragma unroll
    for (u32 seat = 0; seat < kTokens; ++seat)
        if ((company.taken >> seat & 1) && tags[seat] == company.request_tag[seat]) seats |= 1u << seat;
        else if (tags[seat] == kOthersWaitTag) seats |= 1u << 31;
    return seats;
}

__device__ __forceinline__ void sample_company(const KogDecodeParams& params, const KogPeers& peers, const Role& role, u32 num_steps) {
    constexpr u32 kSeatStopIds = sizeof(KogCompanyParams::stop_ids) / sizeof(KogCompanyParams::num_stop_ids);
    KogDecodeState& own = *reinterpret_cast<KogDecodeState*>(params.state_ptr);
    u64* stamps = reinterpret_cast<u64*>(params.stamps_ptr);
    const KogCompanyParams& company = role.company;
    const u32 lane = laneid(), seat = min(lane, kTokens - 1u);
    const bool is_taken = lane < kTokens && (company.taken >> seat & 1);
    KogDecodeState& state = is_taken ? *reinterpret_cast<KogDecodeState*>(company.state_ptr[seat]) : own;
    const u32 num_prompt = state.num_prompt, max_tokens = state.max_tokens;
    u32 token = state.token, position = state.position, finish = is_taken ? state.finish : kLengthFinish, number = own.epoch, num_kept = 0, others_wait = 0;
    if (own.finish != kNoneFinish) finish = own.finish;
#ifdef KOG_HASHES
    u64 hash = static_cast<u64>(state.hash[1]) << 32 | state.hash[0];
#endif
    for (u32 turn = 0;; ++turn) {
        const u32 live = __ballot_sync(kFullWarp, finish == kNoneFinish);
        const bool leave = turn == num_steps || live == 0 || others_wait;
        if (leave && role.cta == 0 && turn > 0) {
            if (is_taken) {
#ifdef KOG_HASHES
                state.hash[0] = static_cast<u32>(hash), state.hash[1] = static_cast<u32>(hash >> 32);
#endif
                state.token = token, state.position = position, state.finish = finish;
            }
            if (lane == 0) own.epoch = number, own.num_kept = num_kept;
        }
        const u32 first = live == 0 ? 0 : __popc(~live & (live - 1));  // that goes on
        Pass pass{__reduce_max_sync(kFullWarp, finish == kNoneFinish ? position : 0), number, leave};
#pragma unroll
        for (u32 i = 0; i < kTokens; ++i) {
            const u32 from = live >> i & 1 ? i : first;
            pass.tokens[i] = __shfl_sync(kFullWarp, token, from), pass.positions[i] = __shfl_sync(kFullWarp, position, from);
            pass.seats |= from << 4 * i;
        }
        if (lane == 0) announce(role, turn, pass);
        __syncwarp();
        if (leave || !mbar_wait(role.stopped(), role.base + KOG_OFFSET(pass_ended), turn & 1)) return;
        const u32 tag = ++number;
        num_kept = __popc(live);
        Candidate best{-INFINITY, kIdMask};
#pragma unroll 1
        for (u32 i = 0; i < kTokens; ++i) {
            Candidate found;  // of all tokens, whether they count or not: who has them all may write words anew
            if (!collect_best(params, peers, role, tag, i, found)) return;
            if (lane == i) best = found;
            others_wait = found.id & kOthersWait;
        }
        if (stamps != nullptr && role.cta == 0 && lane == 0) stamps[turn] = globaltimer_ns();
        if (finish == kNoneFinish) {
            const bool is_inner = position + 1 < num_prompt;
#ifdef KOG_HASHES
            hash = hashed(hash, is_inner ? Candidate{-INFINITY, kIdMask} : best);
#endif
            if (is_inner) {
                token = reinterpret_cast<const u32*>(company.prompt_ptr[seat])[position + 1];
                if (best.id & kCancelled) finish = kCancelledFinish;
            } else {
                token = best.id & kIdMask;
                const u32 index = position + 1 - num_prompt;
                bool stops = false;
                for (u32 k = 0; k < company.num_stop_ids[seat]; ++k) stops = stops || company.stop_ids[seat * kSeatStopIds + k] == token;
                if (best.id & kCancelled) finish = kCancelledFinish;
                else if (best.id & kNotFinite) finish = kNumericalFaultFinish;
                else if (stops) finish = kStopFinish;
                else if (index + 1 >= max_tokens || position + 2 >= kMaxContext) finish = kLengthFinish;
            }
            if (role.cta == 0 && (!is_inner || finish != kNoneFinish)) {
                // One entry of the host's ring: each word carries the request's tag.
                const u32 entry = is_inner ? 0 : position + 1 - num_prompt, request_tag = company.request_tag[seat];
                const bool has_token = finish != kCancelledFinish && finish != kNumericalFaultFinish;
                store_system_x2(reinterpret_cast<u64*>(company.ring_ptr[seat]) + 2 * entry, make_value_word(has_token ? token : 0xffffffffu, request_tag),
                                make_value_word(finish, request_tag));
            }
            ++position;
        }
        __syncwarp();
    }
}

}  // namespace kog
