// What ranks exchange at the end of a token, alone and over and over, for tests: every thread block gives its rows of a vector to
// all thread blocks of all ranks, and a candidate; every thread block finds the best candidate. Values are made from a hash, so
// that the host knows what must come out. `handoff_shape.cuh` (generated) has kRanks, kCtas and kRows (of a thread block).
#include "peers.cuh"
#include "handoff_shape.cuh"

namespace kog {

constexpr int kReplicas = 4, kHandoffThreads = 64, kVectorRows = kCtas * kRows;
constexpr u32 kCopyWords = (kVectorRows / 2 + 15) / 16 * 16, kCandidateWords = (2 * kCtas + 15) / 16 * 16;

struct HandoffLaunch {
    KogHandoffParams params;
    KogWaits waits;
    KogPeers peers;
};
static_assert(sizeof(HandoffLaunch) == sizeof(KogHandoffParams) + sizeof(KogWaits) + sizeof(KogPeers), "the host packs them one after the other");

struct HandoffShared {
    PeerNote notes[1];
    volatile u32 stopped, num_done;
};

__device__ __forceinline__ u32 mixed(u32 a, u32 b, u32 c) {
    u32 h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    h ^= h >> 15, h *= 0x2c1b3c6du, h ^= h >> 12, h *= 0x297a2d39u, h ^= h >> 15;
    return h;
}
__device__ __forceinline__ float unit_float(u32 h) { return __uint_as_float(0x3f800000u | h >> 9); }  // from 1 to 2

__device__ __forceinline__ bool handoff_steps(const HandoffLaunch& launch, HandoffShared& shared) {
    const KogHandoffParams& params = launch.params;
    const KogPeers& peers = launch.peers;
    const Mailbox vectors{params.vector_first_word, params.vector_row_words, 1, 0};
    const Mailbox candidates{params.candidate_first_word, params.candidate_row_words, 2, 1};
    const u32 stopped = shared_address(const_cast<const u32*>(&shared.stopped)), cta = blockIdx.x;
    u32* results = reinterpret_cast<u32*>(params.result_ptr);
#pragma unroll 1
    for (u32 step = 0; step < params.num_steps; ++step) {
        const u32 epoch = params.first_epoch + step, row = cta * kRows + laneid();
        const float value = unit_float(mixed(peers.rank, row, epoch));
        publish_vector_to_all<kRanks, kRows, kReplicas>(peers, vectors.row(kRanks, 0, peers.rank), kCopyWords, cta * kRows, kVectorRows,
                                                        value, epoch & 0xffffu);
        // Each thread adds up the words it reads of all ranks' vectors; they come before the candidates do, mostly.
        u32 sum = 0;
        bool noted = false;
#pragma unroll 1
        for (u32 i = laneid(); i < kRanks * kVectorRows / 2; i += 32) {
            const u32 source = i / (kVectorRows / 2), word_idx = i % (kVectorRows / 2);
            const u64* at = heap_of(peers, peers.rank) + vectors.row(kRanks, 0, source) + cta % kReplicas * kCopyWords + word_idx;
            u64 word = load_system(at);
            for (u32 rounds = 1; !has_tag(word, epoch & 0xffffu); ++rounds) {
                if (load_shared_u32(stopped)) break;
                if (rounds == kRoundsBeforeNote && !noted) {
                    begin_note(shared.notes[0], epoch | 1u << 31, {kCollectOp, 0, 0}, epoch, at, 0, 1, kNoRow, 0);
                    noted = true;
                }
                word = load_system(at);
            }
            sum += mixed(__float_as_uint(first_of(word)), __float_as_uint(second_of(word)), i);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
        if (must_leave(stopped)) return false;
        if (noted) shared.notes[0].waiting = 0;

        const u32 slot = epoch & 1, id = peers.rank * kCtas + cta;
        publish_candidate<kRanks, kReplicas>(peers, candidates, slot, kCandidateWords, cta,
                                             __float_as_uint(unit_float(mixed(id, 77, epoch) & ~0xfffffu)), id, epoch);
        float best = -1;
        u32 best_id = ~0u;
        const auto fold = [&](u32 score_bits, u32 other_id) {
            const float score = __uint_as_float(score_bits);
            if (score > best || (score == best && other_id < best_id)) best = score, best_id = other_id;
        };
        if (!collect_candidates<kRanks, kCtas>(peers, candidates, slot, kCandidateWords, cta % kReplicas, epoch, stopped, shared.notes[0], fold))
            return false;
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            const u32 other = __shfl_xor_sync(kFullWarp, __float_as_uint(best), offset), other_id = __shfl_xor_sync(kFullWarp, best_id, offset);
            fold(other, other_id);
        }
        if (laneid() == 0) {
            u32* result = results + 4 * (step * kCtas + cta);
            result[0] = __float_as_uint(best), result[1] = best_id, result[2] = sum, result[3] = 0;
        }
    }
    return true;
}

__device__ __forceinline__ void handoff(const HandoffLaunch& launch, HandoffShared& shared) {
    if (threadIdx.x == 0) shared.stopped = 0, shared.num_done = 0, shared.notes[0].waiting = 0;
    __syncthreads();
    KogKcclHost* host = reinterpret_cast<KogKcclHost*>(launch.waits.host_ptr);
    if (threadIdx.x < 32) {
        handoff_steps(launch, shared);
        __syncwarp();
        if (laneid() == 0) shared.num_done = 1;
    } else if (laneid() == 0) {
        PeerWatchdog<1> watchdog{shared.notes, &shared.stopped, reinterpret_cast<u32*>(launch.waits.mirror_ptr), &host->abort,
                                 reinterpret_cast<KogWaitRecord*>(host->record), launch.peers.rank, launch.waits.limit_us * 1000ull};
        while (shared.num_done == 0 && watchdog.look()) __nanosleep(4000);
    }
    __syncthreads();
    if (threadIdx.x == 0 && shared.stopped) host->status = kStopped;
}

}  // namespace kog

#ifndef KCCL_TWIN
extern "C" __global__ void __launch_bounds__(kog::kHandoffThreads, 1) kccl_handoff(const __grid_constant__ kog::HandoffLaunch launch) {
    __shared__ kog::HandoffShared shared;
    kog::handoff(launch, shared);
}
#endif
