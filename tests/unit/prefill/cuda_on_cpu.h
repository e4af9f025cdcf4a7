// Enough of CUDA to run the kernels of prefill.cu on a CPU. Blocks run one after the other, or those of a cluster at once; their threads take
// turns on one thread of the CPU, each until it has to wait. So all runs are alike, and nobody can lean on luck: who has forgotten a barrier
// reads what others have not written yet, or overwrites what they have not read.
// Stands in for collectives/device/ptx.cuh, of which it has what those kernels use.
#pragma once
#include "system.h"

#include "e4m3_on_cpu.h"

#define __device__
#define __global__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static

struct Index {
    unsigned x;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- threads that take turns ----
inline Index threadIdx, blockIdx, blockDim, gridDim;  // of the one that runs
inline unsigned my_rank;                              // in the cluster
using Products = std::vector<std::function<void()>>;
struct Thread {
    unsigned index, rank, block = 0;
    bool has_begun = false, has_ended = false;
    std::jmp_buf state;
    ucontext_t context;
    unsigned turn = 0;               // of a warp's products
    Products queued;                 // and not committed
    std::deque<Products> committed;  // see hopper_on_cpu.h
};
inline std::deque<Thread> threads;  // of a cluster
inline Thread* running = nullptr;
inline std::jmp_buf scheduler;
inline std::function<void()> work;  // of each
inline bool somebody_went_on;
constexpr std::size_t kStackBytes = 512 << 10;
inline void* stack_of(std::size_t i) {  // kept for the next launch; takes memory as it is used
    static std::vector<void*> stacks;
    while (stacks.size() <= i)
        stacks.push_back(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return stacks[i];
}
inline void fail(const char* what) {
    std::fprintf(stderr, "thread %u of thread block %u: %s\n", threadIdx.x, blockIdx.x, what);
    std::abort();
}
inline void show(const Thread& thread) { threadIdx.x = thread.index, blockIdx.x = thread.block, my_rank = thread.rank; }
__attribute__((noinline)) inline void let_others_run() {
    Thread* const self = running;
    if (!_setjmp(self->state)) _longjmp(scheduler, 1);
    show(*self);
}
inline void run_thread() {
    work();
    running->has_ended = somebody_went_on = true;
    _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(Thread& thread) {
    running = &thread;
    show(thread);
    if (_setjmp(scheduler)) return;
    if (thread.has_begun) _longjmp(thread.state, 1);
    thread.has_begun = true;
    setcontext(&thread.context);
}
template <class Condition>
void wait_until(Condition holds) {
    while (!holds()) let_others_run();
    somebody_went_on = true;
}
inline void look_elsewhere() {  // for what another launch does meanwhile
    if (running == nullptr) return;
    somebody_went_on = true;
    sched_yield();
    let_others_run();
}
inline void run_threads(unsigned num_ranks, unsigned num_threads) {
    threads.clear();
    for (unsigned i = 0; i < num_ranks * num_threads; ++i) {
        Thread& thread = threads.emplace_back();
        thread.index = i % num_threads, thread.rank = i / num_threads;
        getcontext(&thread.context);
        thread.context.uc_stack = {stack_of(i), 0, kStackBytes};
        makecontext(&thread.context, run_thread, 0);
    }
    for (std::size_t left = threads.size(); left > 0;) {
        somebody_went_on = false;
        for (Thread& thread : threads) {
            if (thread.has_ended) continue;
            resume(thread);
            left -= thread.has_ended;
        }
        if (!somebody_went_on) fail("waits in vain");
    }
    running = nullptr;
}
class Barrier {
    unsigned size, arrived = 0, turn = 0;

public:
    explicit Barrier(unsigned num_threads) : size(num_threads) {}
    void arrive_and_wait() {
        const unsigned mine = turn;
        if (++arrived == size) arrived = 0, ++turn;
        wait_until([&] { return turn != mine; });
    }
};

struct ThreadBlock {
    Barrier all;
    std::vector<Barrier> warps;
    float shuffled[1024];
    unsigned operands[2][1024][6];  // of a warp's products, in turn: who has left one may begin the next

    explicit ThreadBlock(unsigned num_threads) : all(num_threads) {
        for (unsigned first = 0; first < num_threads; first += 32)
            warps.emplace_back(num_threads - first < 32 ? num_threads - first : 32);
    }
};
inline std::deque<ThreadBlock> thread_blocks;  // of a cluster
inline Barrier cluster_barrier(0);

inline void __syncthreads() { thread_blocks[my_rank].all.arrive_and_wait(); }
inline void __syncwarp() { thread_blocks[my_rank].warps[threadIdx.x / 32].arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int offset) {
    static_assert(sizeof(T) == sizeof(float));
    float* shuffled = thread_blocks[my_rank].shuffled;
    std::memcpy(&shuffled[threadIdx.x], &value, sizeof(T));
    __syncwarp();
    std::memcpy(&value, &shuffled[threadIdx.x ^ offset], sizeof(T));
    __syncwarp();
    return value;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    float* shuffled = thread_blocks[my_rank].shuffled;
    const unsigned first = threadIdx.x / 32 * 32;
    shuffled[threadIdx.x] = mine;
    __syncwarp();
    unsigned found = 0;
    for (unsigned i = 0; i < 32; ++i) found |= static_cast<unsigned>(shuffled[first + i] != 0) << i;
    __syncwarp();
    return found;
}
inline unsigned __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T>
T __ldg(const T* from) {
    return *from;
}
template <class T>
T __ldcg(const T* from) {
    return *from;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline std::atomic<int> num_true;
inline int voted(bool mine, bool& all) {  // how many threads of the block say yes
    if (threadIdx.x == 0) num_true = 0;
    __syncthreads();
    if (mine) ++num_true;
    __syncthreads();
    const int found = num_true;
    all = found == static_cast<int>(blockDim.x);
    __syncthreads();
    return found;
}
inline int __syncthreads_and(int mine) {
    bool all;
    voted(mine != 0, all);
    return all;
}
inline int __syncthreads_or(int mine) {
    bool all;
    return voted(mine != 0, all) != 0;
}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { look_elsewhere(); }
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned wanted) {
    std::atomic_ref<unsigned>(*at).compare_exchange_strong(expected, wanted);
    return expected;
}

namespace kog {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr u32 kFullWarp = 0xffffffffu;
inline u32 laneid() { return threadIdx.x & 31; }

inline u64 globaltimer_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline u64 load_system(const u64* p) { return std::atomic_ref<u64>(*const_cast<u64*>(p)).load(std::memory_order_relaxed); }
inline u32 load_system_u32(const u32* p) { return std::atomic_ref<u32>(*const_cast<u32*>(p)).load(std::memory_order_relaxed); }
inline void store_system(u64* p, u64 value) { std::atomic_ref<u64>(*p).store(value, std::memory_order_relaxed); }

inline float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
struct Bf16 {
    static u32 narrow(float value) {
        u32 bits;
        std::memcpy(&bits, &value, 4);
        return std::isfinite(value) ? (bits + ((bits >> 16 & 1) + 0x7fffu)) >> 16 : bits >> 16;
    }
    static u32 pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
    static float low(u32 packed) { return float_of(packed << 16); }
    static float high(u32 packed) { return float_of(packed & 0xffff0000u); }
};
struct Fp16 {
    static u32 narrow(float value) {
        const _Float16 half = static_cast<_Float16>(value);
        u16 bits;
        std::memcpy(&bits, &half, 2);
        return bits;
    }
    static u32 pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
    static float low(u32 packed) {
        const u16 bits = static_cast<u16>(packed);
        _Float16 half;
        std::memcpy(&half, &bits, 2);
        return half;
    }
    static float high(u32 packed) { return low(packed >> 16); }
    // m16n8k16: of A a thread holds rows group and group + 8, of B column group, of the result columns 2 part and 2 part + 1.
    static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        auto* all = thread_blocks[my_rank].operands[++running->turn % 2] + threadIdx.x / 32 * 32;
        const u32 own[6] = {a0, a1, a2, a3, b0, b1}, group = laneid() / 4, part = laneid() % 4;
        std::memcpy(all[laneid()], own, sizeof(own));
        __syncwarp();
        for (u32 k = 0; k < 8; ++k) {  // pairs of k
            for (u32 i = 0; i < 4; ++i) {
                const u32 a = all[group * 4 + k % 4][k / 4 * 2 + i / 2], b = all[(2 * part + i % 2) * 4 + k % 4][4 + k / 4];
                d[i] += low(a) * low(b) + high(a) * high(b);
            }
        }
    }
};

inline u32 pack_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline u32 expand_e4m3(u32 codes, bool upper = false) {
    if (upper) codes >>= 16;
    return Fp16::pack(e4m3_value(codes & 0xff), e4m3_value(codes >> 8 & 0xff));
}
inline u32 add_halves(u32 a, u32 b) { return Fp16::pack(Fp16::low(a) + Fp16::low(b), Fp16::high(a) + Fp16::high(b)); }

// Run all blocks of a launch, `cluster` at a time.
template <class Params>
void launch(void (*kernel)(Params), unsigned num_ctas, unsigned num_threads, const void* raw, unsigned cluster = 1) {
    Params params;
    std::memcpy(&params, raw, sizeof(Params));
    cluster_barrier = Barrier(cluster * num_threads);
    thread_blocks.clear();
    for (unsigned rank = 0; rank < cluster; ++rank) thread_blocks.emplace_back(num_threads);
    blockDim.x = num_threads, gridDim.x = num_ctas;
    work = [=] {
        for (unsigned cta = my_rank; cta < num_ctas; cta += cluster) {
            blockIdx.x = running->block = cta;
            kernel(params);
            cluster_barrier.arrive_and_wait();
        }
    };
    run_threads(cluster, num_threads);
}
}  // namespace kog
