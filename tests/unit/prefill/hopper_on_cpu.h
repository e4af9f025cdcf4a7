// Enough of workers/prefill/hopper.cuh to run attention.cu on a CPU: shared memory is an array, tensor copies and products are done at
// once, and barriers count. Where it swizzles and what a descriptor means is written down here once more, after PTX's manual.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include "ptx.cuh"

using std::max;
using std::min;

inline void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int offset) {
    float as_float;
    std::memcpy(&as_float, &value, 4);
    as_float = __shfl_xor_sync(mask, as_float, offset);
    std::memcpy(&value, &as_float, 4);
    return value;
}
inline bool __any_sync(unsigned mask, bool mine) {
    unsigned any = mine;
    for (int offset = 16; offset > 0; offset >>= 1) any |= __shfl_xor_sync(mask, any, offset);
    return any != 0;
}

namespace kog {

alignas(1024) inline unsigned char memory[256 << 10];
inline u32 shared_memory() { return 0; }
inline float4 load_shared_float4(u32 address) { return *reinterpret_cast<const float4*>(memory + address); }
inline void store_shared_float4(u32 address, const float4& v) { *reinterpret_cast<float4*>(memory + address) = v; }
inline float exp2_approx(float x) { return std::exp2(x); }

// ---- barriers: of memory, and of a number of threads ----
struct Bar {
    u32 count = 0, missing = 0, parity = 0;
    int bytes = 0;
};
inline std::mutex mutex;
inline std::condition_variable changed;
inline std::map<u32, Bar> bars;
inline void update(u32 at, u32 arrivals, int bytes) {
    const std::lock_guard lock(mutex);
    Bar& bar = bars[at];
    bar.missing -= arrivals, bar.bytes += bytes;
    if (bar.missing || bar.bytes) return;
    bar.missing = bar.count, bar.parity ^= 1;
    changed.notify_all();
}
inline void mbar_init(u32 at, u32 count) { bars[at] = {count, count}; }
inline void mbar_arrive(u32 at) { update(at, 1, 0); }
inline void mbar_arrive_expect(u32 at, u32 bytes) { update(at, 1, static_cast<int>(bytes)); }
constexpr u32 kGroupBars = 0xffffff00u;
inline void fence_barrier_init() {  // a thread block begins: nobody waits
    bars.erase(bars.lower_bound(kGroupBars), bars.end());
}
template <class Condition>
void wait_for(std::unique_lock<std::mutex>& lock, Condition condition) {
    if (changed.wait_for(lock, std::chrono::seconds(60), condition)) return;
    std::fprintf(stderr, "thread %u waits in vain\n", threadIdx.x);
    std::abort();
}
inline void mbar_wait(u32 at, u32 parity) {
    std::unique_lock lock(mutex);
    wait_for(lock, [&] { return bars[at].parity != parity; });
}
inline void group_arrive(u32 barrier, u32 num_threads) {
    const std::lock_guard lock(mutex);
    Bar& bar = bars[kGroupBars + barrier];
    if (++bar.count == num_threads) bar.count = 0, ++bar.parity, changed.notify_all();
}
inline void group_sync(u32 barrier, u32 num_threads) {
    std::unique_lock lock(mutex);
    Bar& bar = bars[kGroupBars + barrier];
    const u32 before = bar.parity;
    if (++bar.count == num_threads) bar.count = 0, ++bar.parity, changed.notify_all();
    wait_for(lock, [&] { return bar.parity != before; });
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
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar) {
    const u64 *sizes = map->words + 1, *strides = map->words + 6, *box = map->words + 10;
    const int first[5] = {x, y, z, w, v};
    const u32 count = static_cast<u32>(box[0] * box[1] * box[2] * box[3] * box[4]);
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
        std::memcpy(memory + swizzled(to + 2 * i, static_cast<u32>(2 * box[0])), &value, 2);
    }
    update(bar, 0, -2 * static_cast<int>(count));
}
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 bar) { tensor_load(to, map, x, y, z, w, 0, bar); }

// ---- products ----
inline void products_begin() {}
inline void products_commit() {}
template <int>
void products_wait() {  // for those of the whole warp
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
        std::memcpy(&value, memory + swizzled(address, row_bytes), 2);
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
    const Operand x(a), matrix(b);
    for (int i = 0; i < kCount; ++i) {
        float sum = adds ? d[i] : 0;
        for (u32 k = 0; k < 16; ++k) sum += x.of_row(row_of(i), k) * matrix.of_row(column_of(i), k);
        d[i] = sum;
    }
}
inline u32 fragments[512][4];
template <int kCount>
void multiply_columns(float (&d)[kCount], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    const u32 mine[4] = {a0, a1, a2, a3};
    std::memcpy(fragments[threadIdx.x], mine, sizeof(mine));
    __syncwarp();
    const Operand matrix(b);
    for (int i = 0; i < kCount; ++i) {
        for (u32 k = 0; k < 16; ++k) {
            const u32 pair = fragments[threadIdx.x / 4 * 4 + k % 8 / 2][(i & 2 ? 1 : 0) + (k & 8 ? 2 : 0)];
            d[i] += (k & 1 ? Fp16::high(pair) : Fp16::low(pair)) * matrix.of_column(column_of(i), k);
        }
    }
    __syncwarp();
}

}  // namespace kog
