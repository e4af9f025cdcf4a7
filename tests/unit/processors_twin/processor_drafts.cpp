// processor_drafts FOLDER SEED STEPS: a launch of a build with processors and drafts on one rank, whose logits are known. Another warp of each thread block
// plays the finaliser: logits behind a token that is not the answer's are no numbers. FOLDER holds request.bin (KogDecodeParams, KogProcessorParams,
// KogDraftParams, and Numbers), bias.bin float32 (vocab), allowed.bin uint32 (tokens, words), known.bin uint32 (tokens, 1 + kMostForced): how many tokens
// are forced from each one on, and which; text.bin uint32: prompt and answer; logits.bin float32 (tokens, vocab). Builds that take turns go on with
// state.bin, ring.bin, reports.bin, choices.bin, masks.bin, forced.bin, history.bin, raw.bin, tokens.bin, and this build with words.bin: all are written.
// Ends with 4 when it takes too long.
#define KOG_PROCESSORS 1
#include "kernel_ptx.cuh"
#include "sample_processor_drafts.cuh"
#include "files.h"

using namespace twin;
using namespace kog;

struct Numbers {
    u32 num_answer, num_mask_words, most_masks, is_cancelled, wait;
};

struct Played {
    Memory request, bias, allowed, known, text, logits, of_pass{4 * kTokens * kVocabRows};
    KogDecodeParams decode;
    KogProcessorParams processors;
    KogDraftParams drafts;
    KogForcedParams told;
    Numbers numbers;
    KogDecodeState* state = nullptr;

    Played() : request(read("request")), bias(read("bias")), allowed(read("allowed")), known(read("known")), text(read("text")), logits(read("logits")) {
        const char* at = request.at;
        const auto take = [&at](auto& into) { memcpy(&into, at, sizeof(into)), at += sizeof(into); };
        take(decode), take(processors), take(drafts), take(numbers);
    }
    const u32* tokens() const { return reinterpret_cast<const u32*>(text.at); }
    // Logits behind a token of a pass, of which all up to it are right or not.
    float logit(u32 position, bool is_right, u32 row) const {
        const u32 index = position + 1 - state->num_prompt;
        return is_right && index < numbers.num_answer ? reinterpret_cast<const float*>(logits.at)[index * kVocabRows + row] : NAN;
    }
};

void play_finaliser(const Role& role, const Played& played) {
    u32 num_vectors = 0;
    float* logits = reinterpret_cast<float*>(played.decode.logits_ptr);
    Pass pass;
    for (u32 turn = 0; begin_pass(role, turn, pass); ++turn) {
        num_vectors += kNumProducts;
        if (laneid() == 0) role.shared->num_finalized = num_vectors;
        __syncwarp();
        if (has_head(role, turn)) {
            num_vectors += kHeadProducts;
            bool is_right = true;
            for (u32 token = 0; token < kTokens; ++token) {
                const u32 position = pass.position + token;
                is_right = is_right && position < played.text.size() / 4 && pass.tokens[token] == played.tokens()[position];
                for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
                    const u32 row = first_vocab_row(role.cta) + block * HeadOp::kRows + laneid();
                    const bool real = laneid() < HeadOp::kRows && row < end_vocab_row(role.cta);
                    const float logit = real ? played.logit(position, is_right, row) : 0.0f;
                    if (kTokens == 1) hand_logits(role, block, row, logit, logits);
                    else if (real) logits[token * kVocabRows + row] = logit;
                }
            }
        }
        __syncwarp();
        if (laneid() == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
    }
}

// The grammar process: a mask of each token once the one in front of it is told, and what is forced. Whoever waits for one must wait for the other:
// here it comes later.
struct Grammar {
    const Played& played;
    Memory &masks, &forced;
    u32 &num_masks, &num_forced;

    void tell() {
        if (!(played.processors.flags & kMasked)) return;
        if (num_forced < num_masks && random_bits() % 32) return;
        if (num_forced < num_masks) tell_forced(num_forced++);
        else if (num_masks < played.numbers.most_masks && (num_masks == 0 || is_chosen(num_masks - 1))) tell_mask(num_masks++);
    }
    bool is_chosen(u32 index) const {
        return value_has_tag(reinterpret_cast<const u64*>(played.decode.ring_ptr)[2 * index + 1], played.decode.request_tag);
    }
    u32 tag_of(u32 index) const { return (played.processors.mask_epoch + index) % 0xffffffffu + 1; }
    void tell_forced(u32 index) {
        u64* words = reinterpret_cast<u64*>(forced.at);
        const u32* known = reinterpret_cast<const u32*>(played.known.at) + index * (1 + OwnRows::kMostForced);
        for (u32 i = 0; i <= min(known[0], u32{OwnRows::kMostForced}); ++i) words[i] = make_value_word(known[i], tag_of(index));
    }
    void tell_mask(u32 index) {
        const u32 count = played.numbers.num_mask_words;
        u64* words = reinterpret_cast<u64*>(masks.at) + (played.processors.mask_epoch + index & 1) * count;
        const u32* allowed = reinterpret_cast<const u32*>(played.allowed.at) + index * count;
        for (u32 i = 0; i < count; ++i) words[i] = make_value_word(allowed[i], tag_of(index));
    }
};

int main(int, char** argv) {
    folder = argv[1];
    begin(atoi(argv[2]));
    Played played;
    std::map<std::string, Memory> kept;
    for (const char* name : {"state", "ring", "reports", "choices", "masks", "forced", "history", "raw", "tokens", "words", "told"}) kept.emplace(name, read(name));
    const auto ptr = [&](const char* name) { return kept.at(name).ptr(); };
    KogDecodeParams& d = played.decode;
    played.state = reinterpret_cast<KogDecodeState*>(ptr("state"));
    d.state_ptr = ptr("state"), d.ring_ptr = ptr("ring"), d.words_ptr = ptr("words"), d.logits_ptr = played.of_pass.ptr(), d.prompt_ptr = played.text.ptr();
    d.num_steps = atoi(argv[3]);
    KogProcessorParams& s = played.processors;
    s.bias_ptr = played.bias.ptr(), s.history_ptr = ptr("history"), s.raw_ptr = ptr("raw"), s.mask_ptr = ptr("masks"), s.report_ptr = ptr("reports");
    s.num_mask_words = played.numbers.num_mask_words, s.cta_rows[0] = HeadOp::kCtaRows;
    played.drafts.tokens_ptr = ptr("tokens");
    played.told = {ptr("forced"), ptr("choices"), played.numbers.wait};
    KogPeers peers{};
    peers.num_ranks = 1;
    u32* told = reinterpret_cast<u32*>(ptr("told"));
    Grammar grammar{played, kept.at("masks"), kept.at("forced"), told[0], told[1]};
    Launch launch;
    launch.start(kNumCtas, 64, [&](u32 cta) {
        Shared& shared = shared_of<Shared>(0, cta);
        const Role role{&shared, shared_address(&shared), cta, played.state->num_prompt, num_headless(played.state->position, played.state->num_prompt), nullptr};
        if (threadIdx.x == 0) {
            mbar_init(role.base + KOG_OFFSET(pass_full), 1), mbar_init(role.base + KOG_OFFSET(pass_ended), 1);
            shared.note.stopped = 0, shared.finished = 0, shared.num_finalized = 0, shared.num_handed = 0, shared.others_wait = 0;
            shared.cancelled = cta == 0 && played.numbers.is_cancelled;
            for (int i = 0; i < 2; ++i) shared.peer_notes[i].waiting = 0;
        }
        __syncthreads();
        if (threadIdx.x < 32) play_finaliser(role, played);
        else sample_processor_drafts(d, peers, s, played.drafts, played.told, role, d.num_steps, 0);
    });
    for (u64 turns = 0; launch.running; ++turns) {
        if (turns > 2000000000) return 4;
        if (turns % 64 == 0) grammar.tell();
        step();
    }
    flush();
    for (const auto& [name, memory] : kept) write(name, memory);
}
