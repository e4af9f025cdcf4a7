// Drafts that the sampling warp looks up, as kog_dist/decode/pass_drafts.py and lookup.py define it: where the newest tokens stood before, and what
// followed there. All thread blocks do the same with the same tokens, and find the same, so nobody tells anybody. What a warp reads was there
// before the launch, or it has stored it itself: all store the same tokens at the same places, and each only once in a request.
#pragma once
#include "layout.cuh"

namespace kog {

constexpr u32 kNotFound = ~0u, kGap = ~0u;  // kGap: between prediction and prompt
constexpr u32 kLeast = 3, kMost = 32;      // tokens that must be alike, and that are compared
constexpr u32 kBehind = 4, kAhead = 24, kLost = 8;
static_assert(kTokens <= 4 && kAhead + kBehind <= 32, "what is unrolled, and a place for each thread");

// Uniform in the warp.
struct Drafter {
    const KogDraftParams& params;
    Drafting& lists;         // of the thread block
    u32 place, num_missed;   // where the next token stands if an earlier draft goes on; tokens since one was as expected
    u32 start, num;          // the draft: where it stands, how many tokens it has
    u32 num_idle, per_pass;  // passes without one; tokens of the next pass
    int balance;

    __device__ __forceinline__ Drafter(const KogDraftParams& params, const Role& role, const KogDecodeState& state)
        : params(params), lists(role.shared->drafting), place(state.draft_place), num_missed(state.draft_missed), start(state.draft_start),
          num(state.draft_tokens), num_idle(state.draft_idle), per_pass(state.pass_tokens), balance(static_cast<int>(state.draft_balance)) {}
    __device__ __forceinline__ void leave_to(KogDecodeState& state) const {
        state.draft_place = place, state.draft_missed = num_missed, state.draft_start = start, state.draft_tokens = num;
        state.draft_idle = num_idle, state.pass_tokens = per_pass, state.draft_balance = static_cast<u32>(balance);
    }

    __device__ __forceinline__ u32* tokens() const { return reinterpret_cast<u32*>(params.tokens_ptr); }
    __device__ __forceinline__ u32 at(u32 index) const { return load_relaxed_u32(tokens() + index); }
    __device__ __forceinline__ u32 index_of(u32 position) const { return params.num_predicted + 1 + position; }
    __device__ __forceinline__ bool is_predicted(u32 index) const { return index < params.num_predicted; }

    // How many tokens are alike that end at two places, of which `known` are; all but these are in memory.
    __device__ __forceinline__ u32 num_alike(u32 end, u32 last, u32 known, u32 most) const {
        constexpr u32 kAtOnce = 4;
        for (u32 num = known; num < most; num += kAtOnce) {
            u32 ours[kAtOnce], theirs[kAtOnce];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const bool is_there = num + i < most && num + i <= end;
                ours[i] = is_there ? at(last - num - i) : 0, theirs[i] = is_there ? at(end - num - i) : 1;
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i)
                if (ours[i] != theirs[i]) return num + i;
        }
        return most;
    }

    // While a pass runs whose first token is the one at `first`, and whose others behind `end` are drafts: for each number of tokens of the answer
    // that it may give, where all but the newest of them stood before.
    __device__ __forceinline__ void prepare(u32 end, u32 num_lists, const u32* drafts) const {
        u32 pairs[kTokens + 1];  // the token in front of `end`, that at `end`, drafts
        pairs[0] = end > 0 ? at(end - 1) : kGap, pairs[1] = at(end);
#pragma unroll
        for (u32 i = 1; i < kTokens; ++i) pairs[1 + i] = i < num_lists ? drafts[i - 1] : kGap;
        u32 counts[kTokens] = {};
        if constexpr (kTokens > 2) {  // among the drafts themselves
#pragma unroll
            for (u32 list = 2; list < kTokens; ++list)
#pragma unroll
                for (u32 i = 1; i < list; ++i)
                    if (list < num_lists && pairs[i] == pairs[list] && pairs[i + 1] == pairs[list + 1]) add(list, counts[list]++, end + i);
        }
        bool is_full = false;
#pragma unroll 1
        for (int top = static_cast<int>(end); top >= 1 && !is_full; top -= 4 * 32) {
            u32 found[5];
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                const int index = top - 32 * i - static_cast<int>(laneid());
                found[i] = index >= 0 && (i < 4 || laneid() == 0) ? at(index) : kGap;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 next = __shfl_sync(kFullWarp, found[i + 1], 0), neighbour = __shfl_sync(kFullWarp, found[i], (laneid() + 1) & 31);
                const u32 before = laneid() == 31 ? next : neighbour;
                const int index = top - 32 * i - static_cast<int>(laneid());
                u32 hits = 0;  // a bit for each list
#pragma unroll
                for (u32 list = 0; list < kTokens; ++list)
                    hits |= (found[i] == pairs[list + 1] && before == pairs[list]) << list;
                if (index < 1) hits = 0;
                if (index == static_cast<int>(end)) hits &= ~1u;
                hits &= (1u << num_lists) - 1;
                if (!__any_sync(kFullWarp, hits != 0)) continue;
                is_full = true;
#pragma unroll
                for (u32 list = 0; list < kTokens; ++list) {
                    const u32 all = __ballot_sync(kFullWarp, hits >> list & 1), slot = counts[list] + __popc(all & ((1u << laneid()) - 1));
                    if (hits >> list & 1 && slot < kPlaces) lists.places[list][slot] = static_cast<u32>(index);
                    counts[list] = min(counts[list] + __popc(all), kPlaces);
                    is_full = is_full && (list >= num_lists || counts[list] == kPlaces);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (u32 list = 0; list < kTokens; ++list) {
            if (laneid() == 0) lists.num_places[list] = counts[list];
            if (laneid() >= counts[list]) continue;
            const u32 found = lists.places[list][laneid()];
            u32 length = 2;  // the token before these may be a draft
            if (list < 3) length = num_alike(found, end + list, 2, kMost - 1);
            else if (found >= 2 && at(found - 2) == pairs[2]) length = num_alike(found, end + list, 3, kMost - 1);
            u32 follower = found < end ? at(found + 1) : 0;
#pragma unroll
            for (u32 i = 0; i + 2 <= kTokens; ++i)
                if (found == end + i) follower = pairs[i + 2];
            lists.lengths[list][laneid()] = length, lists.followers[list][laneid()] = follower;
        }
        __syncwarp();
    }
    __device__ __forceinline__ void add(u32 list, u32 slot, u32 found) const {
        if (laneid() == 0) lists.places[list][slot] = found;
    }

    // The next token of the answer stands at `index`.
    __device__ __forceinline__ void push(u32 index, u32 token) {
        if (laneid() == 0) store_relaxed_u32(tokens() + index, token);
        __syncwarp();
        if (place == kNotFound) return;
        const bool is_expected = at(place) == token;
        place += is_expected, num_missed = is_expected ? 0 : num_missed + 1;
        if (num_missed > kLost || place >= index) place = kNotFound;
    }

    // Look for the tokens that end with `token`, at `last`, of which `list` was prepared; kTokens: none was. What it finds is the draft.
    __device__ __forceinline__ bool find(u32 last, u32 token, u32 list) {
        u32 key = 0;  // length, where an earlier draft goes on, in the prediction, the newest
        const auto rank = [&](u32 length, u32 at) { return length << 26 | (at == place) << 25 | is_predicted(at) << 24 | at; };
        if (list < kTokens && laneid() < lists.num_places[list] && lists.followers[list][laneid()] == token) {
            const u32 behind = lists.places[list][laneid()] + 2;
            if (behind != params.num_predicted) key = rank(lists.lengths[list][laneid()] + 1, behind);
        }
        if (place != kNotFound && place > 0 && place != params.num_predicted) {
            const bool is_there = laneid() < place;
            const u32 alike = __ballot_sync(kFullWarp, is_there && at(is_there ? place - 1 - laneid() : 0) == at(is_there ? last - laneid() : 0));
            key = max(key, rank(__popc(alike & ~(alike + 1)), place));
        }
        key = __reduce_max_sync(kFullWarp, key);
        if (key >> 26 >= kLeast) return take(key & 0xffffff);
        return place != kNotFound && find_near(last, token);
    }
    // Near to an earlier draft: fewer tokens, or none right behind one that was other than expected.
    __device__ __forceinline__ bool find_near(u32 last, u32 token) {
        const u32 first = place > kBehind ? place - kBehind : 0, end = min(place + kAhead, last), index = first + laneid();
        u32 key = 0;
        if (index < end && index + 1 != params.num_predicted && at(index) == token) {
            const u32 distance = index + 1 > place ? index + 1 - place : place - index - 1;
            key = num_alike(index, last, 1, kMost) << 16 | (255 - distance) << 8 | (31 - laneid());
        }
        key = __reduce_max_sync(kFullWarp, key);
        if (key != 0) return take(first + 32 - (key & 31));
        const u32 blind = place + (num_missed > 0);
        const bool may_be = num_missed == 1 || (place == 0 && num_missed == 0);
        return may_be && blind <= last && blind != params.num_predicted && take(blind);
    }
    __device__ __forceinline__ bool take(u32 at) {
        start = place = at, num_missed = 0, num = params.pass_tokens - 1;
        if (is_predicted(at)) num = min(num, params.num_predicted - at);
        return true;
    }
    // Token `i` of the draft, where `last` is the newest one; a run that ends with it is repeated.
    __device__ __forceinline__ u32 token(u32 i, u32 last) const {
        return at(is_predicted(start) ? start + i : start + i % (last + 1 - start));
    }

    // The answer has `num_new` tokens more, the newest one at `last`; the first `num_right` of `num_drafted` were drafted.
    __device__ __forceinline__ void took(u32 num_new, u32 num_right, u32 last, u32 token) {
        count(num_new, num_right);
        look_up(last, token, num_new);
    }
    __device__ __forceinline__ int extra() const { return static_cast<int>(params.extra); }
    __device__ __forceinline__ int edge() const { return per_pass > 1 ? 0 : static_cast<int>(params.edge); }
    // What the pass has cost and won.
    __device__ __forceinline__ void count(u32 num_new, u32 num_right) {
        if (per_pass > 1) balance += static_cast<int>(num_right * kDraftUnit) - extra();
        balance += static_cast<int>(num_new * kDraftShare);
        if (balance > kDraftMostSaved) balance = kDraftMostSaved;
    }
    // The draft of the next pass, behind `token`, at `last`.
    __device__ __forceinline__ void look_up(u32 last, u32 token, u32 num_new) {
        const int extra = this->extra(), edge = this->edge();
        if (balance >= extra + edge && find(last, token, num_new - 1)) {
            balance -= edge, per_pass = params.pass_tokens, num_idle = 0;
            return;
        }
        num = 0, ++num_idle;
        if (num_idle > kDraftPatience || balance < extra) per_pass = 1;
    }
};

}  // namespace kog
