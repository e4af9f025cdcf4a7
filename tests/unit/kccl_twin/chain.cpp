// chain SEED STEPS LAUNCHES INPUT OUTPUT: INPUT float32 (ranks, length), the biases; OUTPUT float32 (ranks, length), the last totals.
#include "chain.cu"
#include "run.h"

using namespace twin;
using kog::kRanks;

int main(int, char** argv) {
    begin(atoi(argv[1]));
    const u32 steps = atoi(argv[2]), launches = atoi(argv[3]), num_ctas = kog::kLength / kog::kRows;
    const std::vector<float> input = read_floats(argv[4]);
    std::vector<float> totals(kRanks * kog::kLength);
    std::vector<u64> stamps(2);
    std::vector<Gpu> gpus(kRanks);
    std::vector<std::vector<u64>> local(kRanks);
    const u32 row_words = (kog::kLength + 15) / 16 * 16;
    for (u32 rank = 0; rank < kRanks; ++rank) {
        gpus[rank].heap.resize(2 * kRanks * row_words + 32), gpus[rank].host.resize(sizeof(KogKcclHost) / 8);
        local[rank].resize(2 * kog::kReplicas * kog::kLength + 16);
    }
    std::vector<u32> next(kRanks, 0);
    for (u64 turns = 0;; ++turns) {
        bool any = false;
        for (u32 rank = 0; rank < kRanks; ++rank) {
            if (gpus[rank].launch.running == 0 && next[rank] < launches) {
                kog::ChainLaunch launch{};
                const auto words = (reinterpret_cast<uintptr_t>(local[rank].data()) + 15) / 16 * 16;
                launch.params = {reinterpret_cast<uintptr_t>(input.data() + rank * kog::kLength),
                                 reinterpret_cast<uintptr_t>(totals.data() + rank * kog::kLength), reinterpret_cast<uintptr_t>(stamps.data()),
                                 words, 0, row_words, 1 + next[rank] * steps, 1, steps - 1, 0};
                launch.waits = waits_of<KogWaits>(gpus[rank], 1000000);
                launch.peers = peers_of<KogPeers>(gpus, rank);
                ++next[rank];
                gpus[rank].launch.start(num_ctas, kog::kChainThreads, [launch, rank](u32 block) {
                    kog::chain(launch, shared_of<kog::ChainShared>(rank, block));
                });
            }
            any = any || gpus[rank].launch.running != 0;
            if (reinterpret_cast<KogKcclHost*>(gpus[rank].host.data())->status == kog::kStopped) return 5;
        }
        if (!any) break;
        if (turns > 400000000) return 4;  // stuck
        step();
    }
    write_floats(argv[5], totals.data(), totals.size());
}
