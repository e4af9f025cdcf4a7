// Attention of a block of tokens, binary16 with float32 scores and sums, on Hopper's matrix units.
//
// An item is one or two groups of 64 rows (kPack query heads that share a KV head, of neighbouring positions) and the keys they see,
// in tiles of kKeys. A thread queues tensor copies into a ring of slots, which hold a tile of keys or of values each; every group of
// four warps multiplies its own rows. `full` counts bytes of a slot, `empty` the warps that have done with it. Two groups queue their
// products in turn, so that exponentials of one are made beside products of the other.
//
// Bits: tiles of keys stand at fixed positions, and a tile that a row does not see changes nothing of it. Where a row may see many
// keys, they are attended to in chunks of kChunkTiles tiles, each from nothing, and merged in order: in one thread block, or in as
// many as there are chunks and a second launch (`combine`). So a row has the same bits wherever it stands, in blocks of every size.
#include "hopper.cuh"
#include "dependent.cuh"
#include "attention_shape.cuh"

namespace kog {

constexpr u32 kGroupRows = 64, kGroupThreads = 128;
constexpr int kGroupPositions = kGroupRows / kPack;
constexpr u32 kPanels = kHeadDim / kPanel, kPanelBytes = kKeys * kPanel * 2, kTileBytes = kPanels * kPanelBytes;
constexpr u32 kQueryPanelBytes = kGroupRows * kPanel * 2, kQueryBytes = kPanels * kQueryPanelBytes;
constexpr u32 kTotalBytes = kGroupRows * kHeadDim * 4;
constexpr u32 kQueriesFrom = kSlots * kTileBytes, kTotalsFrom = kQueriesFrom + kGroups * kQueryBytes;
constexpr u32 kBarsFrom = kTotalsFrom + kGroups * kTotalBytes, kNumBars = 2 * kSlots + 2 * kGroups;
constexpr int kValues = kHeadDim / 2, kScores = kKeys / 2;  // of a thread: two rows
static_assert(1024 + kBarsFrom + 8 * kNumBars <= kSharedBytes, "shared memory");
static_assert(kScores <= 64, "a row's scores of a thread have a bit each");
static_assert(kGroupRows % kPack == 0 && kHeadDim % kPanel == 0, "whole panels");

// Operands in shared memory stand in panels: all rows of `kPanel` 16-bit values (16, 32 or 64, which a tensor map swizzles over as many
// bytes as they have), then all rows of the next ones. Eight rows repeat themselves.
template <int kPanel>
constexpr u64 kEightRows = static_cast<u64>(8 * kPanel * 2 >> 4) << 32 | static_cast<u64>(kPanel == 64 ? 1 : kPanel == 32 ? 2 : 3) << 62;

// Rows of an operand whose products are summed over the values of a row.
template <int kPanel>
__device__ __forceinline__ u64 rows_at(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | kEightRows<kPanel>;
}
// Rows of an operand whose products are summed over the rows; `panel_bytes` from one panel to the next.
template <int kPanel>
__device__ __forceinline__ u64 columns_at(u32 address, u32 panel_bytes) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(panel_bytes >> 4) << 16 | kEightRows<kPanel>;
}

struct Item {
    u32 tile, head, chunk;  // `head`: kPack neighbouring query heads
    int first, end;         // tiles of keys

    // `start`: position of the block's first row.
    __device__ __forceinline__ Item(const KogAttentionParams& params, u32 index, int start) {
        head = index % kPackedHeads;
        const u32 rest = index / kPackedHeads;
        tile = params.num_chunks ? rest % params.num_tiles : params.num_tiles - 1 - rest;  // the longest first
        chunk = params.num_chunks ? rest / params.num_tiles : 0;
        see(params, start);
        if (params.num_chunks) {
            first = max(first, static_cast<int>(chunk) * kChunkTiles);
            end = min(end, static_cast<int>(chunk + 1) * kChunkTiles);
        }
    }
    __device__ __forceinline__ void see(const KogAttentionParams& params, int start) {
        const int row = first_row(params, 0), lowest = start + row - static_cast<int>(params.window) + 1;
        first = params.window && lowest > 0 ? lowest / kKeys : 0;
        end = (start + min(static_cast<int>(params.size), row + static_cast<int>(params.num_groups) * kGroupPositions) - 1) / kKeys + 1;
    }
    __device__ __forceinline__ int first_row(const KogAttentionParams& params, u32 group) const {
        return (tile * params.num_groups + group) * kGroupPositions;
    }
    // One past the last tile that belongs together with tile `from`.
    __device__ __forceinline__ int run_end(const KogAttentionParams& params, int from) const {
        return params.is_chunked ? min(end, (from / kChunkTiles + 1) * kChunkTiles) : end;
    }
};

// Items of a thread block in turn: there and back, so that the shortest follow the longest.
__device__ __forceinline__ u32 item_index(u32 pass) {
    return pass * gridDim.x + (pass & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

struct Ring {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

struct Memory {
    u32 base;

    __device__ __forceinline__ u32 slot(u32 index) const { return base + index * kTileBytes; }
    __device__ __forceinline__ u32 query(u32 group) const { return base + kQueriesFrom + group * kQueryBytes; }
    __device__ __forceinline__ u32 full(u32 slot) const { return base + kBarsFrom + 16 * slot; }
    __device__ __forceinline__ u32 empty(u32 slot) const { return full(slot) + 8; }
    __device__ __forceinline__ u32 query_full(u32 group) const { return base + kBarsFrom + 16 * (kSlots + group); }
    __device__ __forceinline__ u32 query_empty(u32 group) const { return query_full(group) + 8; }
};

struct Producer {
    const KogAttentionParams& params;
    Memory memory;
    Ring ring{0, 1};

    __device__ __forceinline__ void load(const uint64_t (&map)[16], int tile, u32 kv_head) {
        const u32 full = memory.full(ring.slot);
        mbar_wait(memory.empty(ring.slot), ring.parity);
        mbar_arrive_expect(full, kTileBytes);
        tensor_load(memory.slot(ring.slot), reinterpret_cast<const TensorMap*>(map), 0, tile * static_cast<int>(kKeys), 0, kv_head, full);
        ring.advance();
    }
    __device__ __forceinline__ void run() {
        const int start = *reinterpret_cast<const int*>(params.place_ptr);
        u32 query_parity = 1;
        for (u32 pass = 0; pass * gridDim.x < params.num_items; ++pass) {
            if (item_index(pass) >= params.num_items) continue;
            const Item item(params, item_index(pass), start);
            if (item.first >= item.end) continue;
            const u32 kv_head = item.head * kPack / kShare;
            load(params.keys_map, item.first, kv_head);
            for (u32 group = 0; group < params.num_groups; ++group) {
                mbar_wait(memory.query_empty(group), query_parity);
                mbar_arrive_expect(memory.query_full(group), kQueryBytes);
                tensor_load(memory.query(group), reinterpret_cast<const TensorMap*>(params.query_map), 0, 0,
                            item.first_row(params, group), 0, item.head, memory.query_full(group));
            }
            query_parity ^= 1;
            for (int from = item.first; from < item.end;) {
                const int until = item.run_end(params, from);
                if (from > item.first) load(params.keys_map, from, kv_head);
                for (int tile = from + 1; tile < until; ++tile) {
                    load(params.keys_map, tile, kv_head);
                    load(params.values_map, tile - 1, kv_head);
                }
                load(params.values_map, until - 1, kv_head);
                from = until;
            }
        }
    }
};

// What a thread knows of two rows, 8 apart: the largest score, the sum of exponentials (of all four threads of a row, once it is
// whole), and values: four for every 8 columns, two of the first row, two of the other.
struct State {
    float top[2], sum[2], values[kValues];

    __device__ __forceinline__ float4 part(int i) const {
        return make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
};

__device__ __forceinline__ float reference(float top) { return top == -INFINITY ? 0.0f : top; }

// One more chunk behind those merged before.
__device__ __forceinline__ void merge(float (&top)[2], float (&sum)[2], float (&factor)[4], const float (&chunk_top)[2],
                                      const float (&chunk_sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float higher = fmaxf(top[r], chunk_top[r]), zero = reference(higher);
        factor[r] = exp2_approx((top[r] - zero) * kScale);
        factor[2 + r] = exp2_approx((chunk_top[r] - zero) * kScale);
        sum[r] = fmaf(sum[r], factor[r], chunk_sum[r] * factor[2 + r]);
        top[r] = higher;
    }
}
__device__ __forceinline__ float merged(float total, float value, const float (&factor)[4], int row) {
    return fmaf(total, factor[row], value * factor[2 + row]);
}

// Four threads of a row: each has two values of four neighbouring units of 8, and gets all of one of them.
__device__ __forceinline__ void turn(u32 (&v)[4]) {
    const bool odd = laneid() & 1, high = laneid() & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(kFullWarp, odd ? v[i] : v[i + 1], 1);
        v[i] = odd ? got : v[i], v[i + 1] = odd ? v[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(kFullWarp, high ? v[i] : v[i + 2], 2);
        v[i] = high ? got : v[i], v[i + 2] = high ? v[i + 2] : got;
    }
}

// The outputs of a group's rows. Called by whole warps.
__device__ __forceinline__ void store_rows(const KogAttentionParams& params, const Item& item, u32 group, const State& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = threadIdx.x % kGroupThreads / 32 * 16 + laneid() / 4 + 8 * r;
        const u32 place = item.first_row(params, group) + row / kPack, at = item.head * kPack + row % kPack;
        const u64 first = ((static_cast<u64>(at / kLaneHeads) * params.size + place) * kLaneHeads + at % kLaneHeads) * kHeadDim;
        unsigned char* to = reinterpret_cast<unsigned char*>(params.out_ptr) + 2 * first;
        const float inverse = 1.0f / state.sum[r];
#pragma unroll
        for (int unit = 0; unit + 4 <= kHeadDim / 8; unit += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[i] = Fp16::pack(state.values[4 * (unit + i) + 2 * r] * inverse, state.values[4 * (unit + i) + 2 * r + 1] * inverse);
            turn(v);
            if (place < params.size) *reinterpret_cast<uint4*>(to + 16 * (unit + laneid() % 4)) = make_uint4(v[0], v[1], v[2], v[3]);
        }
#pragma unroll
        for (int unit = kHeadDim / 32 * 4; unit < kHeadDim / 8; ++unit) {
            const u32 v = Fp16::pack(state.values[4 * unit + 2 * r] * inverse, state.values[4 * unit + 2 * r + 1] * inverse);
            if (place < params.size) *reinterpret_cast<u32*>(to + 16 * unit + 4 * (laneid() % 4)) = v;
        }
    }
}

struct Parts {  // of items whose chunks are attended to by several thread blocks
    float4 *values, *sums;

    __device__ __forceinline__ Parts(const KogAttentionParams& params, u32 index, u32 group) {
        const u64 at = static_cast<u64>(index) * params.num_groups + group;
        values = reinterpret_cast<float4*>(params.parts_ptr) + at * kGroupThreads * (kValues / 4) + threadIdx.x % kGroupThreads;
        sums = reinterpret_cast<float4*>(params.part_sums_ptr) + at * kGroupThreads + threadIdx.x % kGroupThreads;
    }
};

struct Consumer {
    const KogAttentionParams& params;
    Memory memory;
    u32 group;
    bool in_turn;
    Ring ring{0, 0};
    State state;

    __device__ __forceinline__ void release(u32 slot) {
        if (laneid() == 0) mbar_arrive(memory.empty(slot));
    }
    // Scores of a tile: queued.
    __device__ __forceinline__ void queue_scores(float (&scores)[kScores], u32 slot) {
        const u64 query = rows_at<kPanel>(memory.query(group)), keys = rows_at<kPanel>(memory.slot(slot));
#pragma unroll
        for (u32 k = 0; k < kHeadDim / 16; ++k) {
            const u32 panel = k * 16 / kPanel, within = k * 16 % kPanel * 2;
            multiply_rows(scores, query + ((panel * kQueryPanelBytes + within) >> 4), keys + ((panel * kPanelBytes + within) >> 4), k > 0);
        }
        products_commit();
    }
    // values += the tile's values, times `chances`: queued.
    __device__ __forceinline__ void queue_values(const u32 (&chances)[kScores / 2], u32 slot) {
        const u64 values = columns_at<kPanel>(memory.slot(slot), kPanelBytes);
#pragma unroll
        for (u32 k = 0; k < kKeys / 16; ++k)
            multiply_columns(state.values, chances[4 * k], chances[4 * k + 1], chances[4 * k + 2], chances[4 * k + 3],
                             values + (k * 16 * kPanel * 2 >> 4));
        products_commit();
    }
    // What a row does not see is -infinity. `position`: of this thread's first row.
    __device__ __forceinline__ void mask(float (&scores)[kScores], int tile, const int (&position)[2], int lowest, int highest) {
        const int first = tile * static_cast<int>(kKeys);
        const int window = params.window ? static_cast<int>(params.window) : 1 << 30;
        if (first + static_cast<int>(kKeys) - 1 <= lowest && first > highest - window) return;  // all rows of the warp see all
        const int column = first + 2 * (laneid() % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 seen = first_columns(position[r] - column) & ~first_columns(position[r] - window - column);
#pragma unroll
            for (int i = 0; i < kScores / 2; ++i) {
                float& score = scores[i / 2 * 4 + 2 * r + i % 2];
                score = seen >> i & 1 ? score : -INFINITY;
            }
        }
    }
    // A bit for each score of a row that this thread has (columns 0, 1, 8, 9, 16, ...), set up to column `last`.
    static __device__ __forceinline__ u32 first_columns(int last) {
        const int count = last < 0 ? 0 : 2 * (last / 8) + min(last % 8 + 1, 2);
        return count >= 32 ? 0xffffffffu : (1u << count) - 1;
    }
    // Scores become exponentials; what was added up before is to be multiplied by `factor`.
    __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = scores[2 * r];
#pragma unroll
            for (int i = 0; i < kScores / 4; ++i) top = fmaxf(top, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
            top = fmaxf(state.top[r], fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)));
            const float zero = reference(top), offset = -zero * kScale;
            factor[r] = exp2_approx((state.top[r] - zero) * kScale);
            state.top[r] = top;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[4 * i + 2 * r + e];
                    score = exp2_approx(fmaf(score, kScale, offset));
                    sum += score;
                }
            }
            state.sum[r] = fmaf(state.sum[r], factor[r], sum);
        }
    }
    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
        if (!__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kValues; ++i) state.values[i] *= factor[i / 2 % 2];
    }
    static __device__ __forceinline__ void pack(const float (&scores)[kScores], u32 (&chances)[kScores / 2]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) chances[i] = Fp16::pack(scores[2 * i], scores[2 * i + 1]);
    }

    // Tiles `from` to `until` - 1, from nothing.
    __device__ __forceinline__ void attend(int from, int until, const int (&position)[2], int lowest, int highest, bool is_last) {
        float scores[kScores], factor[2];
        u32 chances[kScores / 2];
        state.top[0] = state.top[1] = -INFINITY, state.sum[0] = state.sum[1] = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) state.values[i] = 0;

        mbar_wait(memory.full(ring.slot), ring.parity);
        __syncwarp();
        settle(scores);
        products_begin();
        queue_scores(scores, ring.slot);
        products_wait<0>();
        settle(scores);
        release(ring.slot);
        ring.advance();
        mask(scores, from, position, lowest, highest);
        exponentiate(scores, factor);
        pack(scores, chances);
        mbar_wait(memory.full(ring.slot), ring.parity);
        for (int tile = from + 1; tile < until; ++tile) {
            const u32 keys = ring.slot;
            ring.advance();
            const u32 values = ring.slot;
            if (in_turn) group_sync(1 + group, 2 * kGroupThreads);
            __syncwarp();
            settle(scores);
            settle(state.values);
            products_begin();
            queue_scores(scores, keys);
            mbar_wait(memory.full(values), ring.parity);
            ring.advance();
            __syncwarp();
            queue_values(chances, values);
            if (in_turn) group_arrive(2 - group, 2 * kGroupThreads);
            products_wait<1>();
            settle(scores);
            release(keys);
            mask(scores, tile, position, lowest, highest);
            exponentiate(scores, factor);
            settle(scores);
            mbar_wait(memory.full(ring.slot), ring.parity);  // of the next products; keeps what is above before what is below
            products_wait<0>();
            settle(state.values);
            release(values);
            rescale(factor);
            pack(scores, chances);
        }
        if (is_last && laneid() == 0) mbar_arrive(memory.query_empty(group));
        const u32 values = ring.slot;
        ring.advance();
        __syncwarp();
        settle(state.values);
        products_begin();
        queue_values(chances, values);
        products_wait<0>();
        settle(state.values);
        release(values);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 1);
            state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 2);
        }
    }

    __device__ __forceinline__ void run() {
        const int start = *reinterpret_cast<const int*>(params.place_ptr);
        const u32 thread = threadIdx.x % kGroupThreads, warp_row = thread / 32 * 16;
        const u32 totals = memory.base + kTotalsFrom + group * kTotalBytes + 16 * thread;
        u32 query_parity = 0;
        if (in_turn && group == 1) group_arrive(1, 2 * kGroupThreads);  // the other one begins
        for (u32 pass = 0; pass * gridDim.x < params.num_items; ++pass) {
            const u32 index = item_index(pass);
            if (index >= params.num_items) continue;
            const Item item(params, index, start);
            if (item.first >= item.end) continue;
            const int origin = start + item.first_row(params, group);
            const int lowest = origin + warp_row / kPack, highest = origin + (warp_row + 15) / kPack;
            const int position[2] = {static_cast<int>(origin + (warp_row + laneid() / 4) / kPack),
                                     static_cast<int>(origin + (warp_row + laneid() / 4 + 8) / kPack)};
            mbar_wait(memory.query_full(group), query_parity);
            query_parity ^= 1;
            __syncwarp();
            float top[2], sum[2];
            for (int from = item.first; from < item.end;) {
                const int until = item.run_end(params, from);
                attend(from, until, position, lowest, highest, until == item.end);
                if (from == item.first) {
                    top[0] = state.top[0], top[1] = state.top[1], sum[0] = state.sum[0], sum[1] = state.sum[1];
                } else {
                    float factor[4];
                    merge(top, sum, factor, state.top, state.sum);
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) {
                        const float4 total = load_shared_float4(totals + i * 16 * kGroupThreads);
                        float* values = &state.values[4 * i];
                        values[0] = merged(total.x, values[0], factor, 0), values[1] = merged(total.y, values[1], factor, 0);
                        values[2] = merged(total.z, values[2], factor, 1), values[3] = merged(total.w, values[3], factor, 1);
                    }
                }
                if (until < item.end) {
#pragma unroll
                    for (int i = 0; i < kValues / 4; ++i) store_shared_float4(totals + i * 16 * kGroupThreads, state.part(i));
                }
                from = until;
            }
            state.sum[0] = sum[0], state.sum[1] = sum[1];
            if (params.num_chunks == 0) {
                store_rows(params, item, group, state);
                continue;
            }
            const Parts parts(params, index, group);
            parts.sums[0] = make_float4(top[0], top[1], sum[0], sum[1]);
#pragma unroll
            for (int i = 0; i < kValues / 4; ++i)
                parts.values[i * kGroupThreads] = state.part(i);
        }
    }
};

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

// The chunks of a group's rows, a thread block for each group, in the order in which one thread block would have merged them.
__global__ void __launch_bounds__(kGroupThreads) combine(const __grid_constant__ AttentionLaunch launch) {
    const KogAttentionParams& params = launch.params;
    const u32 group = blockIdx.x % params.num_groups, rows = blockIdx.x / params.num_groups;
    const u32 num_rows = params.num_tiles * kPackedHeads;  // items, but for chunks
    Item item(params, rows, *reinterpret_cast<const int*>(params.place_ptr));
    item.see(params, *reinterpret_cast<const int*>(params.place_ptr));
    float top[2] = {-INFINITY, -INFINITY};
    State total{};
    for (int chunk = item.first / kChunkTiles; chunk * kChunkTiles < item.end; ++chunk) {
        const Parts parts(params, chunk * num_rows + rows, group);
        const float4 sums = parts.sums[0];
        const float chunk_top[2] = {sums.x, sums.y}, chunk_sum[2] = {sums.z, sums.w};
        float factor[4];
        merge(top, total.sum, factor, chunk_top, chunk_sum);
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
