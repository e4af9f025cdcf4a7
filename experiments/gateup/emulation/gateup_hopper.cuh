// gateup.cu on a CPU: a cluster's thread blocks run at once, clusters one after the other. Tensor copies are done when they are queued, as
// early as can be; products when they are waited for, as late as can be, so a slot that is given back too early shows.
#pragma once
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
struct Index { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline thread_local Index threadIdx, blockIdx, gridDim;
inline thread_local unsigned my_rank;
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned __shfl_sync(unsigned, unsigned value, int) { return value; }
template <class T> T __ldg(const T* from) { return *from; }

namespace kog {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr u32 kMost = 4, kThreads = 384;
inline u32 num_ranks = 1;
inline unsigned char memory[kMost][256 << 10];
inline std::unique_ptr<std::barrier<>> block_barriers[kMost], cluster_barrier;
inline u32 laneid() { return threadIdx.x & 31; }
inline u32 shared_memory() { return 512; }  // not aligned
inline u32 cluster_rank() { return my_rank; }
inline u32 rank_of(u32 address) { return address >> 24 ? (address >> 24) - 1 : my_rank; }
inline u32 offset_of(u32 address) { return address & 0xffffff; }
inline u32 cluster_address(u32 address, u32 rank) { return offset_of(address) | (rank + 1) << 24; }
inline u64 clock64_cycles() { return 0; }
inline u64 globaltimer_ns() { return 0; }
inline void cluster_sync() { cluster_barrier->arrive_and_wait(); }
inline void fence_barrier_init() {}
template <int> void raise_registers() {}
template <int> void drop_registers() {}
inline std::mutex mutex;
inline std::condition_variable changed;
struct Bar { u32 count, missing, parity; long bytes; };
inline Bar bars[kMost][256];
inline u32 bars_from = ~0u;
inline void fail(const char* what) { std::fprintf(stderr, "thread %u of %u: %s\n", threadIdx.x, blockIdx.x, what); std::abort(); }
inline Bar& bar_at(u32 address) {
    const u32 index = offset_of(address) / 8 % 256;
    return bars[rank_of(address)][index];
}
inline void update(Bar& bar, u32 arrivals, long bytes) {
    const std::lock_guard lock(mutex);
    if (bar.missing < arrivals) fail("too many arrivals");
    bar.missing -= arrivals, bar.bytes += bytes;
    if (bar.missing || bar.bytes) return;
    bar.missing = bar.count, bar.parity ^= 1;
    changed.notify_all();
}
inline void mbar_init(u32 at, u32 count) { bar_at(at) = {count, count, 0, 0}; }
inline void mbar_arrive(u32 at) { update(bar_at(at), 1, 0); }
inline void mbar_arrive_cluster(u32 at) { update(bar_at(at), 1, 0); }
inline void mbar_arrive_expect(u32 at, u32 bytes) { update(bar_at(at), 1, bytes); }
inline void mbar_wait(u32 at, u32 parity) {
    std::unique_lock lock(mutex);
    Bar& bar = bar_at(at);
    if (!changed.wait_for(lock, std::chrono::seconds(60), [&] { return bar.parity != parity; })) fail("waits in vain");
}

struct Named { u32 count, round; };
inline Named named[kMost][16];
inline void group_arrive(u32 barrier, u32 num_threads) {
    const std::lock_guard lock(mutex);
    Named& bar = named[my_rank][barrier];
    if (++bar.count == num_threads) bar.count = 0, ++bar.round, changed.notify_all();
}
inline void group_sync(u32 barrier, u32 num_threads) {
    std::unique_lock lock(mutex);
    Named& bar = named[my_rank][barrier];
    const u32 before = bar.round;
    if (++bar.count == num_threads) bar.count = 0, ++bar.round, changed.notify_all();
    if (!changed.wait_for(lock, std::chrono::seconds(60), [&] { return bar.round != before; })) fail("waits for a turn in vain");
}

struct alignas(64) TensorMap { u64 words[16]; };  // address, five sizes, four strides in bytes, box
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline void copy(u32 to, const TensorMap* map, const int (&first)[5], u32 bar, u32 mask) {
    const u64 *sizes = map->words + 1, *strides = map->words + 6, *box = map->words + 10;
    const u32 count = static_cast<u32>(box[0] * box[1] * box[2] * box[3] * box[4]);
    if (to % 1024) fail("a box that is not aligned");
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
        for (u32 rank = 0; rank < num_ranks; ++rank)
            if (mask >> rank & 1) std::memcpy(memory[rank] + swizzled(to + 2 * i), &value, 2);
    }
    for (u32 rank = 0; rank < num_ranks; ++rank)
        if (mask >> rank & 1) update(bar_at(cluster_address(bar, rank)), 0, -2l * count);
}
inline void tensor_load3_many(u32 to, const TensorMap* map, int x, int y, int z, u32 bar, u16 mask) { copy(to, map, {x, y, z, 0, 0}, bar, mask); }
inline void tensor_load3(u32 to, const TensorMap* map, int x, int y, int z, u32 bar) { copy(to, map, {x, y, z, 0, 0}, bar, 1u << my_rank); }
inline void tensor_load5_many(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar, u16 mask) { copy(to, map, {x, y, z, w, v}, bar, mask); }
inline void tensor_load(u32 to, const TensorMap* map, int x, int y, int z, int w, int v, u32 bar) { copy(to, map, {x, y, z, w, v}, bar, 1u << my_rank); }

inline void tensor_prefetch3(const TensorMap*, int, int, int) {}
inline void tensor_prefetch5(const TensorMap*, int, int, int, int, int) {}
inline float half_value(u16 bits) { _Float16 h; std::memcpy(&h, &bits, 2); return h; }
struct Fp16 {
    static u32 narrow(float v) { const _Float16 h = static_cast<_Float16>(v); u16 b; std::memcpy(&b, &h, 2); return b; }
    static u32 pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
    static float low(u32 p) { return half_value(static_cast<u16>(p)); }
    static float high(u32 p) { return half_value(static_cast<u16>(p >> 16)); }
};
inline float upper(u32 p) { return Fp16::high(p); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline void store_global(void* p, const uint4& v) { std::memcpy(p, &v, 16); }
struct Product { float* d; int count; u64 a, b; bool adds; };
inline thread_local std::vector<Product> open_group;
inline thread_local std::deque<std::vector<Product>> groups;
inline void products_begin() {}
inline void products_commit() { groups.push_back(std::move(open_group)), open_group.clear(); }
inline float value_at(u64 descriptor, u32 row, u32 k) {
    const u32 start = static_cast<u32>(descriptor & 0x3fff) << 4, stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
    u16 value;
    std::memcpy(&value, memory[my_rank] + swizzled(start + row / 8 * stride + row % 8 * 128 + 2 * k), 2);
    return half_value(value);
}
inline void play(const Product& p) {
    if (p.a >> 62 != 1 || p.b >> 62 != 1) fail("another swizzle");
    const u32 row = threadIdx.x % 128 / 32 * 16 + laneid() / 4;
    for (int r = 0; r < 2; ++r) {
        float x[16];
        for (u32 k = 0; k < 16; ++k) x[k] = value_at(p.a, row + 8 * r, k);
        for (int i = 0; i < p.count; ++i) {
            if ((i >> 1 & 1) != r) continue;
            const u32 column = i / 4 * 8 + laneid() % 4 * 2 + i % 2;
            float sum = p.adds ? p.d[i] : 0;
            for (u32 k = 0; k < 16; ++k) sum += x[k] * value_at(p.b, column, k);
            p.d[i] = sum;
        }
    }
}
inline std::unique_ptr<std::barrier<>> warp_barriers[kMost][kThreads / 32];
template <int kPending> void products_wait() {  // of whole warps
    while (groups.size() > kPending) {
        for (const Product& p : groups.front()) play(p);
        groups.pop_front();
    }
    warp_barriers[my_rank][threadIdx.x / 32]->arrive_and_wait();
}
template <int kCount> void settle(float (&)[kCount]) { if (!groups.empty()) fail("products under way"); }
template <int kCount> void multiply_rows(float (&d)[kCount], u64 a, u64 b, bool adds) { open_group.push_back({d, kCount, a, b, adds}); }
}  // namespace kog
inline void __syncthreads() { kog::block_barriers[my_rank]->arrive_and_wait(); }
