// exchange SEED DELAY STEPS LENGTH TAG_BITS MODE INPUT OUTPUT: every rank publishes epoch e and collects epoch e - DELAY, each an
// operation of its own, at its own pace. MODE: 1 gather, 2 sum; 3: the last rank is silent in the last epoch and the waits (of 50 us) run out;
// 4: the same, and the host aborts; 5: a sum with one slot too few. INPUT: float32 (ranks, steps, length). OUTPUT: float32 (ranks, steps - delay, results).
#include "exchange.cu"
#include "run.h"

using namespace twin;
using kog::kRanks;

int main(int, char** argv) {
    const u32 delay = atoi(argv[2]), steps = atoi(argv[3]), length = atoi(argv[4]), bits = atoi(argv[5]), mode = atoi(argv[6]);
    begin(atoi(argv[1]));
    const std::vector<float> input = read_floats(argv[7]);
    const u32 row_words = (length + 15) / 16 * 16, num_slots = 2 * delay + (mode == 5 ? 1 : 2), first_word = 16;
    const u32 collects = mode == 1 ? 1 : 2, width = collects == 1 ? kRanks * length : length;
    std::vector<Gpu> gpus(kRanks);
    std::vector<std::vector<u32>> done(kRanks);
    for (Gpu& gpu : gpus) gpu.heap.resize(first_word + num_slots * kRanks * row_words + 32), gpu.host.resize(sizeof(KogKcclHost) / 8);
    // Operation 2 (e - 1) publishes epoch e, the next one collects epoch e - delay.
    std::vector<u32> next(kRanks, 0);
    std::vector<std::vector<float>> result(kRanks);
    std::vector<float> output(kRanks * (steps - delay) * width);
    const u32 silent = mode == 3 || mode == 4 ? kRanks - 1 : ~0u;
    const auto start = [&](u32 rank) {
        const u32 epoch = next[rank] / 2 + 1;
        const bool publishes = next[rank] % 2 == 0;
        if (epoch > steps || (rank == silent && epoch == steps)) return false;
        ++next[rank];
        if (!publishes && epoch <= delay) return true;
        const u32 wanted = publishes ? epoch : epoch - delay;
        float* values = const_cast<float*>(input.data()) + (rank * steps + wanted - 1) * length;
        if (!publishes) result[rank].assign(width, -1);
        kog::ExchangeLaunch launch{};
        launch.params = {reinterpret_cast<uintptr_t>(values), reinterpret_cast<uintptr_t>(result[rank].data()), first_word, row_words, 5,
                         wanted % num_slots, length, wanted & static_cast<u32>((1ull << bits) - 1), publishes, publishes ? 0 : collects};
        launch.waits = waits_of<KogWaits>(gpus[rank], mode == 3 || mode == 5 ? 50 : 1000000);
        launch.peers = peers_of<KogPeers>(gpus, rank);
        gpus[rank].launch.start(1, kog::kExchangeThreads, [launch, rank](u32) {
            kog::exchange(launch, shared_of<kog::ExchangeShared>(rank, 0));
        });
        return true;
    };
    const auto finish = [&](u32 rank) {  // of the operation that `next` counts already
        const u32 epoch = (next[rank] - 1) / 2 + 1;
        if (next[rank] % 2 == 0 && epoch > delay)
            std::copy(result[rank].begin(), result[rank].end(), output.begin() + (rank * (steps - delay) + epoch - delay - 1) * width);
    };
    std::vector<char> active(kRanks, 1), failed(kRanks, 0);
    for (u32 rank = 0; rank < kRanks; ++rank) active[rank] = start(rank);
    for (u64 turns = 0;; ++turns) {
        bool any = false;
        for (u32 rank = 0; rank < kRanks; ++rank) {
            while (active[rank] && gpus[rank].launch.running == 0) {
                auto* host = reinterpret_cast<KogKcclHost*>(gpus[rank].host.data());
                if (host->status == kog::kStopped) {
                    failed[rank] = 1, active[rank] = 0;
                } else {
                    finish(rank);
                    active[rank] = start(rank);
                }
            }
            any = any || active[rank];
            if (mode == 4 && turns == 400000) reinterpret_cast<KogKcclHost*>(gpus[rank].host.data())->abort = 1;
        }
        if (!any) break;
        if (turns > 400000000) return 4;  // stuck
        step();
    }
    for (u32 rank = 0; rank < kRanks; ++rank) {
        const auto* record = reinterpret_cast<const KogWaitRecord*>(reinterpret_cast<KogKcclHost*>(gpus[rank].host.data())->record);
        if (failed[rank])
            printf("%u %u %u %u %u %u %lu %lu %d\n", rank, record->rank, record->mailbox, record->slot, record->peer, record->num_missing,
                   record->epoch_wanted, record->epoch_seen, record->elapsed_ns >= 50000);
    }
    write_floats(argv[8], output.data(), output.size());
}
