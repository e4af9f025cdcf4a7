// The sampling warp in the build with processors: as `sample`, but with `choose_token` for tokens of the answer, and with a report of each. What both
// have in common stands in both, since the plain build's instructions are to stay what they were measured with.
#pragma once
#include "choose.cuh"
#include "report.cuh"

namespace kog {

// Tell the thread block's other warps of a pass of one token. If there is none, thread block 0 leaves the state to the next launch.
__device__ __forceinline__ void announce_pass(const Role& role, KogDecodeState* state, u32 turn, const Pass& pass, u32 finish) {
    if (pass.is_none && role.cta == 0 && laneid() == 0 && turn > 0) {
        state->token = pass.tokens[0];
        state->position = pass.position;
        state->epoch = pass.number;
        state->finish = finish;
    }
    if (laneid() == 0) announce(role, turn, pass);
    __syncwarp();
}

// Why an answer ends with its token number `index`, which follows `position`.
__device__ __forceinline__ u32 finish_of(const KogDecodeParams& params, u32 max_tokens, u32 token, u32 index, u32 position) {
    bool stops = false;
    for (u32 i = 0; i < params.num_stop_ids; ++i) stops = stops || params.stop_ids[i] == token;
    return stops ? kStopFinish : index + 1 >= max_tokens || position + 2 >= kMaxContext ? kLengthFinish : kNoneFinish;
}

// Thread block 0 writes the successor of the token at `position` for the host. `drafted`: what the entry says besides.
__device__ __forceinline__ void tell_host(const KogDecodeParams& params, const Role& role, u32 turn, u32 position, u32 token, u32 finish,
                                          u32 drafted = 0) {
    if (role.cta != 0 || laneid() != 0) return;
    u64* stamps = reinterpret_cast<u64*>(params.stamps_ptr);
    if (stamps != nullptr) stamps[turn] = globaltimer_ns();
    // One entry of the host's ring: each word carries the request's tag.
    const bool counts = position + 1 >= role.num_prompt || finish != kNoneFinish;
    const u32 entry = position + 1 >= role.num_prompt ? position + 1 - role.num_prompt : 0;
    const bool has_token = finish < kCancelledFinish;
    if (counts)
        store_system_x2(reinterpret_cast<u64*>(params.ring_ptr) + 2 * entry, make_value_word(has_token ? token : 0xffffffffu, params.request_tag),
                        make_value_word(finish | drafted, params.request_tag));
}

#ifndef KOG_DRAFTS  // which have a sampler of their own: sample_processor_drafts.cuh
__device__ __forceinline__ void sample_processors(const KogDecodeParams& params, const KogPeers& peers, const KogProcessorParams& processors,
                                              const Role& role, u32 num_steps) {
    KogDecodeState* state = reinterpret_cast<KogDecodeState*>(params.state_ptr);
    const u32* prompt = reinterpret_cast<const u32*>(params.prompt_ptr);
    u32 token = state->token, finish = state->finish, after = 0;  // `after`: ProcessorFlags of what is left to do for the newest token
    store_shared(role.base + KOG_OFFSET(max_tokens), state->max_tokens);
    const OwnRows rows{params, peers, processors, role};
    rows.set_number(state->num_exchanges);
    Reporter reporter{rows, processors, role};
    u32 position = state->position, number = state->epoch;
    for (u32 turn = 0;; turn = rows.turn() + 1) {
        const bool leave = turn == num_steps || finish != kNoneFinish;
        // The last report comes before the thread block says that it has finished: then nobody keeps the time of waits any more.
        if (!leave) announce_pass(role, state, turn, {position, number, 0, {token}}, finish);
        // What nobody here waits for comes after that.
        if (turn > 0) tell_host(params, role, turn - 1, position - 1, token, finish);
        if (after & kRemembers) remember_chosen(rows);
        if ((after & kReports) && !reporter.report(number, position - role.num_prompt, params.request_tag)) return;
        if (leave) {
            if (role.cta == 0 && laneid() == 0 && turn > 0) state->num_exchanges = rows.number();
            announce_pass(role, state, turn, {position, number, 1, {token}}, finish);
            return;
        }
        finish = kNoneFinish;
        rows.set_turn(turn);
        if (!choose_token(rows, finish)) return;
        position = rows.position(), number = rows.pass_number();  // read again: no registers are left to keep them in while choosing
        const u32 index = position + 1 - role.num_prompt;
        after = 0;
        if (position + 1 < role.num_prompt) {
            token = prompt[position + 1];
        } else if (finish == kNoneFinish) {
            token = id_of(processors, rows.chosen_place());
            finish = finish_of(params, load_shared_u32(role.base + KOG_OFFSET(max_tokens)), token, index, position);
            after = processors.flags;
        }
        ++position, ++number;
    }
}
#endif

}  // namespace kog
