// Enough of workers/prefill/hopper.cuh to run attention.cu and gate_up.cu on a CPU: shared memory is an array for each thread block of a
// cluster, and barriers count. Tensor copies are done when they are queued, as early as can be; products when they are waited for, as late as
// can be: a slot that is given back too early shows. Where a copy swizzles and what a descriptor means is written down here once more, after
// PTX's manual.
#pragma once
#include <map>
#include "ptx.cuh"

using std::max;
using std::min;

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int offset) {
    float as_float;
    std::memcpy(&as_float, &value, 4);
    as_float = __shfl_xor_sync(mask, as_float, offset);
    std::memcpy(&value, &as_float, 4);
    return value;
}
inline unsigned __shfl_sync(unsigned, unsigned value, int) { return value; }  // one that is the same in the whole warp
inline bool __any_sync(unsigned mask, bool mine) {
    unsigned any = mine;
    for (int offset = 16; offset > 0; offset >>= 1) any |= __shfl_xor_sync(mask, any, offset);
    return any != 0;
}

namespace kog {

constexpr u32 kMostRanks = 2, kRankBytes = 256 << 10;  // of a cluster; of shared memory
alignas(1024) inline unsigned char memory[kMostRanks][kRankBytes];
inline u32 shared_memory() { return 512; }  // not aligned
inline unsigned char* own(u32 address) { return memory[my_rank] + address; }
inline float4 load_shared_float4(u32 address) { return *reinterpret_cast<const float4*>(own(address)); }
inline u32 load_shared_u32(u32 address) { return *reinterpret_cast<const u32*>(own(address)); }
inline void store_shared_float4(u32 address, const float4& v) { *reinterpret_cast<float4*>(own(address)) = v; }
inline void store_global(void* p, const uint4& v) { *reinterpret_cast<uint4*>(p) = v; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float high_half(u32 packed) { return Fp16::high(packed); }

// ---- clusters ----
inline u32 cluster_rank() { return my_rank; }
inline u32 cluster_address(u32 address, u32 rank) { return rank * kRankBytes + address; }
inline void cluster_sync() { cluster_barrier.arrive_and_wait(); }

// ---- barriers: of memory, and of a number of threads ----
struct Bar {
    u32 count = 0, missing = 0, parity = 0;
    int bytes = 0;
};
inline std::map<u32, Bar> bars;  // by their address in the cluster
inline void update(u32 at, u32 arrivals, int bytes) {
    Bar& bar = bars[at];
    if (bar.missing < arrivals) fail("too many arrivals");
    bar.missing -= arrivals, bar.bytes += bytes;
    if (bar.missing || bar.bytes) return;
    bar.missing = bar.count, bar.parity ^= 1;
}
inline void mbar_init(u32 at, u32 count) { bars[cluster_address(at, my_rank)] = {count, count}; }
inline void mbar_arrive_cluster(u32 at) { update(at, 1, 0); }
inline void mbar_arrive(u32 at) { update(cluster_address(at, my_rank), 1, 0); }
inline void mbar_arrive_expect(u32 at, u32 bytes) { update(cluster_address(at, my_rank), 1, static_cast<int>(bytes)); }
constexpr u32 kGroupBars = kRankBytes - 256;
inline Bar& group_bar(u32 barrier) { return bars[cluster_address(kGroupBars + barrier, my_rank)]; }
inline void fence_barrier_init() {  // a thread block begins: nobody waits
    for (u32 barrier = 0; barrier < 16; ++barrier) group_bar(barrier) = {};
}
inline void mbar_wait(u32 at, u32 parity) {
    const Bar& bar = bars[cluster_address(at, my_rank)];
    wait_until([&] { return bar.parity != parity; });
}
inline void group_arrive(u32 barrier, u32 num_threads) {
    Bar& bar = group_bar(barrier);
    if (++bar.count == num_threads) bar.count = 0, ++bar.parity;
}
inline void group_sync(u32 barrier, u32 num_threads) {
    const Bar& bar = group_bar(barrier);
    const u32 before = bar.parity;
    group_arrive(barrier, num_threads);
    wait_until([&] { return bar.parity != before; });
}
template <int>
void raise_registers() {}
template <int>
void drop_registers() {}

// ---- tensor copies: a map has the address, five sizes, four strides in bytes, and five sizes of a box ----
struct alignas(64) TensorMap {
    u64 words[16];
};
inline u32 swizzled(u32 address, u32 bytes) { return address ^ (address >> 7 & (bytes / 16 - 1)) << 4; }  // rows of so many bytes
inline void tensor_load_many(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar, u16 mask) {
    const u64 *sizes = map->words + 1, *strides = map->words + 6, *box = map->words + 10;
    const int first[5] = {x, y, z, w, v};
    const u32 count = static_cast<u32>(box[0] * box[1] * box[2] * box[3] * box[4]);
    if (to % (16 * box[0])) fail("a box that is not aligned");
    for (u32 i = 0; i < count; ++i) {
        u64 rest = i, from = map->words[0];
        bool inside = true;
        for (int d = 0; d < 5; ++d) {
            const u64 at = first[d] + rest % box[d];
            rest /= box[d];
            inside = inside && at < sizes[d];
            from += at * (d ? strides[d - 1] : 2);
        }
        u16 value = 0;
        if (inside) std::memcpy(&value, reinterpret_cast<const void*>(from), 2);
        for (u32 rank = 0; rank < kMostRanks; ++rank)
            if (mask >> rank & 1) std::memcpy(memory[rank] + swizzled(to + 2 * i, static_cast<u32>(2 * box[0])), &value, 2);
    }
    for (u32 rank = 0; rank < kMostRanks; ++rank)
        if (mask >> rank & 1) update(cluster_address(bar, rank), 0, -2 * static_cast<int>(count));
}
inline void tensor_load_many(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 bar, u16 mask) {
    tensor_load_many(to, map, x, y, z, w, 0, bar, mask);
}
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar) {
    tensor_load_many(to, map, x, y, z, w, v, bar, static_cast<u16>(1u << my_rank));
}
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 bar) { tensor_load(to, map, x, y, z, w, 0, bar); }
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, u32 bar) { tensor_load(to, map, x, y, z, 0, 0, bar); }

// ---- products ----
inline void products_begin() {}
inline void products_commit() { running->committed.push_back(std::move(running->queued)), running->queued.clear(); }
template <int kPending>
void products_wait() {  // for those of the whole warp
    auto& committed = running->committed;
    for (; committed.size() > kPending; committed.pop_front())
        for (const auto& multiply : committed.front()) multiply();
    __syncwarp();
}
template <int kCount>
void settle(float (&)[kCount]) {}
struct Operand {
    u32 start, leading, stride, row_bytes;

    explicit Operand(u64 descriptor)
        : start(static_cast<u32>(descriptor & 0x3fff) << 4), leading(static_cast<u32>(descriptor >> 16 & 0x3fff) << 4),
          stride(static_cast<u32>(descriptor >> 32 & 0x3fff) << 4), row_bytes(256u >> (descriptor >> 62)) {}
    float at(u32 address) const {
        u16 value;
        std::memcpy(&value, own(swizzled(address, row_bytes)), 2);
        return Fp16::low(value);
    }
    float of_row(u32 row, u32 k) const { return at(start + row / 8 * stride + row % 8 * row_bytes + 2 * k); }
    float of_column(u32 column, u32 k) const {
        const u32 panel = row_bytes / 2;
        return at(start + column / panel * leading + column % panel * 2 + k / 8 * stride + k % 8 * row_bytes);
    }
};
inline u32 row_of(int i) { return threadIdx.x % 128 / 32 * 16 + laneid() / 4 + (i & 2 ? 8 : 0); }
inline u32 column_of(int i) { return i / 4 * 8 + laneid() % 4 * 2 + i % 2; }
template <int kCount>
void multiply_rows(float (&d)[kCount], u64 a, u64 b, bool adds) {
    running->queued.push_back([d = static_cast<float*>(d), x = Operand(a), matrix = Operand(b), adds] {
        float rows[2][16];
        for (u32 k = 0; k < 16; ++k) rows[0][k] = x.of_row(row_of(0), k), rows[1][k] = x.of_row(row_of(2), k);
        for (int i = 0; i < kCount; ++i) {
            float sum = adds ? d[i] : 0;
            for (u32 k = 0; k < 16; ++k) sum += rows[i >> 1 & 1][k] * matrix.of_row(column_of(i), k);
            d[i] = sum;
        }
    });
}
inline u32 fragments[kMostRanks][512][4];
struct Rows {  // two of an operand, of whose values each thread of a warp has some in registers
    float values[2][16];
};
inline Rows rows_in_registers(u32 a0, u32 a1, u32 a2, u32 a3) {
    const u32 mine[4] = {a0, a1, a2, a3};
    std::memcpy(fragments[my_rank][threadIdx.x], mine, sizeof(mine));
    __syncwarp();
    Rows rows;
    for (u32 k = 0; k < 16; ++k) {
        for (u32 r = 0; r < 2; ++r) {
            const u32 pair = fragments[my_rank][threadIdx.x / 4 * 4 + k % 8 / 2][r + (k & 8 ? 2 : 0)];
            rows.values[r][k] = k & 1 ? Fp16::high(pair) : Fp16::low(pair);
        }
    }
    __syncwarp();
    return rows;
}
template <int kCount>
void multiply_rows(float (&d)[kCount], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool adds) {
    running->queued.push_back([d = static_cast<float*>(d), rows = rows_in_registers(a0, a1, a2, a3), matrix = Operand(b), adds] {
        for (int i = 0; i < kCount; ++i) {
            float sum = adds ? d[i] : 0;
            for (u32 k = 0; k < 16; ++k) sum += rows.values[i >> 1 & 1][k] * matrix.of_row(column_of(i), k);
            d[i] = sum;
        }
    });
}
template <int kCount>
void multiply_columns(float (&d)[kCount], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    running->queued.push_back([d = static_cast<float*>(d), rows = rows_in_registers(a0, a1, a2, a3), matrix = Operand(b)] {
        for (int i = 0; i < kCount; ++i)
            for (u32 k = 0; k < 16; ++k) d[i] += rows.values[i >> 1 & 1][k] * matrix.of_column(column_of(i), k);
    });
}

}  // namespace kog
