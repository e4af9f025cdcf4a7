// The collectives as the host launches them: one thread block, one operation on one mailbox slot. For tests, start-up and whatever
// is not in a kernel of its own; the device functions are those that the monokernel calls. `ranks.cuh` (generated) has kRanks.
#include "peers.cuh"
#include "ranks.cuh"

namespace kog {

constexpr int kExchangeWarps = 8, kExchangeThreads = 32 * (kExchangeWarps + 1);

struct ExchangeLaunch {
    KogExchangeParams params;
    KogWaits waits;
    KogPeers peers;
};
static_assert(sizeof(ExchangeLaunch) == sizeof(KogExchangeParams) + sizeof(KogWaits) + sizeof(KogPeers), "the host packs them one after the other");

struct ExchangeShared {
    PeerNote notes[kExchangeWarps];
    volatile u32 stopped;
    volatile u32 num_done;  // warps that are done
};

// A warp's share: every kExchangeWarps-th group of 32 values.
__device__ __forceinline__ bool exchange_groups(const ExchangeLaunch& launch, ExchangeShared& shared, u32 warp) {
    const KogExchangeParams& params = launch.params;
    const KogPeers& peers = launch.peers;
    const Mailbox box{params.first_word, params.row_words, 0, params.mailbox};
    const u32 stopped = shared_address(const_cast<const u32*>(&shared.stopped));
    const u32* values = reinterpret_cast<const u32*>(params.values_ptr);
    u32* result = reinterpret_cast<u32*>(params.result_ptr);
    const PeerPlace place{params.collects == kBarrierWait ? kBarrierOp : kCollectOp, params.mailbox, params.slot};
#pragma unroll 1
    for (u32 first = 32 * warp; first < params.length; first += 32 * kExchangeWarps) {
        const u32 count = min(params.length - first, 32u), i = first + laneid();
        const bool mine = laneid() < count;
        const u32 own = mine ? values[i] : 0;
        // Rows are padded to whole lines, so the word behind an odd last value is nobody's.
        if (params.publishes)
            publish_to_peers<kRanks, 32>(peers, box.row(kRanks, params.slot, peers.rank) + first, own, count, params.tag);
        if (params.collects == kPublishOnly) continue;
        PeerWords<kRanks> got;
        const u64* rows = heap_of(peers, peers.rank) + box.row(kRanks, params.slot, 0) + first;
        if (kRanks > 1 && mine) got.load(rows + laneid(), params.row_words, peers.rank);
        if (!wait_for_peers<kRanks>(got, rows, params.row_words, peers.rank, count, params.tag, stopped, shared.notes[warp], place)) return false;
        if (!mine) continue;
        if (params.collects == kSum) result[i] = __float_as_uint(got.total(peers.rank, __uint_as_float(own)));
        else if (params.collects == kGather)
#pragma unroll
            for (int r = 0; r < kRanks; ++r) result[r * params.length + i] = got.payload(r, peers.rank, own);
    }
    return true;
}

__device__ __forceinline__ void exchange(const ExchangeLaunch& launch, ExchangeShared& shared) {
    const u32 warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) shared.stopped = 0, shared.num_done = 0;
    if (threadIdx.x < kExchangeWarps) shared.notes[threadIdx.x].waiting = 0;
    __syncthreads();
    KogKcclHost* host = reinterpret_cast<KogKcclHost*>(launch.waits.host_ptr);
    if (warp < kExchangeWarps) {
        exchange_groups(launch, shared, warp);
        __syncwarp();
        if (laneid() == 0) atomicAdd(const_cast<u32*>(&shared.num_done), 1u);
    } else if (laneid() == 0) {
        PeerWatchdog<kExchangeWarps> watchdog{shared.notes, &shared.stopped, reinterpret_cast<u32*>(launch.waits.mirror_ptr), &host->abort,
                                              reinterpret_cast<KogWaitRecord*>(host->record), launch.peers.rank,
                                              launch.waits.limit_us * 1000ull};
        while (shared.num_done < kExchangeWarps && watchdog.look()) __nanosleep(1000);
    }
    __syncthreads();
    if (threadIdx.x == 0) host->status = shared.stopped ? kStopped : kOk;
}

}  // namespace kog

#ifndef KCCL_TWIN
extern "C" __global__ void __launch_bounds__(kog::kExchangeThreads, 1) kccl_exchange(const __grid_constant__ kog::ExchangeLaunch launch) {
    __shared__ kog::ExchangeShared shared;
    kog::exchange(launch, shared);
}
#endif
