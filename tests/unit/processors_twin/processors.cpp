// processors SEED REQUEST LOGITS OUTPUT: an answer of the sampling warps with processors, with logits from a file. Another warp of each
// thread block plays the finaliser. REQUEST: KogDecodeParams, KogProcessorParams, then numbers: prompt tokens, steps of each of three
// launches, the second of which is that of the LM head alone, most tokens, words of a mask, masks that come, the launch that is cancelled;
// then bias float32 (vocab), history uint32 (vocab), masks uint32 (tokens, words), prompt.
// LOGITS: float32 (tokens, vocab). OUTPUT: uint64 (ranks, tokens, 2), each rank's ring, and (tokens, kReportEntry), rank 0's reports.
// Ends with 4 when it takes too long.
#define KOG_PROCESSORS 1
#include "kernel_ptx.cuh"
#include "sample_processors.cuh"
#include "run.h"
#include "sizes.h"

using namespace twin;
using namespace kog;

struct Request {
    KogDecodeParams decode;
    KogProcessorParams processors;
    u32 num_prompt, steps[3], max_tokens, num_mask_words, most_masks, cancelled_launch;
};
struct Rank {
    alignas(16) KogDecodeState state{};
    std::vector<u64> ring, reports;
    std::vector<float> raw, logits, bias;
    std::vector<u32> history;
    KogDecodeParams decode;
    KogProcessorParams processors;
};

// What the finaliser does for sampling: nothing but count products and hand over the logits. As it, it tells of the LM head's products only
// with those of the next token.
void play_finaliser(const Role& role, u32 first_position, const float* rows, float* logits) {
    u32 num_vectors = 0;
    Pass pass;
    for (u32 turn = 0;; ++turn) {
        if (!begin_pass(role, turn, pass)) return;
        if (!kHeadOnly) {
            num_vectors += kNumProducts;
            if (laneid() == 0) role.shared->num_finalized = num_vectors;
        }
        __syncwarp();
        if (has_head(role, turn)) num_vectors += kHeadProducts;
        if (has_head(role, turn)) {
            const float* of_token = rows + static_cast<size_t>(pass.position - first_position) * kVocabRows * kRanks;
            for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
                const u32 row = first_vocab_row(role.cta) + block * HeadOp::kRows + laneid();
                const bool real = laneid() < HeadOp::kRows && row < end_vocab_row(role.cta);
                hand_logits(role, block, row, real ? of_token[row] : 0.0f, logits);
            }
        }
        __syncwarp();
        if (laneid() == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
    }
}

template <class T>
T* take(const char*& at, size_t count) {
    T* found = reinterpret_cast<T*>(const_cast<char*>(at));
    at += count * sizeof(T);
    return found;
}

int main(int, char** argv) {
    begin(atoi(argv[1]));
    std::vector<float> raw_request = read_floats(argv[2]), logits = read_floats(argv[3]);
    const char* at = reinterpret_cast<const char*>(raw_request.data());
    Request request;
    memcpy(&request.decode, take<char>(at, sizeof(KogDecodeParams)), sizeof(KogDecodeParams));
    memcpy(&request.processors, take<char>(at, sizeof(KogProcessorParams)), sizeof(KogProcessorParams));
    memcpy(&request.num_prompt, take<u32>(at, 8), 32);
    const u32 vocab = kVocabRows * kRanks, max_tokens = request.max_tokens;
    const float* bias = take<float>(at, vocab);
    const u32* history = take<u32>(at, vocab);
    const u32* masks = take<u32>(at, max_tokens * request.num_mask_words);
    u32* prompt = take<u32>(at, request.num_prompt);

    std::vector<Gpu> gpus(kRanks);
    std::vector<Rank> ranks(kRanks);
    std::vector<u64> words(KOG_TWIN_WORDS + 32), mask_slots(2 * request.num_mask_words);
    for (Gpu& gpu : gpus) gpu.heap.resize(KOG_TWIN_HEAP_WORDS + 32);
    u64* words_ptr = reinterpret_cast<u64*>((reinterpret_cast<uintptr_t>(words.data()) + 127) / 128 * 128);
    const auto address = [](const auto* p) { return reinterpret_cast<uintptr_t>(p); };
    for (u32 r = 0; r < kRanks; ++r) {
        Rank& rank = ranks[r];
        rank.ring.resize(2 * max_tokens + 2), rank.reports.resize(max_tokens * kReportEntry + 2);
        rank.raw.resize(kVocabRows), rank.logits.resize(kVocabRows);
        rank.bias.assign(bias + r * kVocabRows, bias + (r + 1) * kVocabRows);
        rank.history.assign(history + r * kVocabRows, history + (r + 1) * kVocabRows);
        rank.state.token = prompt[0], rank.state.num_prompt = request.num_prompt, rank.state.max_tokens = max_tokens;
        rank.decode = request.decode, rank.processors = request.processors;
        KogDecodeParams& d = rank.decode;
        d.words_ptr = address(words_ptr), d.logits_ptr = address(rank.logits.data()), d.prompt_ptr = address(prompt);
        d.state_ptr = address(&rank.state), d.ring_ptr = (address(rank.ring.data()) + 15) / 16 * 16, d.vocab_first = r * kVocabRows;
        KogProcessorParams& s = rank.processors;
        s.bias_ptr = address(rank.bias.data()), s.history_ptr = address(rank.history.data()), s.raw_ptr = address(rank.raw.data());
        s.mask_ptr = address(mask_slots.data());
        s.report_ptr = (address(rank.reports.data()) + 15) / 16 * 16, s.num_mask_words = request.num_mask_words;
        for (u32 i = 0; i < kRanks; ++i) s.first_ids[i] = i * kVocabRows, s.cta_rows[i] = HeadOp::kCtaRows;
    }
    const auto put_mask = [&](u32 index) {
        const u64 epoch = request.processors.mask_epoch + index;
        for (u32 i = 0; i < request.num_mask_words; ++i)
            mask_slots[(epoch & 1) * request.num_mask_words + i] = make_value_word(masks[index * request.num_mask_words + i], epoch % 0xffffffffu + 1);
    };
    const bool masked = request.processors.flags & kMasked;
    u32 num_masks = 0;
    const auto put_masks = [&] {
        if (!masked || num_masks >= request.most_masks) return;
        const u64* ring = reinterpret_cast<const u64*>(ranks[0].decode.ring_ptr);
        if (num_masks == 0 || value_has_tag(ring[2 * num_masks - 1], request.decode.request_tag)) put_mask(num_masks++);
    };
    for (u32 launch = 0; launch < 3; ++launch) {
        const u32 num_steps = request.steps[launch];
        kHeadOnly = launch == 1;
        for (u32 r = 0; r < kRanks; ++r) {
            const KogPeers peers = peers_of<KogPeers>(gpus, r);
            Rank& rank = ranks[r];
            gpus[r].launch.start(kNumCtas, 64, [&rank, peers, r, num_steps, launch, &logits, &request](u32 cta) {
                Shared& shared = shared_of<Shared>(r, cta);
                const Role role{&shared, shared_address(&shared), cta, rank.state.num_prompt, num_headless(rank.state.position, rank.state.num_prompt), nullptr};
                if (threadIdx.x == 0) {
                    mbar_init(role.base + KOG_OFFSET(pass_full), 1), mbar_init(role.base + KOG_OFFSET(pass_ended), 1);
                    shared.note.stopped = 0, shared.finished = 0, shared.num_finalized = 0, shared.num_handed = 0;
                    shared.cancelled = r == 0 && cta == 0 && launch == request.cancelled_launch;  // as the watchdog finds it
                    for (int i = 0; i < 2; ++i) shared.peer_notes[i].waiting = 0;
                }
                __syncthreads();
                if (threadIdx.x < 32) play_finaliser(role, request.num_prompt - 1, logits.data() + r * kVocabRows, rank.logits.data());
                else sample_processors(rank.decode, peers, rank.processors, role, num_steps);
            });
        }
        for (u64 turns = 0;; ++turns) {
            bool any = false;
            for (const Gpu& gpu : gpus) any = any || gpu.launch.running;
            if (!any) break;
            if (turns > 2000000000) return 4;
            if (turns % 64 == 0) put_masks();
            step();
        }
        flush();
    }
    std::vector<u64> output;
    for (const Rank& rank : ranks) {
        const u64* ring = reinterpret_cast<const u64*>(rank.decode.ring_ptr);
        output.insert(output.end(), ring, ring + 2 * max_tokens);
    }
    const u64* reports = reinterpret_cast<const u64*>(ranks[0].processors.report_ptr);
    output.insert(output.end(), reports, reports + max_tokens * kReportEntry);
    write_floats(argv[4], output.data(), 2 * output.size());
}
