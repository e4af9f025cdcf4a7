// Attention of a chunk of tokens, binary16 with float32 scores and sums, on Hopper's matrix units.
//
// An item is one or two groups of 64 rows (kPack query heads that share a KV head, of neighbouring positions) and the keys they see,
// in tiles of kKeys. A thread queues tensor copies into a ring of slots, which hold a tile of keys or of values each; every group of
// four warps multiplies its own rows. `full` counts bytes of a slot, `empty` the warps that have done with it. Two groups queue their
// products in turn, so that exponentials of one are made beside products of the other.
//
// Bits: tiles of keys stand at fixed positions, and a tile that a row does not see changes nothing of it. Where a row may see many
// keys, they are attended to in partitions of kPartitionTiles tiles, each from nothing, and merged in order: in one thread block, or in as
// many as there are partitions and a second launch (`combine`). So a row has the same bits wherever it stands, in chunks of every size.
#include "attention_consumer.cuh"

namespace kog {

struct alignas(64) AttentionLaunch {  // as tensor maps want it
    KogAttentionParams params;
};

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1) attend(const __grid_constant__ AttentionLaunch launch) {
    const Memory memory{(shared_memory() + 1023) & ~1023u};
    const u32 group = threadIdx.x / kGroupThreads, num_groups = launch.params.num_groups;
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < kSlots; ++slot) {
            mbar_init(memory.full(slot), 1);
            mbar_init(memory.empty(slot), 4 * num_groups);  // warps
        }
        for (u32 group = 0; group < kGroups; ++group) {
            mbar_init(memory.query_full(group), 1);
            mbar_init(memory.query_empty(group), 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    await_predecessors();
    if (group < kGroups) {
        raise_registers<240>();
        if (group < num_groups) Consumer{launch.params, memory, group, num_groups > 1}.run();
    } else {
        drop_registers<24>();
        if (threadIdx.x == kGroups * kGroupThreads) Producer{launch.params, memory}.run();
    }
}

// The partitions of a group's rows, a thread block for each group, in the order in which one thread block would have merged them.
__global__ void __launch_bounds__(kGroupThreads) combine(const __grid_constant__ AttentionLaunch launch) {
    const KogAttentionParams& params = launch.params;
    const u32 group = blockIdx.x % params.num_groups, rows = blockIdx.x / params.num_groups;
    const u32 num_rows = params.num_tiles * kPackedHeads;  // items, but for partitions
    Item item(params, rows, *reinterpret_cast<const int*>(params.place_ptr));
    item.see(params, *reinterpret_cast<const int*>(params.place_ptr));
    State total{};
    total.top[0] = total.top[1] = -INFINITY;
    for (int partition = item.first / kPartitionTiles; partition * kPartitionTiles < item.end; ++partition) {
        const Parts parts(params, partition * num_rows + rows, group);
        const float4 sums = parts.sums[0];
        const float partition_top[2] = {sums.x, sums.y}, partition_sum[2] = {sums.z, sums.w};
        float factor[4];
        merge(total.top, total.sum, factor, partition_top, partition_sum);
#pragma unroll
        for (int i = 0; i < kValues / 4; ++i) {
            const float4 part = parts.values[i * kGroupThreads];
            float* values = &total.values[4 * i];
            values[0] = merged(values[0], part.x, factor, 0), values[1] = merged(values[1], part.y, factor, 0);
            values[2] = merged(values[2], part.z, factor, 1), values[3] = merged(values[3], part.w, factor, 1);
        }
    }
    store_rows(params, item, group, total);
}

}  // extern "C"
