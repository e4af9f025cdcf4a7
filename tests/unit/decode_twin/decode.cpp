// decode FOLDER MAX_TOKENS KV_BYTES WORDS HEAP_WORDS [head]: a greedy answer of all ranks' monokernels. With `head` the last token of the
// prompt is decoded twice, the second time from what its layers gave the first time: that launch is the LM head alone. FOLDER holds prompt.bin (uint32), embedding.bin,
// rope.bin, and tape, norms, final_norm and all of kOptional of each rank as NAME.RANK.bin; it gets logits.RANK.bin (float32), ring.RANK.bin (uint64), and kept.RANK.bin: hashes, or choices of experts (uint64).
// Prints the bytes of weights that each launch has copied; the last one's loaders may have begun with a token that is not decoded.
// UNREST in the environment: a seed, by which warps stand still now and then. LIMIT_US: of waits, instead of 2 s. SILENCE: which
// of the faults that `twin_silence` makes, if the sources were given some.
// DRAFTS: with it drafts.bin (uint32) has the token that is expected at each position, for passes of several tokens. INVERSE_TEMPERATURE:
// the bits of 1 / temperature, with seed 5. kv.RANK.bin gets the cache.
// RESUME: the steps of the only launch, which goes on from state.RANK.bin, tokens.RANK.bin (uint32: prediction, a gap, prompt and answer), and words.RANK.bin, kv.RANK.bin,
// heap.RANK.bin, ring.RANK.bin and nets.RANK.bin where they are there; all of them are written. So builds take turns. PREDICTED, PASS_TOKENS, EXTRA, EDGE: of KogDraftParams.
// OTHERS_WAIT: so that it is to end early. STOP: stop_position of KogDeltaParams.
// FIRST: the position of the first token that is decoded, for a log of accesses: with LOG in the environment accesses.bin says who stored and
// found which words, of ranks' own memories and then of their heaps.
// Ends with 4 when that takes too long, with 5 when a rank does not end well (record.RANK.bin says why), with 6 when invalid streams were
// not left alone.
// Compiled with KOG_PROCESSORS: a build with processors, on one rank. processors.bin has its KogProcessorParams; history.bin, choices.bin and reports.bin
// are written, and with RESUME gone on from.
#ifdef KOG_PROCESSORS
#include "processors_ptx.h"
#endif
#include "decode.cu"
#include "last_streams.cu"
#include "ranks.h"

unsigned twin_silence = 0;

// What a build keeps for the host.
#ifdef KOG_CHOICES
constexpr u32 kKeptWords = KOG_CHOICES * kLayers * kNumCtas;
#else
constexpr u32 kKeptWords = KOG_HASHES;
#endif

u32 setting(const char* name) { return getenv(name) ? atoll(getenv(name)) : 0; }

struct Rank : RankMemory {
    Memory kv, state, host, ring, kept, tokens;

    KogDecodeState& decode_state() const { return *reinterpret_cast<KogDecodeState*>(state.at); }
    // The first copy of the streams that this rank's layers left, and all copies that are read here, of all ranks.
    u64* own_streams(u32 rank) const {
        return kStreamsToAll ? reinterpret_cast<u64*>(heap.at) + stream_box().row(kRanks, 0, rank) : reinterpret_cast<u64*>(words.at) + kStreamOffset;
    }
    u64* read_streams() const { return own_streams(0); }
};
#ifdef KOG_PROCESSORS
struct ProcessorMemory {
    Memory params = read("processors"), raw{4 * kVocabRows}, bias{4 * kVocabRows}, history{4 * kVocabRows}, choices{16 * kChoiceStride},
           reports{8 * kMaxContext * kReportEntry};

    ProcessorMemory() { read_if_there("history", history), read_if_there("choices", choices), read_if_there("reports", reports); }
    void write_all() const { write("history", history), write("choices", choices), write("reports", reports); }
    void hand_to(KogLaunch& packed) const {
        memcpy(&packed.processors, params.at, sizeof(packed.processors));
        KogProcessorParams& p = packed.processors;
        p.raw_ptr = raw.ptr(), p.bias_ptr = bias.ptr(), p.history_ptr = history.ptr(), p.report_ptr = reports.ptr();
#ifdef KOG_DRAFTS
        packed.told = {0, choices.ptr(), 0};
#endif
    }
};
#endif
constexpr u32 kCopyWords = kStreamsToAll ? kStreamCopyWords : kStreamStride;

// The streams that all ranks' layers have published, in float32; their words are cleared.
std::vector<Memory> take_streams(const std::vector<Rank>& ranks) {
    std::vector<Memory> streams;
    for (u32 rank = 0; rank < kRanks; ++rank) {
        streams.emplace_back(4 * kStreams * kHidden);
        float* to = reinterpret_cast<float*>(streams.back().at);
        for (u32 i = 0; i < kStreams * kHidden / 2; ++i) {
            const u64 word = ranks[rank].own_streams(rank)[i / (kHidden / 2) * kReplicas * kCopyWords + i % (kHidden / 2)];
            to[2 * i] = first_of(word), to[2 * i + 1] = second_of(word);
        }
    }
    for (const Rank& r : ranks) memset(r.read_streams(), 0, 8 * (kStreamsToAll ? kRanks : 1) * kStreams * kReplicas * kCopyWords);
    return streams;
}
// Hand them to the next launch.
void publish(const std::vector<Rank>& ranks, const std::vector<Memory>& streams, bool are_invalid) {
    const Memory invalid(4);
    *reinterpret_cast<int*>(invalid.at) = are_invalid;
    for (u32 rank = 0; rank < kRanks; ++rank) {
        KogStreamLaunch launch{{streams[rank].ptr(), invalid.ptr(), ranks[rank].words.ptr(), ranks[rank].state.ptr()}, {}};
        for (u32 i = 0; i < kRanks; ++i) launch.peers.heap_ptr[i] = ranks[i].heap.ptr();
        launch.peers.rank = rank, launch.peers.num_ranks = kRanks;
        twin::start((kStreamPairs + kStreamThreads - 1) / kStreamThreads, kStreamThreads, sizeof(Shared), [launch] { kog_publish_streams(launch); });
    }
    twin::rank_of_block.clear();  // nobody's: their words are not in the log
    if (!twin::run(twin::unrest ? 1000000 : 100000)) exit(4);
}

int main(int num_arguments, char** argv) {
    begin_twin(argv[1]);
    const u32 max_tokens = atoi(argv[2]);
    const size_t kv_bytes = atoll(argv[3]), num_words = atoll(argv[4]), heap_words = atoll(argv[5]);
    if (const char* fault = getenv("SILENCE")) twin_silence = atoll(fault);
    const char* limit = getenv("LIMIT_US");
    const Memory drafts = getenv("DRAFTS") ? read("drafts") : Memory(0);
    const char* inverse_temperature = getenv("INVERSE_TEMPERATURE");
    const bool resumes = getenv("RESUME");
    const Memory embedding = read("embedding"), rope = read("rope"), prompt = read("prompt");
    const u32 num_prompt = prompt.size() / 4;
    const bool begins_at_head = num_arguments > 6;
    std::vector<Rank> ranks;
    for (u32 rank = 0; rank < kRanks; ++rank) {
        const std::string number = "." + std::to_string(rank);
        ranks.push_back({RankMemory(number, num_words, heap_words), Memory(kv_bytes), Memory(sizeof(KogDecodeState)), Memory(sizeof(KogHostPage)),
                         Memory(16 * kMaxContext), Memory(8 * kKeptWords), resumes ? read("tokens" + number) : Memory(0)});
        auto* state = reinterpret_cast<KogDecodeState*>(ranks.back().state.at);
        if (const char* first = getenv("FIRST")) state->position = atoll(first);
        state->token = reinterpret_cast<const u32*>(prompt.at)[state->position], state->num_prompt = num_prompt, state->max_tokens = max_tokens;
        if (!resumes) continue;
        const Rank& r = ranks.back();
        if (setting("OTHERS_WAIT")) reinterpret_cast<KogHostPage*>(r.host.at)->cancelled_tag = ~0u;
        if (read_if_there("words" + number, r.words)) twin::most_patience = twin::kMostPatience;  // it is not the first launch
        read_if_there("state" + number, r.state), read_if_there("kv" + number, r.kv);
        read_if_there("ring" + number, r.ring), read_if_there("heap" + number, r.heap), read_if_there("nets" + number, r.nets);
    }
#ifdef KOG_PROCESSORS
    static_assert(kRanks == 1, "one history");
    const ProcessorMemory of_processors;
#endif
    note(ranks);
    // Steps: each goes on after the one before. The first is as short as can be, since in it nobody is patient.
    std::vector<u32> launches = {(num_prompt - ranks[0].decode_state().position + kTokens - 1) / kTokens + 1, max_tokens};
    if (begins_at_head) launches = {num_prompt - 1, 1, 1, 1, max_tokens};
    if (resumes) launches = {setting("RESUME")};
    std::vector<KogDecodeState> before_last;
    std::vector<Memory> streams;
    for (u32 launch = 0; launch < launches.size(); ++launch) {
        if (begins_at_head && launch == 1)
            for (const Rank& r : ranks) before_last.push_back(r.decode_state());
        if (begins_at_head && launch == 2) {
            streams = take_streams(ranks);
            for (const Rank& r : ranks) memset(r.ring.at, 0, 16 * kMaxContext), memset(r.logits.at, 0, 4 * kVocabRows);
        }
        if (begins_at_head && (launch == 2 || launch == 3)) {
            for (u32 rank = 0; rank < kRanks; ++rank) {
                if (launch == 2) before_last[rank].epoch = ranks[rank].decode_state().epoch;
                else if (*reinterpret_cast<u64*>(ranks[rank].ring.at) || ranks[rank].decode_state().epoch != before_last[rank].epoch) return 6;
                ranks[rank].decode_state() = before_last[rank];
            }
            publish(ranks, streams, launch == 2);
        }
        kHeadOnly = begins_at_head && (launch == 2 || launch == 3);
        twin::rank_of_block.clear();
        for (u32 rank = 0; rank < kRanks; ++rank) {
            const Rank& r = ranks[rank];
            KogLaunch packed = launch_of(ranks, rank, embedding, rope);
            KogDecodeParams& p = packed.decode;
            p.kv_ptr = r.kv.ptr(), p.prompt_ptr = prompt.ptr(), p.state_ptr = r.state.ptr(), p.host_ptr = r.host.ptr(), p.ring_ptr = r.ring.ptr();
            if (limit) p.wait_limit_us = atoll(limit);
            p.num_steps = launches[launch];
            p.drafts_ptr = drafts.size() ? drafts.ptr() : 0, p.inverse_temperature_bits = inverse_temperature ? atoll(inverse_temperature) : 0, p.seed = 5;
            p.trace_ptr = r.kept.ptr(), p.request_tag = 7;
#ifdef KOG_DRAFTS
            packed.drafts = {r.tokens.ptr(), setting("PREDICTED"), setting("PASS_TOKENS"), setting("EXTRA"), setting("EDGE")};
#ifdef KOG_DELTA
            if (getenv("STOP")) packed.delta.stop_position = setting("STOP");
#endif
            if (resumes) p.prompt_ptr = r.tokens.ptr() + 4 * (packed.drafts.num_predicted + 1);
#endif
#ifdef KOG_PROCESSORS
            of_processors.hand_to(packed);
#endif
            start(packed, rank);
        }
        const u64 before = copied_bytes;
        if (!twin::run(twin::unrest ? 1000000 : 100000)) return 4;
        printf("%llu\n", copied_bytes - before);
    }
    twin::write_accesses();
#ifdef KOG_PROCESSORS
    of_processors.write_all();
#endif
    for (u32 rank = 0; rank < kRanks; ++rank) {
        const std::string number = "." + std::to_string(rank);
        write("record" + number, ranks[rank].record);
        if (reinterpret_cast<const KogDecodeState*>(ranks[rank].state.at)->abort_mirror) return 5;
        write("logits" + number, ranks[rank].logits), write("state" + number, ranks[rank].state), write("ring" + number, ranks[rank].ring);
        write("kept" + number, ranks[rank].kept), write("kv" + number, ranks[rank].kv);
        if (resumes) write("words" + number, ranks[rank].words), write("tokens" + number, ranks[rank].tokens), write("heap" + number, ranks[rank].heap), write("nets" + number, ranks[rank].nets);
    }
}
