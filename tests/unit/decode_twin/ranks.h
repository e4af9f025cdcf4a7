// What programs that run whole monokernels have of each rank, behind decode.cu: what it reads of its model, and what ranks exchange.
#pragma once
#include "files.h"
#include "word_log.h"

using namespace kog;

// What a model may have, in the order of `optional`.
constexpr const char* kOptional[] = {"qkv_bias", "head_norms", "out_bias", "sinks", "experts", "router_bias", "gate_up_bias", "down_bias",
                                     "delta_taps", "delta_factors", "delta_norm"};

// States of delta nets.
#ifdef KOG_DELTA
constexpr size_t kNetBytes = sizeof(float) * kDeltaLayers * kLanes * kDeltaItems * kDeltaItemValues;
#else
constexpr size_t kNetBytes = 0;
#endif

struct RankMemory {
    std::vector<Memory> optional;
    Memory tape, norms, final_norm, words, heap, logits, record, nets;

    RankMemory(const std::string& number, size_t num_words, size_t heap_words)
        : tape(read("tape" + number)), norms(read("norms" + number)), final_norm(read("final_norm" + number)), words(8 * num_words),
          heap(8 * heap_words), logits(4 * kTokens * kVocabRows), record(sizeof(KogWaitRecord)), nets(kNetBytes) {
        memset(nets.at, 0xff, nets.size());  // before the first token there is no state, whatever lies there
        for (const char* name : kOptional) optional.push_back(read(name + number));
    }
};

// Before anything is read: FOLDER of the command line, UNREST of the environment.
inline void begin_twin(const char* from) {
    twin_empty_offset = kRingPieces * 8, twin_read_offset = kPacked ? twin_empty_offset : 0;
    folder = from;
    if (const char* seed = getenv("UNREST")) twin::unrest = atoll(seed), twin::most_patience = twin::kMostPatience;
    twin::arena = static_cast<char*>(aligned_alloc(128, kRanks * kNumCtas * (sizeof(Shared) + 128) + 256));
}
// Count the bytes that are copied of their weights, and with LOG in the environment note who stores and finds which words.
template <class Rank>
void note(const std::vector<Rank>& ranks) {
    for (const Rank& r : ranks) {
        tapes.push_back({r.tape.at, r.tape.at + kNumCtas * kTapeBytes});
        const Memory& experts = r.optional[4];
        tapes.push_back({experts.at, experts.at + experts.size()});
    }
    if (!getenv("LOG")) return;
    for (const Rank& r : ranks) twin::watch(r.words);
    for (const Rank& r : ranks) twin::watch(r.heap);
}
// A launch of a rank that does not say yet what it decodes.
template <class Rank>
KogLaunch launch_of(const std::vector<Rank>& ranks, u32 rank, const Memory& embedding, const Memory& rope) {
    const Rank& r = ranks[rank];
    KogLaunch packed{};
    KogDecodeParams& p = packed.decode;
    p.tape_ptr = r.tape.ptr(), p.embedding_ptr = embedding.ptr(), p.norms_ptr = r.norms.ptr(), p.final_norm_ptr = r.final_norm.ptr();
    uint64_t* pointers[] = {&p.qkv_bias_ptr, &p.head_norms_ptr, &p.out_bias_ptr, &p.sinks_ptr, &p.experts_ptr, &p.router_bias_ptr, &p.gate_up_bias_ptr, &p.down_bias_ptr};
    for (u32 i = 0; i < std::size(pointers); ++i) *pointers[i] = r.optional[i].ptr();
#ifdef KOG_DELTA
    const Memory* of_nets = &r.optional[std::size(pointers)];
    packed.delta = {of_nets[0].ptr(), of_nets[1].ptr(), of_nets[2].ptr(), r.nets.ptr(), ~0u};
#endif
    p.rope_ptr = rope.ptr(), p.words_ptr = r.words.ptr(), p.logits_ptr = r.logits.ptr(), p.record_ptr = r.record.ptr();
    p.wait_limit_us = 2000000, p.vocab_first = rank * kVocabRows;
    for (u32 i = 0; i < kRanks; ++i) packed.peers.heap_ptr[i] = ranks[i].heap.ptr();
    packed.peers.rank = rank, packed.peers.num_ranks = kRanks;
    return packed;
}
inline void start(const KogLaunch& packed, u32 rank) {
    twin::start(kNumCtas, kNumThreads, sizeof(Shared), [packed] { kog_decode(packed); });
    for (size_t i = twin::blocks.size() - kNumCtas; i < twin::blocks.size(); ++i) twin::rank_of_block[twin::blocks[i].get()] = rank;
}
