// The own rows of the vocabulary as the sampling warp sees them: which there are, whether a grammar allows them, what each one's score is.
#pragma once
#include "offers.cuh"

namespace kog {

struct OwnRows {
    const KogDecodeParams& params;
    const KogPeers& peers;
    const KogProcessorParams& processors;
    const Role& role;
#ifdef KOG_DRAFTS
    const KogForcedParams& told;
    u32& forced;  // what the grammar forces from the token of the newest mask on: thread 0 has how many tokens, thread i the i-th
#endif

    // What lives as long as the launch, or until the report, is kept in shared memory: registers are short.
    // Number of the newest exchange, of this and all launches before. Who sets it has met the warp's other threads since they read it.
    __device__ __forceinline__ u32 number() const { return load_shared_u32(role.base + KOG_OFFSET(num_exchanges)); }
    __device__ __forceinline__ void set_number(u32 number) const {
        store_shared(role.base + KOG_OFFSET(num_exchanges), number);
        __syncwarp();
    }
    // The pass among those of this launch, where its token stands, and its number.
    __device__ __forceinline__ u32 turn() const { return load_shared_u32(role.base + KOG_OFFSET(turn)) / kTokens; }
    __device__ __forceinline__ void set_turn(u32 turn, u32 token = 0) const {
        store_shared(role.base + KOG_OFFSET(turn), turn * kTokens + token);
    }
    // Which token of the pass it is whose successor is chosen.
    __device__ __forceinline__ u32 pass_token() const { return load_shared_u32(role.base + KOG_OFFSET(turn)) % kTokens; }
    __device__ __forceinline__ u32 position() const {
        if constexpr (kTokens == 1) return load_shared_u32(role.base + KOG_OFFSET(passes[turn() & 1].position));
        else return load_shared_u32(role.base + KOG_OFFSET(passes[turn() & 1].position)) + pass_token();
    }
    __device__ __forceinline__ u32 pass_number() const { return load_shared_u32(role.base + KOG_OFFSET(passes[turn() & 1].number)); }
    // Of the newest token.
    __device__ __forceinline__ u32 chosen_place() const { return load_shared_u32(role.base + KOG_OFFSET(chosen_place)); }

    __device__ __forceinline__ Quads<kRanks, kReplicas, kNumCtas> quads() const {
#ifdef KOG_DRAFTS  // builds that take turns count exchanges together, so their words are the same
        return {peers, reinterpret_cast<u64*>(told.choices_ptr), choice_box()};
#else
        return {peers, reinterpret_cast<u64*>(params.words_ptr) + kChoiceOffset, choice_box()};
#endif
    }
    // What the report of the token that is chosen is tagged with. The lowest bit changes from one token to the next: it is the slot in which largest
    // logits are told. Builds that take turns count their passes apart, and from the top, so that no build takes another one's words for its own.
    __device__ __forceinline__ u32 report_tag() const {
#ifdef KOG_DRAFTS
        return ~(2 * (pass_number() * kTokens + pass_token()) + (kTokens > 1)) << 1 | (position() & 1);
#else
        return pass_number() + 1;
#endif
    }
    __device__ __forceinline__ u32 own_source() const { return peers.rank * kNumCtas + role.cta; }
    __device__ __forceinline__ u32 first_row() const { return first_vocab_row(role.cta); }
    __device__ __forceinline__ u32 num_rows() const {
        const u32 end = end_vocab_row(role.cta);
        return first_row() < end ? min(end - first_row(), static_cast<u32>(HeadOp::kCtaRows)) : 0;
    }
    __device__ __forceinline__ bool ends_answer(u32 id) const {
        bool ends = false;
        for (u32 i = 0; i < params.num_stop_ids; ++i) ends = ends || params.stop_ids[i] == id;
        return ends;
    }
    __device__ __forceinline__ bool in_grammar(u32 id) const {
        if (!(processors.flags & kMasked)) return true;
        const u32 first_word = (params.vocab_first + first_row()) / 32;
        return load_shared_u32(role.base + KOG_OFFSET(mask) + 4 * (id / 32 - first_word)) >> (id % 32) & 1;
    }

    // ---- the mask ----
    // Copy the own part of token `index`'s mask to shared memory. It comes over PCIe from the process that knows the grammar, while the
    // token is decoded. Not there in time, or not needed any more since the request is cancelled: kNoMaskFlag. False: leave.
    __device__ __forceinline__ bool fetch_mask(u32 turn, u32 index, u32& flags) const {
        const u64 epoch = processors.mask_epoch + index;
        const u32 tag = static_cast<u32>(epoch % 0xffffffffu) + 1, first_id = params.vocab_first + first_row();
        const u32 first = first_id / 32, count = num_rows() ? (first_id + num_rows() - 1) / 32 - first + 1 : 0;
        const u64* words = reinterpret_cast<const u64*>(processors.mask_ptr) + (epoch & 1) * processors.num_mask_words + first;
        // Reading over PCIe before it can be there only slows down those who make it.
        if (!wait_for_products(turn, kNumProducts * 3 / 4)) return false;
        const u64 since_ns = globaltimer_ns();
        while (true) {
            bool ready = true;
            for (u32 i = laneid(); i < count; i += 32) {
                const u64 word = load_system(words + i);
                ready = ready && value_has_tag(word, tag);
                store_shared(role.base + KOG_OFFSET(mask) + 4 * i, static_cast<u32>(word));
            }
#ifdef KOG_DRAFTS
            ready = hear_forced(tag) && ready;
#endif
            if (__all_sync(kFullWarp, ready)) break;
            if (must_leave(role.stopped())) return false;
            const bool late = globaltimer_ns() - since_ns > params.wait_limit_us * 500ull;  // half of what others wait for this rank
            if (__any_sync(kFullWarp, late || is_cancelled())) {
                flags |= kNoMaskFlag;
                break;
            }
            __nanosleep(400);
        }
        __syncwarp();
        return true;
    }
#ifdef KOG_DRAFTS
    // What is forced comes in front of the mask, and stands until the token is told: all thread blocks hear the same. False: it is not all there.
    __device__ __forceinline__ bool hear_forced(u32 tag) const {
        const u64 word = laneid() <= kMostForced ? load_system(reinterpret_cast<const u64*>(told.forced_ptr) + laneid()) : 0;
        forced = static_cast<u32>(word);
        const u32 count = min(__shfl_sync(kFullWarp, forced, 0), kMostForced);
        return laneid() > count || value_has_tag(word, tag);
    }
    static constexpr u32 kMostForced = 4;  // that matter: the token itself, and the drafts of a pass
#endif
    // Rank 0's first thread block is told, and tells the others in the quads of this token.
    __device__ __forceinline__ bool is_cancelled() const {
        if (is_root()) return role.shared->cancelled;
        const u64 word = load_system(quads().pairs(role.cta, number() + 1, 0, 0));
        return quad_has_tag(word, number() + 1) && (word >> 8 & kCancelFlag);
    }
    __device__ __forceinline__ bool is_root() const { return role.cta == 0 && peers.rank == 0; }

    // ---- the own rows ----
    __device__ __forceinline__ float noise_of(u32 row, u32 position) const {
        return __uint_as_float(params.inverse_temperature_bits) > 0 ? gumbel(params.vocab_first + row, position, params.seed) : 0.0f;
    }
    // Take a row's logit: x and score to shared memory. `allowed`: else it cannot be chosen.
    __device__ __forceinline__ void look_at(u32 row, float logit, bool allowed, const Adjustment& adjustment, float noise, Offers& offers) const {
        const u32 local = row - first_row();
        float x = -INFINITY, score = -INFINITY;
        if (allowed) {
            x = adjustment.apply(params, processors, logit);
            if (!(fabsf(x) < INFINITY)) offers.flags |= kFaultFlag;
            score = __fadd_rn(x, noise);
            const Element found{x, place_of(own_source(), local)};
            if (is_before(found, offers.first)) offers.first = found;
            offers.best.take(score, x, found.place);
        }
        store_shared(x_at(role, local), x);
        store_shared(score_at(role, local), score);
    }
    // Whether the successor of the pass's token is chosen; else the prompt has it.
    __device__ __forceinline__ bool chooses(u32 turn) const {
        if constexpr (kTokens == 1) return has_head(role, turn);
        else return position() + 1 >= role.num_prompt;
    }
    // Passes of this launch before `turn` that had logits, if this one has.
    __device__ __forceinline__ u32 heads_before(u32 turn) const { return turn - role.num_headless; }
    // Until the finaliser is done with so many products of the pass's layers, looking rarely.
    __device__ __forceinline__ bool wait_for_products(u32 turn, u32 count) const {
        const u32 most = kHeadOnly ? 0 : turn * kNumProducts + heads_before(turn) * kHeadProducts + count;
        return counter_wait<500>(role.stopped(), role.base + KOG_OFFSET(num_finalized), most);
    }
    // Until it has handed over a block of the pass's logits, the last one with the end of the pass.
    __device__ __forceinline__ bool wait_for_block(u32 turn, u32 block) const {
        if (kTokens > 1 || block == kCountedBlocks) return mbar_wait(role.stopped(), role.base + KOG_OFFSET(pass_ended), turn & 1);
        return counter_wait<40>(role.stopped(), role.base + KOG_OFFSET(num_handed), heads_before(turn) * kCountedBlocks + block + 1);
    }
    // Of several tokens the finaliser has left all logits in memory: there is room in shared memory for one token's.
    __device__ __forceinline__ float handed_logit(u32 row) const {
        if constexpr (kTokens == 1) return load_shared_f32(x_at(role, row - first_row()));
        return __uint_as_float(load_relaxed_u32(reinterpret_cast<const u32*>(params.logits_ptr) + pass_token() * kVocabRows + row));
    }
    // All own rows, block by block as the finaliser hands them over; what does not need the logits is done before. `largest`: this thread's
    // largest logit. False: leave.
    __device__ __forceinline__ bool look_at_rows(u32 turn, u32 position, bool no_end, Offers& offers, float& largest) const {
        float* logits = reinterpret_cast<float*>(processors.raw_ptr);
        if (!wait_for_products(turn, kNumProducts)) return false;
#pragma unroll 1
        for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
            const u32 row = first_row() + block * HeadOp::kRows + laneid(), id = params.vocab_first + row;
            const bool real = laneid() < HeadOp::kRows && row < end_vocab_row(role.cta);
            const bool allowed = real && in_grammar(id) && !(no_end && ends_answer(id));
            const Adjustment adjustment(processors, real ? row : 0);
            const float noise = noise_of(row, position);
            if (!wait_for_block(turn, block)) return false;
            if (real) {
                const float logit = handed_logit(row);
                if (!(fabsf(logit) < INFINITY)) offers.flags |= kFaultFlag;
                largest = fmaxf(largest, logit);
                logits[row] = logit;  // a copy that the head of the next token does not overwrite before the report is made
                look_at(row, logit, allowed, adjustment, noise, offers);
            }
        }
        __syncwarp();
        return true;
    }
    // Only the ids that would end the answer, where nothing else is left.
    __device__ __forceinline__ void look_at_end_ids(u32 position, Offers& offers) const {
        const u32 local = laneid() < params.num_stop_ids ? params.stop_ids[laneid() & (kMaxStopIds - 1)] - params.vocab_first - first_row() : ~0u;
        const u32 row = first_row() + local;
        if (local < num_rows() && in_grammar(params.vocab_first + row)) {
            const float logit = reinterpret_cast<const float*>(processors.raw_ptr)[row];
            look_at(row, logit, true, Adjustment(processors, row), noise_of(row, position), offers);
        }
        __syncwarp();
    }
    static constexpr u32 kMaxStopIds = sizeof(KogDecodeParams::stop_ids) / sizeof(u32);
    static_assert((kMaxStopIds & (kMaxStopIds - 1)) == 0 && kMaxStopIds <= 32, "one thread of the warp for each");
};

}  // namespace kog
