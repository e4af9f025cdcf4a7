// Attention of a chunk of tokens, binary16 with float32 scores and sums, on Hopper's matrix units.
//
// An item is one, two or four groups of 64 rows (kPack query heads that share a KV head, of neighbouring positions) and the keys they see,
// in tiles of kKeys. A thread queues tensor copies into a ring of slots, which hold a tile of keys or of values each, or the item's queries;
// every group of four warps multiplies its own rows. `full` counts bytes of a slot, `empty` the warps that have done with it. Two groups
// queue their products in turn, so that exponentials of one are made beside products of the other. Four groups are those of a pair of thread
// blocks, a cluster: each of these copies half of every tile to both.
//
// Bits: tiles of keys stand at fixed positions, and a tile that a row does not see changes nothing of it. Where a row may see many
// keys, they are attended to in partitions, each from nothing, and merged in order: in one thread block, or in several and a second launch
// (`combine`). So a row has the same bits wherever it stands, in chunks of every size.
#include "attention_consumer.cuh"

namespace kog {

struct alignas(64) AttentionLaunch {  // as tensor maps want it
    KogAttentionParams params;
};

// A launch of thread blocks in clusters of `kCluster`, which share items.
template <u32 kCluster>
__device__ __forceinline__ void attend_in(const KogAttentionParams& params) {
    const Memory memory{(shared_memory() + 1023) & ~1023u};
    const u32 group = threadIdx.x / kGroupThreads, num_groups = params.num_groups / kCluster;  // of this thread block
    const u32 rank = kCluster > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < kSlots; ++slot) {
            mbar_init(memory.full(slot), 1);
            mbar_init(memory.empty(slot), 4 * params.num_groups);  // warps
        }
        fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) cluster_sync();
    await_predecessors();
    if (group < kGroups) {
        raise_registers<240>();
        if (group < num_groups) Consumer<kCluster>{params, memory, group}.run();
    } else {
        drop_registers<24>();
        if (threadIdx.x == kGroups * kGroupThreads) Producer<kCluster>{params, memory, rank}.run();
    }
    if constexpr (kCluster > 1) cluster_sync();  // nobody leaves whose memory the other one may still copy to, or whose barriers it tells
}

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1) attend(const __grid_constant__ AttentionLaunch launch) {
    attend_in<1>(launch.params);
}
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    attend_pairs(const __grid_constant__ AttentionLaunch launch) {
    attend_in<2>(launch.params);
}
// The units of a group's rows, a thread block for each group, in the order in which one thread block would have merged them.
__global__ void __launch_bounds__(kGroupThreads) combine(const __grid_constant__ AttentionLaunch launch) {
    const KogAttentionParams& params = launch.params;
    const u32 group = blockIdx.x % params.num_groups, rows = blockIdx.x / params.num_groups;
    await_predecessors();
    Item item(params, rows, *reinterpret_cast<const int*>(params.place_ptr));
    item.see(params, *reinterpret_cast<const int*>(params.place_ptr));
    if (item.is_of_one_unit(params)) return;  // it has stored them
    State total{};
    total.top[0] = total.top[1] = -INFINITY;
    for (int unit = unit_of(params, item.first); unit_begin(params, unit) < item.end; ++unit) {
        const Parts parts(params, item.part_index(params, unit), group);
        const float4 sums = parts.sums[0];
        const float partition_top[2] = {sums.x, sums.y}, partition_sum[2] = {sums.z, sums.w};
        float factor[4];
        merge(total.top, total.sum, factor, partition_top, partition_sum);
#pragma unroll
        for (int i = 0; i < kValues / 4; ++i) {
            const float4 sum = merged_part(total.part(i), parts.values[i * kGroupThreads], factor);
            float* values = &total.values[4 * i];
            values[0] = sum.x, values[1] = sum.y, values[2] = sum.z, values[3] = sum.w;
        }
    }
    store_rows(params, item, group, total);
}

}  // extern "C"
