// context FOLDER KV_BYTES WORDS STEPS LIMIT_US FIRST...: one rank's monokernel goes on with a sequence at each of the positions FIRST, for STEPS
// tokens in three launches, from a cache that something else has filled. FOLDER holds prompt.bin (uint32, the whole sequence),
// embedding.bin, rope.bin, tape.bin, norms.bin, final_norm.bin, and kv.FIRST.bin; it gets kept.FIRST.bin (the cache) and
// logits.FIRST.bin (float32, after the last token). Ends with 3 when a file is missing, 4 when that takes too long, 5 when the kernel
// does not end well (record.bin says why), 6 when two threads read or write the same keys or values in one launch: no fence stands between them;
// likewise when two write the same words of a part in the first layer that has parts.
#include "ptx.cuh"

namespace twin {
inline std::unordered_map<const void*, const Fiber*> owners;  // of chunks of keys and values, in this launch
inline bool is_shared = false;
template <class T>
T* own(T* at) {
    is_shared |= owners.try_emplace(at, current).first->second != current;
    return at;
}
inline std::unordered_map<unsigned long long, const Fiber*> writers;  // of units of words
inline void write_words(unsigned lane_idx, unsigned part, unsigned row, unsigned unit) {
    const unsigned long long place = ((lane_idx * 64ull + part) * 4096 + row) * 4096 + unit;
    is_shared |= writers.try_emplace(place, current).first->second != current;
}
}  // namespace twin

#include "decode.cu"
#include "files.h"

using namespace kog;

int main(int num_arguments, char** argv) {
    twin_empty_offset = kRingPieces * 8, twin_read_offset = kPacked ? twin_empty_offset : 0;
    folder = argv[1];
    const size_t kv_bytes = atoll(argv[2]), num_words = atoll(argv[3]);
    const u32 num_steps = atoi(argv[4]), limit_us = atoi(argv[5]);
    twin::arena = static_cast<char*>(aligned_alloc(128, kNumCtas * (sizeof(Shared) + 128) + 256));
    const Memory embedding = read("embedding"), rope = read("rope"), prompt = read("prompt"), tape = read("tape"), norms = read("norms"),
                 final_norm = read("final_norm");
    tapes.push_back({tape.at, tape.at + kNumCtas * kTapeBytes});
    Memory words(8 * num_words), record(sizeof(KogWaitRecord)), host(sizeof(KogHostPage)), ring(16 * kMaxContext), logits(4 * kVocabRows);
    Memory state_memory(sizeof(KogDecodeState));
    KogDecodeState& state = *reinterpret_cast<KogDecodeState*>(state_memory.at);
    for (int i = 6; i < num_arguments; ++i) {
        const u32 first = atoi(argv[i]);
        Memory kv = read("kv." + std::string(argv[i]));
        if (kv.size() != kv_bytes) return 3;
        const u32 epoch = state.epoch;  // tags go on
        state = {};
        state.epoch = epoch, state.position = first, state.token = reinterpret_cast<const u32*>(prompt.at)[first];
        state.num_prompt = first + num_steps, state.max_tokens = 1;  // one product of the LM head, behind the last
        for (const u32 steps : {num_steps / 4, num_steps / 4, num_steps - num_steps / 4 * 2}) {
            KogLaunch packed{};
            KogDecodeParams& p = packed.decode;
            p.tape_ptr = tape.ptr(), p.embedding_ptr = embedding.ptr(), p.norms_ptr = norms.ptr(), p.final_norm_ptr = final_norm.ptr();
            p.rope_ptr = rope.ptr(), p.kv_ptr = kv.ptr(), p.words_ptr = words.ptr(), p.logits_ptr = logits.ptr();
            p.prompt_ptr = prompt.ptr(), p.state_ptr = state_memory.ptr(), p.record_ptr = record.ptr(), p.host_ptr = host.ptr();
            p.ring_ptr = ring.ptr(), p.wait_limit_us = limit_us, p.num_steps = steps, p.request_tag = 7;
            packed.peers.num_ranks = 1;
            twin::owners.clear(), twin::writers.clear();
            twin::start(kNumCtas, kNumThreads, sizeof(Shared), [packed] { kog_decode(packed); });
            if (!twin::run(200000)) return 4;  // turns of all launches so far
            if (twin::is_shared) return 6;
        }
        write("record", record);
        if (state.abort_mirror || state.position != first + num_steps) return 5;
        write("kept." + std::string(argv[i]), kv), write("logits." + std::string(argv[i]), logits);
        write("words." + std::string(argv[i]), words);
    }
}
