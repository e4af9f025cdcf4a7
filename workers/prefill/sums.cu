// Sums over the lanes of all ranks, from GPU to GPU. A rank pushes its own sum of a layer into every peer's mailbox, chunk of rows by
// chunk, each followed by a flag; `collect_sum` waits for the peers' flags and adds up. Rows are float32, mailboxes are as
// `workers/prefill/peer_exchange.py` lays them out.
//
// Memory contract. All threads of a block store a chunk, meet, and one thread per peer passes a system-scope fence and stores the
// flag: whoever sees the flag sees the chunk. The reader's thread fences after it saw the flag, its block meets, and the chunk is
// read past L1, where what a slot held before may still lie. A slot is written again only when the reader is known to be done
// with it (docs/prefill.md). `send_sum` never waits, so a wait of one rank never depends on a wait of another.
#include "ptx.cuh"
#include "tree.cuh"
#include "sums_shape.cuh"

namespace kog {

struct SumLaunch {
    KogSumParams params;
    KogPeers peers;
};
constexpr int kPeers = kRanks - 1;
static_assert(kRanks > 1, "one rank has nobody to send to");

__device__ __forceinline__ u32 peer_at(const KogPeers& peers, u32 i) {  // every rank begins with another one
    const u32 peer = peers.rank + 1 + i;
    return peer < kRanks ? peer : peer - kRanks;
}
// What `source` pushes into a slot of the mailbox of `reader`.
__device__ __forceinline__ u64* row_at(const SumLaunch& launch, u32 reader, u32 source, u64 epoch) {
    const KogSumParams& params = launch.params;
    const u64 slot = params.first_slot + epoch % params.num_slots;
    return reinterpret_cast<u64*>(launch.peers.heap_ptr[reader]) + params.first_word + (slot * kRanks + source) * params.row_words;
}
__device__ __forceinline__ u64 epoch_of(const KogSumParams& params) {
    return *reinterpret_cast<const u64*>(params.num_blocks_ptr) * params.per_block + params.index;
}

// Whether this rank's work is given up. One answer for all threads of a block, whenever it comes to be.
__device__ __forceinline__ bool is_stopped(const KogSumParams& params) {
    return __syncthreads_or(threadIdx.x == 0 && load_system_u32(reinterpret_cast<const u32*>(params.stopped_ptr)));
}

// Wait for one word of a peer; false when this rank's work is given up. Called by one thread for each peer.
__device__ __forceinline__ bool await_word(const SumLaunch& launch, const u64* word, u32 peer, u64 wanted, u64 mask) {
    const KogSumParams& params = launch.params;
    u32* stopped = reinterpret_cast<u32*>(params.stopped_ptr);
    const u64 since_ns = globaltimer_ns();
    u64 seen;
    while (((seen = load_system(word)) & mask) != wanted) {
        if (load_system_u32(stopped)) return false;
        const u64 waited_ns = globaltimer_ns() - since_ns;
        if (waited_ns > params.limit_ns) {
            if (atomicCAS(stopped, 0u, 1u) == 0) {
                KogWaitRecord* record = reinterpret_cast<KogWaitRecord*>(params.record_ptr);
                record->rank = launch.peers.rank, record->cta = blockIdx.x, record->op = 1, record->mailbox = params.mailbox;
                record->slot = params.first_slot + static_cast<u32>(epoch_of(params) % params.num_slots);
                record->peer = peer, record->num_missing = 1;
                record->epoch_wanted = wanted, record->epoch_seen = seen & mask, record->elapsed_ns = waited_ns;
            }
            return false;
        }
        __nanosleep(200);
    }
    __threadfence_system();
    return true;
}

}  // namespace kog

using namespace kog;

extern "C" {

// A block of tokens begins. One thread.
__global__ void begin_sums(const __grid_constant__ SumLaunch launch) { ++*reinterpret_cast<u64*>(launch.params.num_blocks_ptr); }

__global__ void __launch_bounds__(kSumThreads) send_sum(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    if (is_stopped(params)) return;  // sums are not what they should be
    const u64 epoch = epoch_of(params);
    const u32 num_chunks = (params.size + kChunkRows - 1) / kChunkRows, row_units = params.width / 4;
    const float4* own = reinterpret_cast<const float4*>(params.own_sum_ptr);
    float4* to[kPeers];
#pragma unroll
    for (u32 p = 0; p < kPeers; ++p)
        to[p] = reinterpret_cast<float4*>(row_at(launch, peer_at(launch.peers, p), launch.peers.rank, epoch));
    for (u32 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const u32 first = chunk * kChunkRows * row_units, rest = params.size - chunk * kChunkRows;
        const u32 count = (rest < kChunkRows ? rest : kChunkRows) * row_units;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            const float4 value = own[first + i];
#pragma unroll
            for (u32 p = 0; p < kPeers; ++p) to[p][first + i] = value;
        }
        __syncthreads();
        if (threadIdx.x < kPeers) {
            __threadfence_system();
            store_system(row_at(launch, peer_at(launch.peers, threadIdx.x), launch.peers.rank, epoch) + params.flag_word + chunk, epoch);
        }
    }
}

__global__ void __launch_bounds__(kSumThreads) collect_sum(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    const u64 epoch = epoch_of(params);
    const u32 num_chunks = (params.size + kChunkRows - 1) / kChunkRows, row_units = params.width / 4, rank = launch.peers.rank;
    const float4* own = reinterpret_cast<const float4*>(params.own_sum_ptr);
    float4* total = reinterpret_cast<float4*>(params.total_ptr);
    const float4* from[kRanks];
#pragma unroll
    for (u32 source = 0; source < kRanks; ++source)
        from[source] = source == rank ? own : reinterpret_cast<const float4*>(row_at(launch, rank, source, epoch));
    for (u32 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        bool is_there = true;
        if (threadIdx.x < kPeers) {
            const u32 peer = peer_at(launch.peers, threadIdx.x);
            is_there = await_word(launch, row_at(launch, rank, peer, epoch) + params.flag_word + chunk, peer, epoch, ~0ull);
        }
        if (!__syncthreads_and(is_there)) return;  // `share_overflow` sees why
        const u32 first = chunk * kChunkRows * row_units, rest = params.size - chunk * kChunkRows;
        const u32 count = (rest < kChunkRows ? rest : kChunkRows) * row_units;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            float x[kRanks], y[kRanks], z[kRanks], w[kRanks];
#pragma unroll
            for (u32 source = 0; source < kRanks; ++source) {
                const float4 part = __ldcg(from[source] + first + i);
                x[source] = part.x, y[source] = part.y, z[source] = part.z, w[source] = part.w;
            }
            total[first + i] = make_float4(tree_sum<kRanks>(x), tree_sum<kRanks>(y), tree_sum<kRanks>(z), tree_sum<kRanks>(w));
        }
    }
}

// `overflow` of any rank becomes that of all: what is stored, and where decoding goes on, must be the same everywhere. It is set, too,
// when a wait was given up before. One warp.
// `num_blocks_ptr` counts these calls, and the word carries its number and, in its lowest bit, the flag.
__global__ void share_overflow(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    u64* num_ends = reinterpret_cast<u64*>(params.num_blocks_ptr);
    int* overflow = reinterpret_cast<int*>(params.overflow_ptr);
    const u64 epoch = *num_ends + 1;
    const bool own = is_stopped(params) || *overflow != 0;
    const u64 word = epoch << 1 | own;
    bool any = own;
    if (threadIdx.x < kPeers) {
        const u32 peer = peer_at(launch.peers, threadIdx.x);
        store_system(row_at(launch, peer, launch.peers.rank, epoch), word);
        const u64* theirs = row_at(launch, launch.peers.rank, peer, epoch);
        any = !await_word(launch, theirs, peer, epoch << 1, ~1ull) || (load_system(theirs) & 1) || own;
    }
    any = __syncthreads_or(any);
    if (threadIdx.x == 0) {
        *num_ends = epoch;
        if (any) *overflow = 1;
    }
}

}  // extern "C"
