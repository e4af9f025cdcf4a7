// company FOLDER KV_BYTES WORDS HEAP_WORDS: requests that come, share passes and go. One of the builds for that, or the plain one, which has a single seat.
// FOLDER holds embedding.bin, rope.bin, and tape, norms, final_norm and all of kOptional of each rank as NAME.RANK.bin; and as text
//   requests.txt: for each request the position of its first token, so many tokens of its prompt and these, most tokens of the answer, seed, the bits of
//                 1 / temperature, so many stop ids and these;
//   launches.txt: for each launch its most passes, which request is cancelled before it (-1: none; -2: others wait), and for each seat which request
//                 has it (or -1).
// FOLDER gets ring, state, kv and nets (what delta nets keep) of each request and rank, as NAME.REQUEST.RANK.bin, and the state of passes as
// passes.RANK.bin. UNREST and LOG as in decode.cpp. Ends with 4 when it takes too long, with 5 when a rank does not end well.
#include "decode.cu"
#include "ranks.h"

unsigned twin_silence = 0;

struct Request {
    Memory prompt{4 * kMaxContext};
    u32 max_tokens = 0, inverse_temperature = 0;
    u64 seed = 0;
    std::vector<u32> stop_ids;
    std::vector<Memory> state, ring, host, kv, nets;  // of each rank

    KogDecodeState& of_rank(u32 rank) const { return *reinterpret_cast<KogDecodeState*>(state[rank].at); }
};
std::vector<long> numbers_of(const char* name) {
    std::vector<long> numbers;
    FILE* file = fopen((folder + "/" + name).c_str(), "r");
    if (!file) exit(3);
    for (long number; fscanf(file, "%ld", &number) == 1;) numbers.push_back(number);
    fclose(file);
    return numbers;
}
std::vector<Request> requests_of(const std::vector<long>& numbers, size_t kv_bytes) {
    std::vector<Request> requests;
    for (size_t at = 0; at < numbers.size();) {
        Request request;
        const u32 first = numbers[at++], num_prompt = numbers[at++];
        for (u32 i = 0; i < num_prompt; ++i) reinterpret_cast<u32*>(request.prompt.at)[i] = numbers[at++];
        request.max_tokens = numbers[at++], request.seed = numbers[at++], request.inverse_temperature = numbers[at++];
        request.stop_ids.assign(numbers.begin() + at + 1, numbers.begin() + at + 1 + numbers[at]), at += 1 + numbers[at];
        for (u32 rank = 0; rank < kRanks; ++rank) {
            request.state.emplace_back(sizeof(KogDecodeState)), request.ring.emplace_back(16 * kMaxContext);
            request.host.emplace_back(sizeof(KogHostPage)), request.kv.emplace_back(kv_bytes), request.nets.emplace_back(kNetBytes);
            memset(request.nets.back().at, 0xff, kNetBytes);  // before the first token there is no state, whatever lies there
            KogDecodeState& state = request.of_rank(rank);
            state.token = reinterpret_cast<u32*>(request.prompt.at)[first], state.position = first;
            state.num_prompt = num_prompt, state.max_tokens = request.max_tokens;
        }
        requests.push_back(std::move(request));
    }
    return requests;
}
u32 request_tag_of(u32 request) { return request + 7; }

int main(int, char** argv) {
    begin_twin(argv[1]);
    const size_t kv_bytes = atoll(argv[2]), num_words = atoll(argv[3]), heap_words = atoll(argv[4]);
    const Memory embedding = read("embedding"), rope = read("rope"), kept(8 * 8192);
    const std::vector<Request> requests = requests_of(numbers_of("requests.txt"), kv_bytes);
    const std::vector<long> launches = numbers_of("launches.txt");
    struct Rank : RankMemory {
        Memory state, host;
    };
    std::vector<Rank> ranks;
    for (u32 rank = 0; rank < kRanks; ++rank) {
        const std::string number = "." + std::to_string(rank);
        ranks.push_back({RankMemory(number, num_words, heap_words), Memory(sizeof(KogDecodeState)), Memory(sizeof(KogHostPage))});
    }
    note(ranks);
    u32 epoch = 0;  // of the plain build
    for (size_t at = 0; at < launches.size(); at += 2 + kTokens) {
        if (const long cancelled = launches[at + 1]; cancelled >= 0)
            for (const Memory& host : requests[cancelled].host) reinterpret_cast<KogHostPage*>(host.at)->cancelled_tag = request_tag_of(cancelled);
        twin::rank_of_block.clear();
        for (u32 rank = 0; rank < kRanks; ++rank) {
            const Rank& r = ranks[rank];
            KogLaunch packed = launch_of(ranks, rank, embedding, rope);
            KogDecodeParams& p = packed.decode;
            p.num_steps = launches[at], p.trace_ptr = kept.ptr();
#ifdef KOG_COMPANY
            p.state_ptr = r.state.ptr(), p.host_ptr = r.host.ptr();
            constexpr u32 kIds = sizeof(KogCompanyParams::stop_ids) / sizeof(KogCompanyParams::num_stop_ids);
            KogCompanyParams& company = packed.company;
            const u32 told_tag = launches[at + 1] == -2 ? ~0u : 0;
            for (u32 seat = 0; seat < kTokens; ++seat) {
                const long number = launches[at + 2 + seat];
                if (number < 0) continue;
                const Request& of = requests[number];
                company.taken |= 1u << seat;
                company.state_ptr[seat] = of.state[rank].ptr(), company.prompt_ptr[seat] = of.prompt.ptr(), company.ring_ptr[seat] = of.ring[rank].ptr();
                company.host_ptr[seat] = of.host[rank].ptr(), company.kv_ptr[seat] = of.kv[rank].ptr(), company.seed[seat] = of.seed;
                company.inverse_temperature_bits[seat] = of.inverse_temperature, company.request_tag[seat] = request_tag_of(number);
                company.num_stop_ids[seat] = of.stop_ids.size();
                if (launches[at + 1] != number) reinterpret_cast<KogHostPage*>(of.host[rank].at)->cancelled_tag = told_tag;
                std::copy(of.stop_ids.begin(), of.stop_ids.end(), company.stop_ids + seat * kIds);
#ifdef KOG_DELTA_COMPANY
                packed.states.state_ptr[seat] = of.nets[rank].ptr();
#endif
            }
#else
            const long number = launches[at + 2];
            const Request& of = requests[number];
            of.of_rank(rank).epoch = epoch;
            p.state_ptr = of.state[rank].ptr(), p.prompt_ptr = of.prompt.ptr(), p.ring_ptr = of.ring[rank].ptr(), p.host_ptr = of.host[rank].ptr();
            p.kv_ptr = of.kv[rank].ptr(), p.seed = of.seed, p.inverse_temperature_bits = of.inverse_temperature, p.request_tag = request_tag_of(number);
            p.num_stop_ids = of.stop_ids.size();
            std::copy(of.stop_ids.begin(), of.stop_ids.end(), p.stop_ids);
#ifdef KOG_DELTA
            packed.delta.state_ptr = of.nets[rank].ptr();
#endif
#endif
            start(packed, rank);
        }
        if (!twin::run(twin::turns + (twin::unrest ? 1000000 : 200000))) return 4;
#ifndef KOG_COMPANY
        epoch = requests[launches[at + 2]].of_rank(0).epoch;
#endif
        for (const Rank& r : ranks)
            if (reinterpret_cast<const KogWaitRecord*>(r.record.at)->elapsed_ns) return 5;
    }
    twin::write_accesses();
    for (u32 rank = 0; rank < kRanks; ++rank) {
        write("passes." + std::to_string(rank), ranks[rank].state);
        for (u32 i = 0; i < requests.size(); ++i) {
            const std::string name = "." + std::to_string(i) + "." + std::to_string(rank);
            write("ring" + name, requests[i].ring[rank]), write("state" + name, requests[i].state[rank]), write("kv" + name, requests[i].kv[rank]);
            write("nets" + name, requests[i].nets[rank]);
        }
    }
}
