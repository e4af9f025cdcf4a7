// The twin of collectives/device/ptx.cuh for a CPU: the same device code runs with fibers for threads, several GPUs in one process,
// one fiber at a time in an order that a seed decides. Stores reach memory late, in any order, and 16-byte stores in two halves:
// all that the memory model allows to relaxed words. Only what KCCL's device code uses is here.
#pragma once
#include "fiber_switch.h"

#define __device__
#define __forceinline__ inline
#define KCCL_TWIN

struct ulonglong2 {
    unsigned long long x, y;
};
struct TwinIndex {
    unsigned x;
};

namespace kog {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr u32 kFullWarp = 0xffffffffu;
}  // namespace kog

namespace twin {
using kog::u32;
using kog::u64;

constexpr size_t kStackBytes = 64 << 10, kArenaBytes = 64 << 20;

struct Fiber;
struct Warp {  // a collective operation is complete when all 32 have come; nobody is more than one operation ahead
    u64 value[2][32] = {};
    u64 arrived[2] = {};
    std::vector<Fiber*> waiting;
};
struct Block {
    u32 num_threads = 0;
    u64 arrived = 0;  // at __syncthreads
    std::vector<Fiber*> waiting;
};
struct Fiber {
    void* stack_pointer = nullptr;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    Warp* warp = nullptr;
    Block* block = nullptr;
    TwinIndex thread{}, block_idx{};
    u64 num_operations = 0, num_syncs = 0;
    u32* running = nullptr;      // of its launch
    const void* gpu = nullptr;  // its launch: one GPU runs one at a time
};
struct Store {
    u64* to;
    u64 value;
};

inline std::mt19937_64 random_bits;
inline void* scheduler = nullptr;
inline Fiber* current = nullptr;
inline std::vector<Fiber*> runnable;
inline std::vector<Store> in_flight;
inline char* arena = nullptr;
inline u64 now_ns = 1;
inline std::vector<const void*> gpus;      // those that ever launched something
inline const void* slow_gpu = nullptr;     // its threads hardly run; which one it is changes now and then

inline void yield() { twin_switch(&current->stack_pointer, scheduler); }
inline void maybe_yield() {
    if (random_bits() % 4 == 0) yield();
}
inline void block_until_woken() {
    for (size_t i = 0; i < runnable.size(); ++i)
        if (runnable[i] == current) {
            runnable[i] = runnable.back();
            runnable.pop_back();
            break;
        }
    yield();
}
inline void deliver(size_t i) {  // stores of one address stay in order
    for (size_t k = 0; k < i; ++k)
        if (in_flight[k].to == in_flight[i].to) {
            i = k;
            break;
        }
    *in_flight[i].to = in_flight[i].value;
    in_flight.erase(in_flight.begin() + i);
}
inline void store(void* to, u64 value) {
    in_flight.push_back({static_cast<u64*>(to), value});
    maybe_yield();
}

// One collective operation of a warp: everyone gives a value, and then may read all.
inline const u64* collective(u64 value) {
    Warp& warp = *current->warp;
    const u64 operation = current->num_operations++, half = operation & 1;
    warp.value[half][current->thread.x & 31] = value;
    if (++warp.arrived[half] == 32 * (operation / 2 + 1)) {
        for (Fiber* fiber : warp.waiting) runnable.push_back(fiber);
        warp.waiting.clear();
    } else {
        warp.waiting.push_back(current);
        block_until_woken();
    }
    return warp.value[half];
}

inline void sync_block() {
    Block& block = *current->block;
    if (++block.arrived == block.num_threads * ++current->num_syncs) {
        for (Fiber* fiber : block.waiting) runnable.push_back(fiber);
        block.waiting.clear();
    } else {
        block.waiting.push_back(current);
        block_until_woken();
    }
}

inline void enter() {
    Fiber* self = current;
    self->body();
    --*self->running;
    block_until_woken();  // for ever
    abort();
}

// A launch on one GPU; call `run` afterwards. `running` counts its threads that have not ended.
struct Launch {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Block>> blocks;
    u32 running = 0;

    void start(u32 num_blocks, u32 num_threads, const std::function<void(u32)>& body) {
        fibers.clear(), warps.clear(), blocks.clear();
        running = num_blocks * num_threads;
        bool known = false;
        for (const void* gpu : gpus) known = known || gpu == this;
        if (!known) gpus.push_back(this);
        for (u32 b = 0; b < num_blocks; ++b) {
            blocks.push_back(std::make_unique<Block>());
            blocks.back()->num_threads = num_threads;
            for (u32 t = 0; t < num_threads; ++t) {
                if (t % 32 == 0) warps.push_back(std::make_unique<Warp>());
                auto fiber = std::make_unique<Fiber>();
                fiber->stack = std::unique_ptr<char[]>(new char[kStackBytes]);
                fiber->warp = warps.back().get(), fiber->block = blocks.back().get();
                fiber->thread.x = t, fiber->block_idx.x = b, fiber->running = &running, fiber->gpu = this;
                fiber->body = [body, b] { body(b); };
                fiber->stack_pointer = twin_stack_pointer(fiber->stack.get() + kStackBytes, enter);
                runnable.push_back(fiber.get());
                fibers.push_back(std::move(fiber));
            }
        }
    }
};

// Let somebody run, a thread or a store. Ends the program with 6 when nobody can: some threads wait for others that are gone.
inline void step() {
    if (!in_flight.empty() && (runnable.empty() || random_bits() % 3 == 0)) deliver(random_bits() % in_flight.size());
    now_ns += 20;
    if (runnable.empty()) {
        if (in_flight.empty()) exit(6);
        return;
    }
    if (random_bits() % 20000 == 0) slow_gpu = random_bits() % 4 ? gpus[random_bits() % gpus.size()] : nullptr;
    for (int tries = 0; tries < 12; ++tries) {
        current = runnable[random_bits() % runnable.size()];
        if (current->gpu != slow_gpu) break;
    }
    twin_switch(&scheduler, current->stack_pointer);
}
inline void flush() {
    while (!in_flight.empty()) deliver(0);
}
inline void begin(u64 seed) {
    random_bits.seed(seed);
    arena = static_cast<char*>(aligned_alloc(4096, kArenaBytes));
    memset(arena, 0xcd, kArenaBytes);
}
// Shared memory of a thread block: its place in the arena is its shared-memory address.
template <class T>
T& shared_of(u32 gpu, u32 block) {
    const size_t at = (gpu * 64 + block) * ((sizeof(T) + 127) / 128 * 128) + 4096;
    if (at + sizeof(T) > kArenaBytes) abort();
    return *reinterpret_cast<T*>(arena + at);
}
}  // namespace twin

#define threadIdx (twin::current->thread)
#define blockIdx (twin::current->block_idx)

inline float __uint_as_float(unsigned v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned v;
    memcpy(&v, &f, 4);
    return v;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class A>
A min(A a, A b) {
    return a < b ? a : b;
}
template <class T>
T twin_shuffle(T value, unsigned source) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = twin::collective(bits)[source & 31];
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
    return twin_shuffle(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return twin_shuffle(value, (threadIdx.x & 31) ^ mask);
}
inline bool __all_sync(unsigned, bool predicate) {
    const unsigned long long* all = twin::collective(predicate);
    bool result = true;
    for (int i = 0; i < 32; ++i) result = result && all[i];
    return result;
}
inline bool __any_sync(unsigned mask, bool predicate) { return !__all_sync(mask, !predicate); }
inline void __syncwarp() { twin::collective(0); }
inline void __syncthreads() { twin::sync_block(); }
inline void __nanosleep(unsigned) { twin::yield(); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return (*p += v) - v; }
inline unsigned atomicExch(unsigned* p, unsigned v) {
    const unsigned old = *p;
    return *p = v, old;
}
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned v) {
    const unsigned old = *p;
    if (old == expected) *p = v;
    return old;
}

namespace kog {
inline u32 laneid() { return threadIdx.x & 31; }
inline u32 shared_address(const void* p) { return static_cast<u32>(static_cast<const char*>(p) - twin::arena); }
inline u32 opaque(u32 value) { return value; }
inline u64 globaltimer_ns() { return twin::now_ns; }
inline u64 load_system(const u64* p) {
    twin::maybe_yield();
    return *const_cast<const volatile u64*>(p);
}
inline ulonglong2 load_system_x2(const u64* p) {  // two loads, in either order
    if (twin::random_bits() & 1) {
        const u64 y = load_system(p + 1);
        return {load_system(p), y};
    }
    const u64 x = load_system(p);
    return {x, load_system(p + 1)};
}
inline u64 load_relaxed(const u64* p) { return load_system(p); }
inline ulonglong2 load_relaxed_x2(const u64* p) { return load_system_x2(p); }
inline u32 load_relaxed_u32(const u32* p) {
    twin::maybe_yield();
    return *const_cast<const volatile u32*>(p);
}
inline u32 load_system_u32(const u32* p) { return load_relaxed_u32(p); }
inline void store_system(u64* p, u64 a) { twin::store(p, a); }
inline void store_system_x2(u64* p, u64 a, u64 b) {
    if (reinterpret_cast<uintptr_t>(p) % 16) abort();  // a GPU would fault
    if (twin::random_bits() & 1) twin::store(p + 1, b), twin::store(p, a);
    else twin::store(p, a), twin::store(p + 1, b);
}
inline void store_relaxed(u64* p, u64 a) { twin::store(p, a); }
inline void store_relaxed_x2(u64* p, u64 a, u64 b) { store_system_x2(p, a, b); }
inline u32 load_shared_u32(u32 address) {
    twin::maybe_yield();
    return *reinterpret_cast<volatile u32*>(twin::arena + address);
}

// An mbarrier: count, arrivals still missing, completed phases.
struct TwinBarrier {
    u16 count, missing;
    u32 phase;
};
static_assert(sizeof(TwinBarrier) == sizeof(u64));
inline TwinBarrier& barrier_at(u32 bar) { return *reinterpret_cast<TwinBarrier*>(twin::arena + bar); }
inline void mbar_init(u32 bar, u32 count) { barrier_at(bar) = {static_cast<u16>(count), static_cast<u16>(count), 0}; }
inline void mbar_arrive(u32 bar) {
    TwinBarrier& barrier = barrier_at(bar);
    if (--barrier.missing == 0) barrier.missing = barrier.count, ++barrier.phase;
}
inline bool mbar_try(u32 bar, u32 parity) {
    twin::maybe_yield();
    return (barrier_at(bar).phase & 1) != parity;
}
inline void fence_barrier_init() {}
}  // namespace kog
