// Sums over the lanes of all ranks, from GPU to GPU, in two steps. Row tiles belong to the ranks in turn: a rank sends each
// row tile of its own sum to the rank that it belongs to (`send_parts`), which adds the parts up and writes the total into every
// rank's memory (`add_parts`); `await_totals` waits for those of the other ranks. So a rank sends less than twice its sum, however
// many ranks there are. Rows are float32; mailboxes are as `workers/prefill/exchange/peer_exchange.py` lays them out.
//
// Memory contract. All threads of a thread block store a row tile, meet, and one thread passes a system-scope fence and stores the flag:
// whoever sees the flag sees the row tile. The reader's thread fences after it saw the flag, its thread block meets, and parts are read past
// L1, where what a slot held before may still lie; totals are read by later kernels. A slot of parts, and a total, are written
// again only when the reader is known to be done with them (docs/prefill.md). `send_parts` never waits, `add_parts` waits for sent
// parts, and `await_totals` for added ones: no cycle, in whatever order a rank's thread blocks come to run.
#include "ptx.cuh"
#include "tree.cuh"
#include "allreduce_shape.cuh"

namespace kog {

struct SumLaunch {
    KogSumParams params;
    KogPeers peers;
};
constexpr int kPeers = kRanks - 1;
// Values that a thread asks for before it stores the first, and for how many totals it does.
constexpr u32 kSendBatch = 4, kAddBatch = kRanks < 8 ? 8 / kRanks : 1;
static_assert(kRanks > 1, "one rank has nobody to send to");

__device__ __forceinline__ u32 peer_at(const KogPeers& peers, u32 i) {  // every rank begins with another one
    const u32 peer = peers.rank + 1 + i;
    return peer < kRanks ? peer : peer - kRanks;
}
__device__ __forceinline__ u64* heap_of(const SumLaunch& launch, u32 rank) {
    return reinterpret_cast<u64*>(launch.peers.heap_ptr[rank]);
}
__device__ __forceinline__ u32 slot_of(const KogSumParams& params, u64 epoch) {
    return params.first_slot + static_cast<u32>(epoch % params.num_slots);
}
// What `source` pushes into a slot of the mailbox of `reader`.
__device__ __forceinline__ u64* row_at(const SumLaunch& launch, u32 reader, u32 source, u64 epoch) {
    const KogSumParams& params = launch.params;
    const u64 row = static_cast<u64>(slot_of(params, epoch)) * kRanks + source;
    return heap_of(launch, reader) + params.first_word + row * params.row_words;
}
__device__ __forceinline__ float4* total_at(const SumLaunch& launch, u32 rank) {
    return reinterpret_cast<float4*>(heap_of(launch, rank) + launch.params.total_word);
}
__device__ __forceinline__ u64* total_flag_at(const SumLaunch& launch, u32 rank, u32 row_tile) {
    return heap_of(launch, rank) + launch.params.total_flag_word + row_tile;
}
__device__ __forceinline__ u64 epoch_of(const KogSumParams& params) {
    return *reinterpret_cast<const u64*>(params.num_chunks_ptr) * params.per_chunk + params.index;
}
__device__ __forceinline__ u32 num_row_tiles(const KogSumParams& params) { return (params.size + kRowTile - 1) / kRowTile; }

// Which float4 of a sum are a row tile.
struct Span {
    u32 first, count;
};
__device__ __forceinline__ Span span_of(const KogSumParams& params, u32 row_tile) {
    const u32 row = row_tile * kRowTile, left = params.size - row, row_units = params.width / 4;
    return {row * row_units, (left < kRowTile ? left : kRowTile) * row_units};
}

__device__ __forceinline__ float4 sum_of(const float4 (&part)[kRanks]) {
    float x[kRanks], y[kRanks], z[kRanks], w[kRanks];
#pragma unroll
    for (u32 source = 0; source < kRanks; ++source)
        x[source] = part[source].x, y[source] = part[source].y, z[source] = part[source].z, w[source] = part[source].w;
    return make_float4(tree_sum<kRanks>(x), tree_sum<kRanks>(y), tree_sum<kRanks>(z), tree_sum<kRanks>(w));
}

// Whether this rank's work is given up. One answer for all threads of a thread block, whenever it comes to be.
__device__ __forceinline__ bool is_stopped(const KogSumParams& params) {
    return __syncthreads_or(threadIdx.x == 0 && load_system_u32(reinterpret_cast<const u32*>(params.stopped_ptr)));
}

// Wait for one word of a peer; false when this rank's work is given up. Called by one thread for a word.
__device__ __forceinline__ bool await_word(
    const SumLaunch& launch, const u64* word, u32 peer, u64 wanted, u64 mask, u32 mailbox, u32 slot, u64 limit_ns) {
    const KogSumParams& params = launch.params;
    u32* stopped = reinterpret_cast<u32*>(params.stopped_ptr);
    const u64 since_ns = globaltimer_ns();
    u64 seen;
    while (((seen = load_system(word)) & mask) != wanted) {
        if (load_system_u32(stopped)) return false;
        const u64 waited_ns = globaltimer_ns() - since_ns;
        if (waited_ns > limit_ns) {
            if (atomicCAS(stopped, 0u, 1u) == 0) {
                KogWaitRecord* record = reinterpret_cast<KogWaitRecord*>(params.record_ptr);
                record->rank = launch.peers.rank, record->cta = blockIdx.x + 1, record->op = 1, record->mailbox = mailbox;
                record->slot = slot, record->peer = peer, record->num_missing = 1;
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

// A chunk of tokens begins. One thread.
__global__ void begin_sums(const __grid_constant__ SumLaunch launch) { ++*reinterpret_cast<u64*>(launch.params.num_chunks_ptr); }

// The row tiles that belong to the peers. The part for the k-th row tile of a rank is the k-th row tile of the row.
__global__ void __launch_bounds__(kSumThreads) send_parts(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    if (is_stopped(params)) return;  // sums are not what they should be
    const u64 epoch = epoch_of(params);
    const u32 most = (num_row_tiles(params) + kRanks - 1) / kRanks * kPeers;
    const float4* own = reinterpret_cast<const float4*>(params.own_sum_ptr);
    for (u32 turn = blockIdx.x; turn < most; turn += gridDim.x) {
        const u32 peer = peer_at(launch.peers, turn % kPeers), k = turn / kPeers, row_tile = k * kRanks + peer;
        if (row_tile >= num_row_tiles(params)) continue;
        u64* row = row_at(launch, peer, launch.peers.rank, epoch);
        const Span span = span_of(params, row_tile);
        float4* to = reinterpret_cast<float4*>(row) + k * kRowTile * (params.width / 4);
        for (u32 first = threadIdx.x; first < span.count; first += kSendBatch * blockDim.x) {
            float4 values[kSendBatch];
#pragma unroll
            for (u32 b = 0, i = first; b < kSendBatch; ++b, i += blockDim.x)
                if (i < span.count) values[b] = __ldcg(own + span.first + i);
#pragma unroll
            for (u32 b = 0, i = first; b < kSendBatch; ++b, i += blockDim.x)
                if (i < span.count) to[i] = values[b];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            store_system(row + params.flag_word + k, epoch);
        }
    }
}

// The row tiles that belong to this rank: totals, for all ranks.
__global__ void __launch_bounds__(kSumThreads) add_parts(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    const u64 epoch = epoch_of(params);
    const u32 rank = launch.peers.rank;
    const float4* own = reinterpret_cast<const float4*>(params.own_sum_ptr);
    for (u32 k = blockIdx.x; k * kRanks + rank < num_row_tiles(params); k += gridDim.x) {
        bool is_there = true;
        if (threadIdx.x < kPeers) {
            const u32 peer = peer_at(launch.peers, threadIdx.x);
            const u64* flag = row_at(launch, rank, peer, epoch) + params.flag_word + k;
            is_there = await_word(launch, flag, peer, epoch, ~0ull, params.mailbox, slot_of(params, epoch), params.limit_ns);
        }
        if (!__syncthreads_and(is_there)) return;  // `share_overflow` sees why
        const u32 row_tile = k * kRanks + rank;
        const Span span = span_of(params, row_tile);
        const float4* from[kRanks];
        float4* to[kRanks];
#pragma unroll
        for (u32 source = 0; source < kRanks; ++source) {
            const float4* row = reinterpret_cast<const float4*>(row_at(launch, rank, source, epoch));
            from[source] = source == rank ? own + span.first : row + k * kRowTile * (params.width / 4);
            to[source] = total_at(launch, source) + span.first;
        }
        for (u32 first = threadIdx.x; first < span.count; first += kAddBatch * blockDim.x) {
            float4 parts[kAddBatch][kRanks];
#pragma unroll
            for (u32 b = 0, i = first; b < kAddBatch; ++b, i += blockDim.x)
                if (i < span.count)
#pragma unroll
                    for (u32 source = 0; source < kRanks; ++source) parts[b][source] = __ldcg(from[source] + i);
#pragma unroll
            for (u32 b = 0, i = first; b < kAddBatch; ++b, i += blockDim.x)
                if (i < span.count) {
                    const float4 total = sum_of(parts[b]);
#pragma unroll
                    for (u32 reader = 0; reader < kRanks; ++reader) to[reader][i] = total;
                }
        }
        __syncthreads();
        if (threadIdx.x < kPeers) {
            __threadfence_system();
            store_system(total_flag_at(launch, peer_at(launch.peers, threadIdx.x), row_tile), epoch);
        }
    }
}

// Until the totals of the peers' row tiles are here. Whoever adds them up is given longer than those that he waits for: he is the one
// who can name the rank that did not come.
__global__ void await_totals(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    const u64 epoch = epoch_of(params);
    const u32 rank = launch.peers.rank;
    for (u32 row_tile = threadIdx.x; row_tile < num_row_tiles(params); row_tile += blockDim.x) {
        const u32 peer = row_tile % kRanks;
        if (peer != rank)
            await_word(launch, total_flag_at(launch, rank, row_tile), peer, epoch, ~0ull, params.total_mailbox, params.total_slot,
                       params.limit_ns + params.limit_ns / 2);
    }
}

// `overflow` of any rank becomes that of all: what is stored, and where decoding goes on, must be the same everywhere. It is set,
// too, when a wait was given up before. One warp.
// `num_chunks_ptr` counts these calls, and the word carries its number and, in its lowest bit, the flag.
__global__ void share_overflow(const __grid_constant__ SumLaunch launch) {
    const KogSumParams& params = launch.params;
    u64* num_ends = reinterpret_cast<u64*>(params.num_chunks_ptr);
    int* overflow = reinterpret_cast<int*>(params.overflow_ptr);
    const u64 epoch = *num_ends + 1;
    const bool own = is_stopped(params) || *overflow != 0;
    const u64 word = epoch << 1 | own;
    bool any = own;
    if (threadIdx.x < kPeers) {
        const u32 peer = peer_at(launch.peers, threadIdx.x);
        store_system(row_at(launch, peer, launch.peers.rank, epoch), word);
        const u64* theirs = row_at(launch, launch.peers.rank, peer, epoch);
        const bool is_there = await_word(launch, theirs, peer, epoch << 1, ~1ull, params.mailbox, slot_of(params, epoch), params.limit_ns);
        any = !is_there || (load_system(theirs) & 1) || own;
    }
    any = __syncthreads_or(any);
    if (threadIdx.x == 0) {
        *num_ends = epoch;
        if (any) *overflow = 1;
    }
}

}  // extern "C"
