// handoff SEED STEPS OUTPUT: uint32 (ranks, steps, thread blocks, 4).
#include "handoff.cu"
#include "run.h"

using namespace twin;
using kog::kRanks;

int main(int, char** argv) {
    begin(atoi(argv[1]));
    const u32 steps = atoi(argv[2]);
    const u32 vector_row = kog::kReplicas * kog::kCopyWords, candidate_row = kog::kReplicas * kog::kCandidateWords;
    std::vector<Gpu> gpus(kRanks);
    std::vector<u32> results(kRanks * steps * kog::kCtas * 4, ~0u);
    for (Gpu& gpu : gpus)
        gpu.heap.resize(kRanks * vector_row + 2 * kRanks * candidate_row + 32), gpu.host.resize(sizeof(KogKcclHost) / 8);
    for (u32 rank = 0; rank < kRanks; ++rank) {
        kog::HandoffLaunch launch{};
        launch.params = {reinterpret_cast<uintptr_t>(results.data() + rank * steps * kog::kCtas * 4), 0, vector_row, kRanks * vector_row,
                         candidate_row, 1, steps};
        launch.waits = waits_of<KogWaits>(gpus[rank], 1000000);
        launch.peers = peers_of<KogPeers>(gpus, rank);
        gpus[rank].launch.start(kog::kCtas, kog::kHandoffThreads, [launch, rank](u32 block) {
            kog::handoff(launch, shared_of<kog::HandoffShared>(rank, block));
        });
    }
    for (u64 turns = 0; turns < 400000000; ++turns) {
        bool any = false;
        for (Gpu& gpu : gpus) {
            any = any || gpu.launch.running != 0;
            if (reinterpret_cast<KogKcclHost*>(gpu.host.data())->status == kog::kStopped) return 5;
        }
        if (!any) {
            write_floats(argv[3], results.data(), results.size());
            return 0;
        }
        step();
    }
    return 4;
}
