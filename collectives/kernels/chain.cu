// Benchmark: a chain of dependent all-reduces inside one launch, synchronisation included. What a step publishes depends on the
// total of the step before, so nothing overlaps:
//   owners    row owners exchange with the same rows' owners on the other GPUs, as the monokernel does for residual rows;
//             input(n + 1, i) = total(n, i) / 4 + bias(i)
//   everyone  after that every thread block of every GPU gets the whole vector, as from an all-reduce of a library;
//             input(n + 1, i) = total(n, (i + kShift) mod kLength) / 4 + bias(i), of which the thread block owns nothing
// `chain_shape.cuh` (generated) has kRanks, kLength, kRows (of a thread block), kEveryone, kReplicas and kShift.
#include "peers.cuh"
#include "chain_shape.cuh"

namespace kog {

constexpr u32 kUnits = kLength / 2;  // of two values, which travel in one store
constexpr int kOwnerWarps = (kRows + 31) / 32;
// Every gathering warp has words to wait for: one that had none would run ahead of the others.
constexpr int kGatherWarps = !kEveryone ? 0 : kUnits >= 12 * 32 ? 12 : (kUnits + 31) / 32;
constexpr int kWarpRows = kRows < 32 ? kRows : 32;  // of an owner warp
constexpr int kChainThreads = 32 * (kOwnerWarps + kGatherWarps + 1);
constexpr int kNotes = kOwnerWarps + kGatherWarps;
static_assert(kLength % kRows == 0 && kRows % kWarpRows == 0 && kRows % 2 == 0, "every owner warp is full");

struct ChainLaunch {
    KogChainParams params;
    KogWaits waits;
    KogPeers peers;
};
static_assert(sizeof(ChainLaunch) == sizeof(KogChainParams) + sizeof(KogWaits) + sizeof(KogPeers), "the host packs them one after the other");

struct ChainShared {
    float x[kLength];
    u64 gathered;  // barrier: the gathering warps have written x
    PeerNote notes[kNotes];
    volatile u32 stopped, num_done;
};

struct Chain {
    const ChainLaunch& launch;
    ChainShared& shared;
    u32 warp, stopped;

    // Words by which totals reach all thread blocks of this GPU: [epoch's parity][replica][kLength].
    __device__ __forceinline__ u64* local_words(u32 epoch, u32 replica) const {
        return reinterpret_cast<u64*>(launch.params.words_ptr) + ((epoch & 1) * kReplicas + replica) * kLength;
    }

    __device__ __forceinline__ bool own_rows() {
        const KogChainParams& params = launch.params;
        const Mailbox box{params.first_word, params.row_words, 2, 0};
        const u32 first = blockIdx.x * kRows + warp * 32, row = first + laneid();
        const bool mine = laneid() < kWarpRows;
        const float bias = mine ? reinterpret_cast<const float*>(params.bias_ptr)[row] : 0.0f;
        float* totals = reinterpret_cast<float*>(params.total_ptr);
        u64* stamps = reinterpret_cast<u64*>(params.stamps_ptr);
        float total = mine ? totals[kEveryone ? (row + kShift) % kLength : row] : 0.0f, sum = 0;
        const u32 num_steps = params.num_warm + params.num_steps;
#pragma unroll 1
        for (u32 step = 0; step < num_steps; ++step) {
            const u32 epoch = params.first_epoch + step, slot = epoch & 1;
            if (step == params.num_warm && blockIdx.x == 0 && threadIdx.x == 0) stamps[0] = globaltimer_ns();
            const float own = __fadd_rn(__fmul_rn(total, 0.25f), bias);
            publish_sum_to_peers<kRanks, kWarpRows>(launch.peers, box, slot, first, kLength, own, epoch);
            if (!collect_total<kRanks, kWarpRows>(launch.peers, box, slot, first, kLength, own, epoch, stopped, shared.notes[warp], sum))
                return false;
            total = sum;
            if constexpr (kEveryone) {
                publish_locally(sum, first, epoch);
                if (!gathered(step)) return false;
                total = mine ? shared.x[(row + kShift) % kLength] : 0.0f;
            }
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) stamps[1] = globaltimer_ns();
        if (mine) totals[row] = sum;
        return true;
    }

    __device__ __forceinline__ void publish_locally(float sum, u32 first, u32 epoch) {
        constexpr u32 kPairs = kWarpRows / 2;
#pragma unroll
        for (u32 at = 0; at < kPairs * kReplicas; at += 32) {
            const u32 i = at + laneid(), pair = i % kPairs, replica = i / kPairs;
            const u32 low = __shfl_sync(kFullWarp, __float_as_uint(sum), 2 * pair);
            const u32 high = __shfl_sync(kFullWarp, __float_as_uint(sum), 2 * pair + 1);
            if (i < kPairs * kReplicas)
                store_relaxed_x2(local_words(epoch, replica) + first + 2 * pair, make_value_word(low, epoch), make_value_word(high, epoch));
        }
    }

    __device__ __forceinline__ bool gathered(u32 step) {
        const u32 bar = shared_address(&shared.gathered);
        while (!__all_sync(kFullWarp, mbar_try(bar, step & 1)))
            if (must_leave(stopped)) return false;
        return true;
    }

    // A gathering warp reads its slice of the totals of every step. x is free when a word of the step arrives: that took all owners.
    __device__ __forceinline__ bool gather() {
        constexpr u32 kGatherThreads = kGatherWarps > 0 ? 32 * kGatherWarps : 32, kMany = (kUnits + kGatherThreads - 1) / kGatherThreads;
        const KogChainParams& params = launch.params;
        const u32 first = (warp - kOwnerWarps) * 32 + laneid();
#pragma unroll 1
        for (u32 step = 0; step < params.num_warm + params.num_steps; ++step) {
            const u32 epoch = params.first_epoch + step;
            const u64* words = local_words(epoch, blockIdx.x % kReplicas);
            ulonglong2 got[kMany];
            u32 rounds = 0;
            while (true) {
                bool ready = true;
#pragma unroll
                for (u32 k = 0; k < kMany; ++k)
                    if (first + kGatherThreads * k < kUnits) got[k] = load_relaxed_x2(words + 2 * (first + kGatherThreads * k));
#pragma unroll
                for (u32 k = 0; k < kMany; ++k)
                    if (first + kGatherThreads * k < kUnits) ready = ready && value_has_tag(got[k].x, epoch) && value_has_tag(got[k].y, epoch);
                if (__all_sync(kFullWarp, ready)) break;
                if (must_leave(stopped)) return false;
                if (++rounds == kRoundsBeforeNote && laneid() == 0)
                    begin_note(shared.notes[warp], epoch | 1u << 31, {kCollectOp, 1, epoch & 1}, epoch, words, kLength, 1, kNoRow, 0);
            }
            if (rounds >= kRoundsBeforeNote && laneid() == 0) shared.notes[warp].waiting = 0;
#pragma unroll
            for (u32 k = 0; k < kMany; ++k)
                if (first + kGatherThreads * k < kUnits) {
                    shared.x[2 * (first + kGatherThreads * k)] = __uint_as_float(static_cast<u32>(got[k].x));
                    shared.x[2 * (first + kGatherThreads * k) + 1] = __uint_as_float(static_cast<u32>(got[k].y));
                }
            __syncwarp();
            if (laneid() == 0) mbar_arrive(shared_address(&shared.gathered));
        }
        return true;
    }
};

__device__ __forceinline__ void chain(const ChainLaunch& launch, ChainShared& shared) {
    const u32 warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        shared.stopped = 0, shared.num_done = 0;
        mbar_init(shared_address(&shared.gathered), kEveryone ? kGatherWarps : 1);
        fence_barrier_init();
    }
    if (threadIdx.x < kNotes) shared.notes[threadIdx.x].waiting = 0;
    __syncthreads();
    KogKcclHost* host = reinterpret_cast<KogKcclHost*>(launch.waits.host_ptr);
    Chain part{launch, shared, warp, shared_address(const_cast<const u32*>(&shared.stopped))};
    if (warp < kNotes) {
        if (warp < kOwnerWarps) part.own_rows();
        else part.gather();
        __syncwarp();
        if (laneid() == 0) atomicAdd(const_cast<u32*>(&shared.num_done), 1u);
    } else if (laneid() == 0) {
        PeerWatchdog<kNotes> watchdog{shared.notes, &shared.stopped, reinterpret_cast<u32*>(launch.waits.mirror_ptr), &host->abort,
                                      reinterpret_cast<KogWaitRecord*>(host->record), launch.peers.rank, launch.waits.limit_us * 1000ull};
        while (shared.num_done < kNotes && watchdog.look()) __nanosleep(4000);
    }
    __syncthreads();
    if (threadIdx.x == 0 && shared.stopped) host->status = kStopped;
}

}  // namespace kog

#ifndef KCCL_TWIN
extern "C" __global__ void __launch_bounds__(kog::kChainThreads, 1) kccl_chain(const __grid_constant__ kog::ChainLaunch launch) {
    __shared__ kog::ChainShared shared;
    kog::chain(launch, shared);
}
#endif
