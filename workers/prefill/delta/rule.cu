// The gated delta rule of a chunk of tokens in blocks of kBlock; `workers/prefill/delta/plain.py` has the equations, by these names.
//
// `solve_blocks` makes of each block and value head what does not depend on the state: the inverse T of its triangular system, and P, what of a token's
// change the tokens behind it see. `advance_states` goes through the blocks, one after the other: a warp has kWarpColumns columns of a head's state, the
// keys of each, in registers as float32 sums of products. All products are those of the transposed matrices, so that what one gives is, in the
// same registers, an operand of the next: S^T K^T and S^T Q^T; (T rhs)^T; (P u)^T; u^T K. Warps of a thread block share what they multiply with,
// which is copied to shared memory while the block before is computed.
//
// Operands are binary16. S, what T and P are multiplied with, T and P are sums of two values: what rounding leaves of the first is the second.
// Queries and keys are one value. A column's bits depend neither on the others nor on how many blocks a chunk has.
#include "rule_shape.cuh"
#include "delta_rows.cuh"
#include "fragments.cuh"

namespace kog {

constexpr u32 kWarpColumns = 16, kThreads = kRuleWarps * 32, kSolveThreads = 128;
constexpr u32 kKeyStride = kKeyDim + kPadding, kBlockStride = kBlock + kPadding, kColumns = kRuleWarps * kWarpColumns;
constexpr u32 kValueStride = kColumns + kPadding, kSystemStride = kBlock + 4;
constexpr int kTiles = kBlock / 8, kSteps = kBlock / 16, kKeyTiles = kKeyDim / 8, kKeySteps = kKeyDim / 16;
constexpr u32 kGroups = kValueDim / kColumns;  // thread blocks of a value head
static_assert(kBlock == 64, "four warps have the rows of a block");

// A block's rows, by all threads of the thread block.
template <u32 kRowHalves, u32 kStride>
__device__ __forceinline__ void copy_rows(u16* to, const u16* from, u64 from_stride) {
    constexpr u32 kEights = kRowHalves / 8;
    for (u32 i = threadIdx.x; i < kBlock * kEights; i += blockDim.x)
        copy_eight(to + i / kEights * kStride + i % kEights * 8, from + i / kEights * from_stride + i % kEights * 8);
}

__device__ __forceinline__ const u16* halves(u64 ptr) { return reinterpret_cast<const u16*>(ptr); }

// An operand of 16 rows and 16 columns, of two neighbouring tiles of sums: rounded, and what that leaves.
struct TwoValues {
    u32 high[4], low[4];

    __device__ __forceinline__ TwoValues(const float (&first)[4], const float (&second)[4]) {
        const float v[8] = {first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = Fp16::pack(v[2 * i], v[2 * i + 1]);
            low[i] = Fp16::pack(v[2 * i] - Fp16::low(high[i]), v[2 * i + 1] - Fp16::high(high[i]));
        }
    }
    // One of both values with the operands of two tiles. A product waits for the one before it that has the same sums: so products of several
    // tiles come between them.
    static __device__ __forceinline__ void multiply(const u32 (&a)[4], float (&first)[4], float (&second)[4], const u32 (&b)[4]) {
        Fp16::mma(first, a[0], a[1], a[2], a[3], b[0], b[1]);
        Fp16::mma(second, a[0], a[1], a[2], a[3], b[2], b[3]);
    }
};

// ---- solve_blocks: a thread block has a block of a value head ----
struct Solved {
    u16 *keys, *queries;
    float *system, *logs, *beta;

    __device__ __forceinline__ explicit Solved(unsigned char* memory) {
        keys = reinterpret_cast<u16*>(memory), queries = keys + kBlock * kKeyStride;
        system = reinterpret_cast<float*>(queries + kBlock * kKeyStride), logs = system + kBlock * kSystemStride, beta = logs + kBlock;
    }
    // Products of 16 rows with all keys: with keys, of the system without its diagonal; with queries, P.
    __device__ __forceinline__ void multiply(u32 warp, u16* seen, u64 plane) const {
        const u32 group = laneid() / 4, part = laneid() % 4 * 2, first = warp * 16;
#pragma unroll 1
        for (u32 tile = 0; tile <= 2 * warp; tile += 2) {
            float of_keys[2][4] = {}, of_queries[2][4] = {};
#pragma unroll
            for (int k = 0; k < kKeySteps; ++k) {
                u32 b[4], key[4], query[4];
                load_rows(b, keys + tile * 8 * kKeyStride + k * 16, kKeyStride);
                load_operand(key, keys + first * kKeyStride + k * 16, kKeyStride);
                load_operand(query, queries + first * kKeyStride + k * 16, kKeyStride);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    Fp16::mma(of_keys[n], key[0], key[1], key[2], key[3], b[2 * n], b[2 * n + 1]);
                    Fp16::mma(of_queries[n], query[0], query[1], query[2], query[3], b[2 * n], b[2 * n + 1]);
                }
            }
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                const u32 r = n % 2, i = first + group + 8 * r, j = (tile + n / 2) * 8 + part;
                float v[2];
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
                    const float decay = __expf(logs[i] - logs[j + e]);
                    v[e] = j + e <= i ? of_queries[n / 2][2 * r + e] * decay : 0.0f;
                    system[i * kSystemStride + j + e] = j + e < i ? of_keys[n / 2][2 * r + e] * decay * beta[i] : 0.0f;
                }
                store_pair(seen + i * kBlock + j, plane, v[0], v[1]);
            }
        }
#pragma unroll 1
        for (u32 tile = 2 * warp + 2; tile < kTiles; ++tile)  // what no row sees
#pragma unroll
            for (u32 r = 0; r < 2; ++r) store_pair(seen + (first + group + 8 * r) * kBlock + tile * 8 + part, plane, 0, 0);
    }
    static __device__ __forceinline__ void store_pair(u16* to, u64 plane, float low, float high) {
        const u32 kept = Fp16::pack(low, high);
        *reinterpret_cast<u32*>(to) = kept;
        *reinterpret_cast<u32*>(to + plane) = Fp16::pack(low - Fp16::low(kept), high - Fp16::high(kept));
    }
    // Column `column` of the inverse, by a thread.
    __device__ __forceinline__ void substitute(u32 column, u16* solved, u64 plane) const {
        float inverse[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const float* row = system + i * kSystemStride;
            float sums[4] = {};
#pragma unroll
            for (int m = 0; m < i; ++m) sums[m % 4] += row[m] * inverse[m];
            const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            inverse[i] = (i == static_cast<int>(column) ? 1.0f : 0.0f) - sum;
            const u32 kept = Fp16::pack(inverse[i], 0);
            solved[i * kBlock + column] = static_cast<u16>(kept);
            solved[plane + i * kBlock + column] = static_cast<u16>(Fp16::pack(inverse[i] - Fp16::low(kept), 0));
        }
    }
};

__device__ __forceinline__ void solve_block(const DeltaParams& params) {
    const u32 head = blockIdx.x % (kLanes * kHeads), block = blockIdx.x / (kLanes * kHeads), blocks = num_blocks(params);
    const u32 key_head = head / kHeads * kKeyHeads + head % kHeads / kSharers;
    const Solved shared(at_shared(shared_memory()));
    constexpr u32 kRowHalves = kLanes * kKeys;
    const u64 first_key = static_cast<u64>(block) * kBlock * kRowHalves + key_head * kKeyDim;
    copy_rows<kKeyDim, kKeyStride>(shared.keys, halves(params.key_ptr) + first_key, kRowHalves);
    copy_rows<kKeyDim, kKeyStride>(shared.queries, halves(params.query_ptr) + first_key, kRowHalves);
    copies_commit();
    float* logs = reinterpret_cast<float*>(params.logs_ptr) + (static_cast<u64>(head) * blocks + block) * kBlock;
    const float* beta = reinterpret_cast<const float*>(params.beta_ptr) + (static_cast<u64>(head) * blocks + block) * kBlock;
    if (threadIdx.x < kBlock) shared.logs[threadIdx.x] = logs[threadIdx.x], shared.beta[threadIdx.x] = beta[threadIdx.x];
    __syncthreads();
    float sum = 0;
    if (threadIdx.x < kBlock)
        for (u32 i = 0; i <= threadIdx.x; ++i) sum += shared.logs[i];
    __syncthreads();
    if (threadIdx.x < kBlock) shared.logs[threadIdx.x] = logs[threadIdx.x] = sum;
    copies_wait<0>();
    __syncthreads();
    const u64 plane = static_cast<u64>(kLanes * kHeads) * blocks * (kBlock * kBlock), at = (static_cast<u64>(head) * blocks + block) * (kBlock * kBlock);
    shared.multiply(threadIdx.x / 32, reinterpret_cast<u16*>(params.seen_ptr) + at, plane);
    __syncthreads();
    if (threadIdx.x < kBlock) shared.substitute(threadIdx.x, reinterpret_cast<u16*>(params.solved_ptr) + at, plane);
}

// ---- advance_states: a thread block has some columns of a value head ----
struct Stage {  // of a block, in shared memory
    static constexpr u32 kKeysAt = 0, kQueriesAt = kKeysAt + kBlock * kKeyStride, kSolvedAt = kQueriesAt + kBlock * kKeyStride;
    static constexpr u32 kSeenAt = kSolvedAt + 2 * kBlock * kBlockStride, kValuesAt = kSeenAt + 2 * kBlock * kBlockStride;
    static constexpr u32 kFactorsAt = kValuesAt + kBlock * kValueStride, kHalves = kFactorsAt + 2 * kBlock * 2;
    static constexpr u32 kPlane = kBlock * kBlockStride;

    u16* base;

    __device__ __forceinline__ const u16* keys() const { return base + kKeysAt; }
    __device__ __forceinline__ const u16* queries() const { return base + kQueriesAt; }
    __device__ __forceinline__ const u16* solved() const { return base + kSolvedAt; }
    __device__ __forceinline__ const u16* seen() const { return base + kSeenAt; }
    __device__ __forceinline__ const u16* values() const { return base + kValuesAt; }
    __device__ __forceinline__ const float* logs() const { return reinterpret_cast<const float*>(base + kFactorsAt); }
    __device__ __forceinline__ const float* beta() const { return logs() + kBlock; }

    // Queue the copies of a block.
    __device__ __forceinline__ void load(const DeltaParams& params, u32 head, u32 columns, u32 block) const {
        const u32 blocks = num_blocks(params), key_head = head / kHeads * kKeyHeads + head % kHeads / kSharers;
        constexpr u32 kKeyRow = kLanes * kKeys, kValueRow = kLanes * kValues;
        const u64 first_row = static_cast<u64>(block) * kBlock, at = static_cast<u64>(head) * blocks + block;
        const u64 plane = static_cast<u64>(kLanes * kHeads) * blocks * (kBlock * kBlock);
        copy_rows<kKeyDim, kKeyStride>(base + kKeysAt, halves(params.key_ptr) + first_row * kKeyRow + key_head * kKeyDim, kKeyRow);
        copy_rows<kKeyDim, kKeyStride>(base + kQueriesAt, halves(params.query_ptr) + first_row * kKeyRow + key_head * kKeyDim, kKeyRow);
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            copy_rows<kBlock, kBlockStride>(base + kSolvedAt + i * kPlane, halves(params.solved_ptr) + i * plane + at * (kBlock * kBlock), kBlock);
            copy_rows<kBlock, kBlockStride>(base + kSeenAt + i * kPlane, halves(params.seen_ptr) + i * plane + at * (kBlock * kBlock), kBlock);
        }
        copy_rows<kColumns, kValueStride>(base + kValuesAt, halves(params.value_ptr) + first_row * kValueRow + head * kValueDim + columns, kValueRow);
        for (u32 i = threadIdx.x; i < 2 * kBlock / 4; i += blockDim.x) {  // of 16 bytes
            const u32 of_logs = i < kBlock / 4;
            const u64 from = (of_logs ? params.logs_ptr : params.beta_ptr) + (at * kBlock + i % (kBlock / 4) * 4) * 4;
            copy_eight(base + kFactorsAt + i * 8, halves(from));
        }
    }
};

// Some columns of a state, by a warp: tiles of 8 keys; a thread has two neighbouring keys of column `group`, and of the one 8 further on.
struct WarpState {
    const DeltaParams& params;
    u32 head, column;  // of all lanes; the warp's first one, within the head
    float state[kKeyTiles][4];

    __device__ __forceinline__ u32 group() const { return laneid() / 4; }
    __device__ __forceinline__ u32 part() const { return laneid() % 4 * 2; }
    // From an item's first value to those of a thread in tile `tile`; `r`: the second column.
    __device__ __forceinline__ u64 place(u32 tile, u32 r) const {
        const u32 own = column + group() + 8 * r, of_slice = own % kSliceColumns;
        return item_at(params, head, own / kSliceColumns) + (of_slice / 4 * kKeyDim + tile * 8 + part()) * 4 + of_slice % 4;
    }
    __device__ __forceinline__ void load() {
        const float* from = own_states(params);
        const bool is_there = start_of(params) > 0;
#pragma unroll
        for (u32 tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) state[tile][i] = is_there ? from[place(tile, i / 2) + i % 2 * 4] : 0.0f;
    }
    __device__ __forceinline__ void store() const {
        float* to = reinterpret_cast<float*>(params.made_ptr);
        bool finite = true;
#pragma unroll
        for (u32 tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) to[place(tile, i / 2) + i % 2 * 4] = state[tile][i], finite = finite && is_finite(state[tile][i]);
        if (!finite) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
    }
    // sums += the transposed operand, of which `other` is in tokens, times the transposed triangle: what tokens up to each give.
    static __device__ __forceinline__ void multiply_triangle(float (&sums)[kTiles][4], const float (&other)[kTiles][4], const u16* triangle) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const TwoValues a(other[2 * k], other[2 * k + 1]);
            u32 b[kTiles / 2][4];
#pragma unroll
            for (int tile = 2 * k; tile < kTiles; tile += 2) {  // what is left out is 0
                load_rows(b[tile / 2], triangle + tile * 8 * kBlockStride + k * 16, kBlockStride);
                TwoValues::multiply(a.high, sums[tile], sums[tile + 1], b[tile / 2]);
            }
#pragma unroll
            for (int tile = 2 * k; tile < kTiles; tile += 2) TwoValues::multiply(a.low, sums[tile], sums[tile + 1], b[tile / 2]);
#pragma unroll
            for (int tile = 2 * k; tile < kTiles; tile += 2) {
                load_rows(b[tile / 2], triangle + Stage::kPlane + tile * 8 * kBlockStride + k * 16, kBlockStride);
                TwoValues::multiply(a.high, sums[tile], sums[tile + 1], b[tile / 2]);
            }
        }
    }
    __device__ __forceinline__ void run(const Stage& stage, u32 block) {
        const u16 *keys = stage.keys(), *queries = stage.queries();
        const float *logs = stage.logs(), *beta = stage.beta();
        float kept[kTiles][4] = {}, out[kTiles][4] = {};  // (S^T k, S^T q) of each token
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
            const TwoValues a(state[2 * k], state[2 * k + 1]);
#pragma unroll
            for (int tile = 0; tile < kTiles; tile += 2) {
                u32 key[4], query[4];
                load_rows(key, keys + tile * 8 * kKeyStride + k * 16, kKeyStride);
                load_rows(query, queries + tile * 8 * kKeyStride + k * 16, kKeyStride);
                TwoValues::multiply(a.high, kept[tile], kept[tile + 1], key);
                TwoValues::multiply(a.high, out[tile], out[tile + 1], query);
                TwoValues::multiply(a.low, kept[tile], kept[tile + 1], key);
                TwoValues::multiply(a.low, out[tile], out[tile + 1], query);
            }
        }
        const u32 first_column = column % kColumns;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const u16* row = stage.values() + (tile * 8 + group()) * kValueStride + first_column + part();
            const u32 values[2] = {transposed(pair_at(row)), transposed(pair_at(row + 8))};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 token = tile * 8 + part() + e;
                const float decay = __expf(logs[token]), own_beta = beta[token];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float value = e ? Fp16::high(values[r]) : Fp16::low(values[r]);
                    kept[tile][2 * r + e] = own_beta * (value - decay * kept[tile][2 * r + e]);
                    out[tile][2 * r + e] *= decay;
                }
            }
        }
        float change[kTiles][4] = {};
        multiply_triangle(change, kept, stage.solved());
        multiply_triangle(out, change, stage.seen());
        store_out(out, block);
        const float last = logs[kBlock - 1], decay = __expf(last);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) change[tile][i] *= __expf(last - logs[tile * 8 + part() + i % 2]);
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) state[tile][i] *= decay;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const TwoValues a(change[2 * k], change[2 * k + 1]);
#pragma unroll
            for (int tile = 0; tile < kKeyTiles; tile += 4) {
                u32 b[2][4];
#pragma unroll
                for (int n = 0; n < 4 && tile + n < kKeyTiles; n += 2) {
                    load_columns(b[n / 2], keys + k * 16 * kKeyStride + (tile + n) * 8, kKeyStride);
                    TwoValues::multiply(a.high, state[tile + n], state[tile + n + 1], b[n / 2]);
                }
#pragma unroll
                for (int n = 0; n < 4 && tile + n < kKeyTiles; n += 2) TwoValues::multiply(a.low, state[tile + n], state[tile + n + 1], b[n / 2]);
            }
        }
    }
    // In the place of the block's values.
    __device__ __forceinline__ void store_out(const float (&out)[kTiles][4], u32 block) const {
        const u32 lane = head / kHeads, channel = 2 * kKeys + head % kHeads * kValueDim + column + group();
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const u32 row = block * kBlock + tile * 8 + part() + e;
                if (row >= params.size) continue;
                float* to = projected_at(params, row, lane) + channel;
                to[0] = out[tile][e], to[8] = out[tile][2 + e];
            }
    }
};

__device__ __forceinline__ void advance_columns(const DeltaParams& params) {
    const u32 head = blockIdx.x / kGroups, columns = blockIdx.x % kGroups * kColumns, blocks = num_blocks(params);
    u16* memory = reinterpret_cast<u16*>(at_shared(shared_memory()));
    const Stage stages[2] = {{memory}, {memory + Stage::kHalves}};
    stages[0].load(params, head, columns, 0);
    copies_commit();
    WarpState mine{params, head, columns + threadIdx.x / 32 * kWarpColumns, {}};
    mine.load();
#pragma unroll 1
    for (u32 block = 0; block < blocks; ++block) {
        if (block + 1 < blocks) stages[(block + 1) % 2].load(params, head, columns, block + 1);
        copies_commit();
        copies_wait<1>();  // all but the last
        __syncthreads();
        mine.run(stages[block % 2], block);
        __syncthreads();
    }
    mine.store();
}

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __launch_bounds__(kSolveThreads) solve_blocks(const __grid_constant__ DeltaParams params) { solve_block(params); }
__global__ void __launch_bounds__(kThreads) advance_states(const __grid_constant__ DeltaParams params) { advance_columns(params); }

}  // extern "C"
