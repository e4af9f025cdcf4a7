// The sampling warp in builds with processors and drafts: passes as in `sample_drafts`, tokens as in `sample_processors`. Of a pass each token is chosen
// behind what the ones in front of it have changed: it is told to the host, which makes the next one's mask of it, counted among those said, and
// reported. The first that is not the one drafted ends the pass. What a grammar forces is drafted before anything is looked up. See docs/passes.md.
#pragma once
#include "sample_drafts.cuh"
#include "sample_processors.cuh"

namespace kog {

static_assert(kRanks == 1, "reports of ranks that do not begin a launch together would take each other's slots");

// `Drafter`, to which a grammar may say what comes next. It stands in memory where the answer goes on, so the other build finds it, too.
struct ForcedDrafter : Drafter {
    using Drafter::Drafter;

    __device__ __forceinline__ bool is_forced() const { return num > 0 && start == kNotFound; }
    __device__ __forceinline__ u32 draft_token(u32 i, u32 last) const { return is_forced() ? at(last + 1 + i) : token(i, last); }
    __device__ __forceinline__ bool is_of_prediction() const { return !is_forced() && is_predicted(start); }

    // As `Drafter::took`. `forced`: see OwnRows; what it says counts if the newest token is the one that was forced. `wait`: of KogForcedParams.
    __device__ __forceinline__ void took_forced(u32 num_new, u32 num_right, u32 last, u32 token, u32 forced, u32 wait) {
        count(num_new, num_right);
        balance -= static_cast<int>(num_right * wait);
        const u32 num_forced = __shfl_sync(kFullWarp, forced, 0), first = __shfl_sync(kFullWarp, forced, 1);
        const u32 behind = num_forced > 1 && first == token ? min(num_forced, params.pass_tokens) - 1 : 0;
        if (balance < 0 || static_cast<int>(behind * (kDraftUnit - wait)) <= extra() + edge()) {
            look_up(last, token, num_new);
            return;
        }
        if (laneid() >= 2 && laneid() < 2 + behind) store_relaxed_u32(tokens() + last + laneid() - 1, forced);
        __syncwarp();
        balance -= edge(), per_pass = params.pass_tokens, num_idle = 0;
        start = kNotFound, num = behind;
    }
};

__device__ __forceinline__ void sample_processor_drafts(const KogDecodeParams& params, const KogPeers& peers, const KogProcessorParams& processors,
                                                    const KogDraftParams& drafts, const KogForcedParams& told, const Role& role, u32 num_steps,
                                                    u32 stop_position) {
    KogDecodeState& state = *reinterpret_cast<KogDecodeState*>(params.state_ptr);
    const u32* prompt = reinterpret_cast<const u32*>(params.prompt_ptr);
    const u32 lane = laneid(), num_prompt = role.num_prompt;
    u32 token = state.token, finish = state.finish, position = state.position, number = passes_of(state), num_kept = 0;
    u32 forced = 0, after = 0;  // `after`: ProcessorFlags of what is left to do for the newest token
    store_shared(role.base + KOG_OFFSET(max_tokens), state.max_tokens);
    const OwnRows rows{params, peers, processors, role, told, forced};
    rows.set_number(state.num_exchanges);
    Reporter reporter{rows, processors, role};
    ForcedDrafter drafter{drafts, role, state};
    if (finish == kNoneFinish && drafter.per_pass == kTokens && position == num_prompt && state.draft_looked < position) {
        drafter.push(drafter.index_of(position), token);  // behind a first step that was an LM head alone
        drafter.find(drafter.index_of(position), token, kTokens);
    }
    // Count and report the newest token. False: leave.
    const auto settle = [&] {
        if (after & kRemembers) remember_chosen(rows);
        if (!(after & kReports)) return true;
        return reporter.report(rows.report_tag(), rows.position() + 1 - num_prompt, params.request_tag);
    };
    for (u32 turn = 0;; ++turn) {
        const bool leave = turn == num_steps || finish != kNoneFinish || drafter.per_pass != kTokens || (kDeltaLayers > 0 && position >= stop_position);
        // The first token is known, and those of the prompt; drafts stand behind them.
        const u32 lead = position + 1 < num_prompt ? min(num_prompt - 1 - position, kTokens - 1u) : 0;
        const u32 last = position + lead, num_answered = last + 1 - min(num_prompt, last + 1);
        const u32 most = min(load_shared_u32(role.base + KOG_OFFSET(max_tokens)), kMaxContext - num_prompt);  // tokens of the answer
        const u32 num_drafted = min(min(drafter.num, kTokens - 1u - lead), most - min(most, num_answered + 1));
        const u32 num_following = kDeltaLayers > 0 ? min(lead + num_drafted, stop_position - position - 1) : lead + num_drafted;
        u32 mine = token;
        if (lane > 0 && lane < kTokens && position + lane < kMaxContext) {
            if (position + lane < num_prompt) mine = prompt[position + lane];
            else if (lane - lead <= num_drafted) mine = drafter.draft_token(lane - lead - 1, drafter.index_of(last));
        }
        Pass pass{position, number, leave, {token}};
#pragma unroll
        for (u32 i = 1; i < kTokens; ++i) pass.tokens[i] = __shfl_sync(kFullWarp, mine, i);
        // The last report comes before the thread block says that it has finished: then nobody keeps the time of waits any more.
        if (!leave && lane == 0) announce(role, turn, pass);
        __syncwarp();
        if (!settle()) return;
        if (leave) {
            if (role.cta == 0 && lane == 0 && turn > 0) {
                state.token = token, state.position = position, state.finish = finish, state.num_kept = num_kept;
                state.num_exchanges = rows.number(), passes_of(state) = number, state.draft_looked = position;
                drafter.leave_to(state);
            }
            if (lane == 0) announce(role, turn, pass);
            return;
        }
        if (position + kTokens >= num_prompt)
            drafter.prepare(drafter.index_of(last), kTokens - lead, role.shared->passes[turn & 1].tokens + 1 + lead);
        ++number;
        u32 num_new = 0;  // tokens of the answer
        bool counts = true;
        num_kept = after = 0;
#pragma unroll 1
        for (u32 i = 0; counts && i < kTokens; ++i) {
            if (!settle()) return;
            after = 0;
            const bool is_inner = position + 1 < num_prompt;
            rows.set_turn(turn, i);
            __syncwarp();
            if ((!is_inner || i == 0) && !choose_token(rows, finish)) return;
            if (is_inner) {
                token = prompt[position + 1];
            } else if (finish == kNoneFinish) {
                token = id_of(processors, rows.chosen_place());
                finish = finish_of(params, load_shared_u32(role.base + KOG_OFFSET(max_tokens)), token, position + 1 - num_prompt, position);
                after = processors.flags;
            }
            ++num_kept, num_new += !is_inner;
            counts = finish == kNoneFinish && i < num_following && token == role.shared->passes[turn & 1].tokens[(i + 1) % kTokens];
            u32 said = 0;  // by the pass's last token
            if (!counts && num_new > 0) said = num_drafted << 8 | min(num_new - 1, num_drafted) << 16 | (num_drafted > 0 && drafter.is_of_prediction()) << 24;
            tell_host(params, role, turn, position, token, finish, said);
            ++position;
            if (!is_inner && finish == kNoneFinish) drafter.push(drafter.index_of(position), token);
        }
        if (num_new > 0 && finish == kNoneFinish)
            drafter.took_forced(num_new, min(num_new - 1, num_drafted), drafter.index_of(position), token, forced, told.wait);
    }
}

}  // namespace kog
