// notes SEED MODE: a warp of rank 0 waits for words that come late, and then, for longer than the limit, for nothing. MODE: 0 wait_for_peers,
// 1 collect_candidates, 2 Quads::collect, 3 none of them comes, 4 collect_totals, of whose vectors the first comes first, and then the note
// is of the second. Prints whether the wait left a note, ended well, and what the watchdog
// says afterwards: 1 go on, 0 leave.
#include "quads.cuh"
#include "run.h"

using namespace twin;

constexpr u32 kTag = 7, kReplicas = 2, kCtas = 3, kCopyWords = 16;
constexpr u32 kApart = 8, kPeer = 96;  // from a vector's words to the next one's; where the peer's begin
constexpr u64 kLimitNs = 1000000000;
struct NotesShared {
    kog::PeerNote notes[1];
    volatile u32 stopped;
};

int main(int, char** argv) {
    begin(atoi(argv[1]));
    const int mode = atoi(argv[2]);
    std::vector<Gpu> gpus(2);
    for (Gpu& gpu : gpus) gpu.heap.resize(512);
    const KogPeers peers = peers_of<KogPeers>(gpus, 0);
    const kog::Mailbox box{0, 96, 2, 4};
    const kog::Quads<2, kReplicas, kCtas> quads{peers, nullptr, box};
    NotesShared& shared = shared_of<NotesShared>(0, 0);
    shared.notes[0].waiting = shared.stopped = 0;
    bool ended_well = false, goes_on = false;
    u32 host_abort = 0;
    KogWaitRecord record{};
    kog::PeerWatchdog<1> watchdog{shared.notes, &shared.stopped, &gpus[0].mirror, &host_abort, &record, 0, kLimitNs};
    gpus[0].launch.start(1, 32, [&](u32) {
        const u32 stopped = kog::shared_address(const_cast<const u32*>(&shared.stopped));
        kog::PeerNote& note = shared.notes[0];
        bool ok = false;
        u64 sum = 0;
        if (mode == 1)
            ok = kog::collect_candidates<2, kCtas>(peers, box, kTag & 1, kCopyWords, 0, kTag, stopped, note, [&](u32 bits, u32) { sum += bits; });
        else if (mode == 4) {
            float sums[3] = {1.0f, 2.0f, 3.0f};
            const float own = sums[1];
            ok = kog::collect_totals<2, 8, false>(peers, box, 0, kApart, 0, 8, sums, kTag, stopped, note);
            ok = ok && (kog::laneid() < 8 ? sums[1] == own + __uint_as_float(kPeer + kApart + kog::laneid()) : sums[1] == own);
            ok = __all_sync(kog::kFullWarp, ok);
        } else if (mode == 2)
            ok = quads.collect(0, kTag, 0, stopped, note, [&](u32 source, const ulonglong2&) { sum += source; });
        else {
            kog::PeerWords<2> got{};
            ok = kog::wait_for_peers<2>(got, start_of(gpus[0]), 96, 0, 8, kTag, stopped, note, {kog::kCollectOp, box.index, 0});
        }
        __syncwarp();
        if (kog::laneid() != 0) return;
        watchdog.look();
        now_ns += 2 * kLimitNs;
        ended_well = ok, goes_on = watchdog.look();
    });
    bool noted = false;
    for (u64 turns = 0; gpus[0].launch.running != 0; ++turns) {
        if (turns > 100000000) return 4;
        if (!noted && shared.notes[0].waiting != 0) {
            noted = true;
            if (mode == 3) shared.stopped = 1;
            else if (mode == 4 && shared.notes[0].words == start_of(gpus[0])) {
                for (u32 i = 0; i < kApart; ++i) start_of(gpus[0])[kPeer + i] = kog::make_value_word(kPeer + i, kTag);
                noted = false;
            } else if (mode == 4 && shared.notes[0].words != start_of(gpus[0]) + kApart) return 5;
            else
                for (u32 i = 0; i < 512 - 32; ++i)
                    start_of(gpus[0])[i] = mode == 2 ? kog::make_quad_word(i, kTag) : kog::make_value_word(i, kTag);
        }
        step();
    }
    printf("%d %d %d\n", noted, ended_well, goes_on);
}
