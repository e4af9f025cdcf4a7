// The twin of collectives/device/ptx.cuh for the monokernel as a whole: a fiber for each thread of all thread blocks of all ranks, on one
// thread of a CPU. Fibers take turns; a warp's collective operation lets each wait until all have come. Memory is that of the CPU, so
// stores arrive at once and in order (kccl_twin/ has a less kind memory). The matrix unit is a loop.
#pragma once
#include "system.h"

#include "e4m3_on_cpu.h"
#include "fiber_switch.h"

#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
struct TwinIndex { unsigned x; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

namespace kog {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr u32 kFullWarp = 0xffffffffu;
}  // namespace kog

namespace twin {
using kog::u32;
using kog::u64;
// The same line of all stacks must not fall into the same set of the CPU's caches: 32 threads take turns.
constexpr size_t kStackBytes = (8 << 10) + 64, kStacksBytes = size_t{1} << 28;
constexpr u64 kStackEnd = 0x5afe57ac6e0fbe17;  // stands there for as long as a stack was large enough
constexpr u32 kMostPatience = 15;  // turns
constexpr u32 kMostRounds = 32;  // of a warp's threads in one turn

struct Warp {  // nobody is more than one operation ahead, so two sets of values are enough
    alignas(32) u64 value[2][3][32];
    u64 arrived[2];
    u32 votes[2];     // the lowest bit of each thread's first value
    u64 rests_until;  // turn
    u32 patience;     // doubles with each look for something that has not come
    u32 num_threads, num_ended;
    void looked(bool has_come);
};
struct Block {
    char* memory;
    u64 num_threads = 0, arrived = 0;
};
struct Fiber {
    void* stack_pointer;
    std::function<void()>* body;
    Warp* warp;
    Block* block;
    TwinIndex thread, block_idx;
    u64 num_operations = 0, wanted = 0;
    const u64* waits_for = nullptr;  // until it has reached `wanted`
    const u32* barrier = nullptr;    // until its phase, in the upper half, has the other parity, or `looks_again` has come
    u32 parity = 0;
    u64 looks_again = 0;  // turn
    bool ended = false;
    bool can_go_on(u64 turn) const {
        if (waits_for != nullptr) return *waits_for >= wanted;
        return barrier == nullptr || (*barrier >> 16 & 1) != parity || turn >= looks_again;
    }
    bool all_have_come() const { return waits_for != nullptr && *waits_for >= wanted; }
};

inline char* arena = nullptr;
inline size_t arena_used = 128;
inline void* scheduler = nullptr;
inline Fiber* current = nullptr;
inline u64 turns = 0;
inline u32 most_patience = 0;  // in the first run without unrest: what a word comes too late for shows
inline u64 unrest = 0;  // not 0: the state of random numbers, by which warps miss many turns now and then
inline void (*on_word)(const u64* at, u64 word, bool is_store) = nullptr;  // if set, told of each word that is loaded or stored: word_log.h
inline std::vector<Fiber> fibers;  // warp after warp
inline std::vector<std::unique_ptr<Warp>> warps;
inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<std::unique_ptr<std::function<void()>>> bodies;

// Who looks in vain again and again misses turns, but in the first run without unrest: looks are most of what an emulation does.
inline void Warp::looked(bool has_come) {
    patience = has_come ? 0 : std::min(2 * patience + 1, most_patience);
    rests_until = std::max(rests_until, turns + patience);
}
[[gnu::noinline]] inline void yield();
inline const u64 (*collective(u64 a, u64 b = 0, u64 c = 0))[32] {
    Warp& warp = *current->warp;
    const u64 operation = current->num_operations++, half = operation & 1, all = 32 * (operation / 2 + 1);
    const u32 lane = current->thread.x & 31;
    auto& value = warp.value[half];
    value[0][lane] = a, value[1][lane] = b, value[2][lane] = c;
    if (warp.arrived[half] % 32 == 0) warp.votes[half] = 0;
    warp.votes[half] |= (a & 1u) << lane;
    if (++warp.arrived[half] < all) {
        current->waits_for = &warp.arrived[half], current->wanted = all;
        yield();
    }
    return warp.value[half];
}
inline u32 votes(bool mine) {
    collective(mine);
    return current->warp->votes[(current->num_operations - 1) & 1];
}
[[noreturn]] inline void enter() {
    (*current->body)();
    current->ended = true;
    ++current->warp->num_ended;
    while (true) yield();
}
// Of the i-th fiber. Large pages: every switch is to another stack, and with small ones to a page whose address is looked up anew.
inline char* stack_top(size_t i) {
    static char* stacks = nullptr;
    if (!stacks) {
        constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = static_cast<char*>(mmap(nullptr, kStacksBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
        if (stacks == MAP_FAILED) abort();
        madvise(stacks, kStacksBytes, MADV_HUGEPAGE);
    }
    if ((i + 1) * kStackBytes > kStacksBytes) abort();
    return stacks + (i + 1) * kStackBytes;
}
inline u64& stack_end(size_t i) { return *reinterpret_cast<u64*>(stack_top(i) - kStackBytes); }
inline void start(u32 num_blocks, u32 num_threads, size_t shared_bytes, const std::function<void()>& body) {
    bodies.push_back(std::make_unique<std::function<void()>>(body));
    const size_t block_bytes = (shared_bytes + 127) / 128 * 128;
    for (u32 b = 0; b < num_blocks; ++b) {
        blocks.push_back(std::make_unique<Block>());
        blocks.back()->memory = arena + arena_used, blocks.back()->num_threads = num_threads;
        arena_used += block_bytes;
        for (u32 t = 0; t < num_threads; ++t) {
            if (t % 32 == 0) warps.push_back(std::unique_ptr<Warp>(new Warp{}));
            ++warps.back()->num_threads;
            Fiber& fiber = fibers.emplace_back();
            fiber.body = bodies.back().get(), fiber.warp = warps.back().get(), fiber.block = blocks.back().get();
            fiber.thread.x = t, fiber.block_idx.x = b;
            fiber.stack_pointer = twin_stack_pointer(stack_top(fibers.size() - 1), enter);
            stack_end(fibers.size() - 1) = kStackEnd;
        }
    }
}
inline u32 random() {
    unrest = unrest * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<u32>(unrest >> 33);
}
inline u64 last_turn = 0;
inline size_t warp_idx = 0;
inline Fiber *position = nullptr, *next_warp = nullptr;  // the fiber that is looked at next, and behind its warp's last
inline bool any_left = false;
inline u32 num_rounds = 0;  // of this warp that have ended, in this turn
inline bool has_gone_on = false;  // one of its threads, in this round
// The next turn, in which somebody has to be left.
inline bool begin_turn() {
    if (turns > last_turn) return false;
    any_left = false, warp_idx = 0, position = next_warp = fibers.data();
    if (unrest)
        for (auto& warp : warps)
            if (random() % 64 == 0) warp->rests_until = turns + (1u << random() % 9);
    return true;
}
// Another round is for threads whose operation the round before has completed: 32 stacks stay in the nearest cache, and those of all warps do
// not fit. In the first run and with unrest warps take turns after each operation, which shows most of what comes too late or too soon.
inline bool begin_round(const Warp& warp) {
    const u32 most = unrest || !most_patience ? 1 : kMostRounds;
    if (!has_gone_on || ++num_rounds >= most) return false;
    has_gone_on = false, position = next_warp - warp.num_threads;
    return true;
}
[[gnu::always_inline]] inline Fiber* pick_of(const Warp& warp) {
    if (warp.rests_until > turns) return nullptr;
    do
        for (; position < next_warp; ++position)
            if (!position->ended && (num_rounds ? position->all_have_come() : position->can_go_on(turns))) return has_gone_on = true, position++;
    while (begin_round(warp));
    return nullptr;
}
// The next warp of this turn that has threads left.
inline bool begin_warp() {
    while (warp_idx < warps.size()) {
        const Warp& warp = *warps[warp_idx++];
        position = next_warp, next_warp += warp.num_threads;
        num_rounds = 0, has_gone_on = false;
        if (warp.num_ended < warp.num_threads) return any_left = true;
    }
    return false;
}
// Whose turn it is; null when all have ended, or when that has taken too many turns.
inline Fiber* pick() {
    while (true) {
        if (warp_idx > 0)
            if (Fiber* found = pick_of(*warps[warp_idx - 1])) return found;
        while (!begin_warp()) {
            ++turns;
            if (!any_left || !begin_turn()) return nullptr;
        }
    }
}
// From one fiber to the next, without a detour.
inline void go_on(void** from) {
    Fiber* to = pick();
    void* load = scheduler;
    if (to != nullptr) to->waits_for = nullptr, to->barrier = nullptr, load = to->stack_pointer;
    if (to != nullptr && from == &to->stack_pointer) return;
    current = to;
    twin_switch(from, load);
}
inline void yield() { go_on(&current->stack_pointer); }
// Until all threads have ended; false if that takes too many turns.
inline bool run(u64 most_turns) {
    last_turn = most_turns;
    if (!begin_turn()) return false;
    go_on(&scheduler);
    for (size_t i = 0; i < fibers.size(); ++i)
        if (stack_end(i) != kStackEnd) abort();
    if (any_left) return false;
    fibers.clear(), warps.clear(), blocks.clear(), bodies.clear(), arena_used = 128, most_patience = kMostPatience;
    return true;
}
}  // namespace twin

#define threadIdx (twin::current->thread)
#define blockIdx (twin::current->block_idx)

template <class To, class From>
To twin_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &value, sizeof(To));
    return to;
}
inline float __uint_as_float(unsigned v) { return twin_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return twin_bits<unsigned>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Those of libm are calls, and of code whose registers are narrower than those of the matrix unit here, which is slow to mix.
inline float twin_fmaxf(float a, float b) { return a > b || std::isnan(b) ? a : b; }
inline float twin_fminf(float a, float b) { return a < b || std::isnan(b) ? a : b; }
#define fmaxf twin_fmaxf
#define fminf twin_fminf
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T>
T twin_shuffle(T value, unsigned source) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = twin::collective(bits)[0][source & 31];
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int source) { return twin_shuffle(value, source); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return twin_shuffle(value, (threadIdx.x & 31) ^ mask); }
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
    const unsigned lane = threadIdx.x & 31;
    return twin_shuffle(value, lane + by < 32 ? lane + by : lane);
}
inline bool twin_all(bool predicate) { return twin::votes(predicate) == kog::kFullWarp; }
inline bool __all_sync(unsigned, bool predicate) {  // a wait's look
    const bool all = twin_all(predicate);
    if ((threadIdx.x & 31) == 31) twin::current->warp->looked(all);
    return all;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const auto* all = twin::collective(value);
    unsigned long long most = 0;
    for (int i = 0; i < 32; ++i) most = std::max<unsigned long long>(most, all[0][i]);
    return static_cast<unsigned>(most);
}
inline int __reduce_add_sync(unsigned, int value) {
    const auto* all = twin::collective(static_cast<unsigned>(value));
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(all[0][i]);
    return static_cast<int>(sum);
}
inline unsigned __ballot_sync(unsigned, bool predicate) { return twin::votes(predicate); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline bool __any_sync(unsigned, bool predicate) { return !twin_all(!predicate); }
inline void __syncwarp() { twin::collective(0); }
inline void __syncthreads() {  // once for each thread block
    twin::Block& block = *twin::current->block;
    if (++block.arrived == block.num_threads) return;
    twin::current->waits_for = &block.arrived, twin::current->wanted = block.num_threads;
    twin::yield();
}
inline void __nanosleep(unsigned) { twin::yield(); }
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
inline bool elect_one() { return laneid() == 0; }
inline u32 shared_address(const void* p) { return static_cast<u32>(static_cast<const char*>(p) - twin::arena); }
inline u32 opaque(u32 value) { return value; }
template <class T>
T* opaque(T* at) {
    return at;
}
inline u64 globaltimer_ns() { return twin::turns * 10; }
inline u32 clock_cycles() { return static_cast<u32>(twin::turns * 200); }

// An mbarrier: count, arrivals still missing, completed phases, bytes still missing.
struct TwinBarrier {
    u32 count : 8, missing : 8, phase : 16, bytes;
};
static_assert(sizeof(TwinBarrier) == sizeof(u64));
inline TwinBarrier& barrier_at(u32 bar) { return *reinterpret_cast<TwinBarrier*>(twin::arena + bar); }
// A copy into the ring, by the barrier that tells of it.
struct TwinCopy {
    u32 first, end, number;  // bytes; how many there were with this barrier
};
inline std::map<u32, TwinCopy> copies;
inline void mbar_init(u32 bar, u32 count) { barrier_at(bar) = {count, count, 0, 0}, copies.erase(bar); }
inline void mbar_look(TwinBarrier& barrier) {
    if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.count, barrier.phase = barrier.phase + 1;
}
// From the barrier of a piece of the ring to the one that tells that it has been read and may be filled again; 0: there is no ring. What was in
// it is no number from then on, for who has given it back too soon.
inline u32 twin_empty_offset = 0;
inline void spoil(u32 bar) {
    const auto copy = copies.find(bar);
    if (copy != copies.end()) memset(twin::arena + copy->second.first, 0xff, copy->second.end - copy->second.first);
}
inline void mbar_arrive(u32 bar) {
    TwinBarrier& barrier = barrier_at(bar);
    barrier.missing = barrier.missing - 1;
    const u32 phase = barrier.phase;
    mbar_look(barrier);
    if (twin_empty_offset && barrier.phase != phase) spoil(bar - twin_empty_offset);
    // Who waits goes on before this warp's other threads do, for whom it has not waited itself.
    if (twin::unrest) twin::current->warp->rests_until = twin::turns + twin::kMostPatience + 2;
}
inline std::map<u32, u32> expected;  // bytes of a barrier's phase
inline void mbar_arrive_expect(u32 bar, u32 bytes) {
    expected[bar] = bytes;
    barrier_at(bar).bytes += bytes;
    mbar_arrive(bar);
}
inline bool is_complete(u32 bar, u32 parity) { return (barrier_at(bar).phase & 1u) != parity; }
inline bool mbar_test(u32 bar, u32 parity) {
    if (is_complete(bar, parity)) return true;
    twin::yield();
    return is_complete(bar, parity);
}
// Waits a while, as hardware does, and goes on in the turn in which the phase is complete.
constexpr u32 kBarrierTurns = 256;
inline bool mbar_try(u32 bar, u32 parity) {
    if (is_complete(bar, parity)) return true;
    twin::Fiber& fiber = *twin::current;
    fiber.barrier = reinterpret_cast<const u32*>(&barrier_at(bar)), fiber.parity = parity;
    fiber.looks_again = twin::turns + kBarrierTurns;
    twin::yield();
    return is_complete(bar, parity);
}
inline void fence_barrier_init() {}
inline u64 evict_first_policy() { return 0; }
inline std::vector<std::pair<const char*, const char*>> tapes;  // from the first byte to behind the last
// From such a barrier to the one that tells that the copy has been read, in a packed ring. 0: copies of different barriers must not share
// memory, whatever their sizes, since each piece of the ring is given back by itself.
inline u32 twin_read_offset = 0;
// `goes_on`: another part of the same piece, behind the others.
inline void claim(u32 bar, u32 first, u32 end, bool goes_on) {
    TwinCopy& own = copies.try_emplace(bar, TwinCopy{first, first, 0}).first->second;
    if (goes_on) {
        if (first < own.first || end > own.end) abort();
        return;
    }
    if (twin_read_offset) own.first = first, own.end = end;
    else own.first = std::min(own.first, first), own.end = std::max(own.end, end);
    for (const auto& [other, copy] : copies) {
        const bool was_read = twin_read_offset && (barrier_at(other + twin_read_offset).phase & 0xffffu) == (copy.number & 0xffffu);
        if (!was_read && (other == bar ? twin_read_offset != 0 : copy.first < own.end && own.first < copy.end)) abort();
    }
    ++own.number;
}
inline void prefetch_l2(const void*, u32) {}
inline u64 copied_bytes = 0;  // by all loaders
inline void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, u64) {
    const char* from = static_cast<const char*>(src);
    bool is_inside = false;
    for (const auto& [first, end] : tapes) is_inside |= from >= first && from + bytes <= end;
    if (!is_inside || dst % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16) abort();
    const bool goes_on = barrier_at(bar).bytes != expected[bar];
    claim(bar, dst, dst + (goes_on ? bytes : expected[bar]), goes_on);
    memcpy(twin::arena + dst, src, bytes);
    copied_bytes += bytes;
    barrier_at(bar).bytes -= bytes;
    mbar_look(barrier_at(bar));
}
template <int> void raise_registers() {}
template <int> void drop_registers() {}

template <class T>
T& twin_at(u32 address) {
    if (address % sizeof(T)) abort();
    return *reinterpret_cast<T*>(twin::arena + address);
}
inline u64 load_relaxed(const u64* p) {
    const u64 word = *const_cast<const volatile u64*>(p);
    if (twin::on_word) twin::on_word(p, word, false);
    return word;
}
inline ulonglong2 load_relaxed_x2(const u64* p) {
    if (reinterpret_cast<uintptr_t>(p) % 16) abort();  // a GPU would fault
    return {load_relaxed(p), load_relaxed(p + 1)};
}
inline u32 load_relaxed_u32(const u32* p) { return *const_cast<const volatile u32*>(p); }
inline void store_relaxed_u32(u32* p, u32 a) { *const_cast<volatile u32*>(p) = a; }
inline u32 load_system_u32(const u32* p) { return load_relaxed_u32(p); }
inline u64 load_system(const u64* p) { return load_relaxed(p); }
inline ulonglong2 load_system_x2(const u64* p) { return load_relaxed_x2(p); }
inline void store_relaxed(u64* p, u64 a) {
    *p = a;
    if (twin::on_word) twin::on_word(p, a, true);
}
inline void store_relaxed_x2(u64* p, u64 a, u64 b) {
    if (reinterpret_cast<uintptr_t>(p) % 16) abort();
    store_relaxed(p, a), store_relaxed(p + 1, b);
}
inline void store_system(u64* p, u64 a) { store_relaxed(p, a); }
inline void store_system_x2(u64* p, u64 a, u64 b) { store_relaxed_x2(p, a, b); }
inline void load_global(const void* p, uint4& v) { memcpy(&v, p, 16); }
inline void load_global(const void* p, uint2& v) { memcpy(&v, p, 8); }
inline void load_global(const void* p, u32& v) { memcpy(&v, p, 4); }
inline void load_shared(u32 address, uint4& v) { v = twin_at<uint4>(address); }
inline void load_shared(u32 address, uint2& v) { v = twin_at<uint2>(address); }
inline void load_shared_if(bool is_wanted, u32 address, uint2& v) {
    if (is_wanted) v = twin_at<uint2>(address);
}
inline u32 load_shared_u8(u32 address) { return twin_at<unsigned char>(address); }
inline u32 load_shared_u32(u32 address) { return *const_cast<volatile u32*>(&twin_at<u32>(address)); }
inline float load_shared_f32(u32 address) { return twin_at<float>(address); }
inline void store_shared(u32 address, float v) { twin_at<float>(address) = v; }
inline void store_shared(u32 address, u32 v) { twin_at<u32>(address) = v; }
inline u32 load_shared_u16(u32 address) { return twin_at<u16>(address); }
inline void store_shared(u32 address, u16 v) { twin_at<u16>(address) = v; }
inline void store_shared(u32 address, uint2 v) { twin_at<uint2>(address) = v; }

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float max_magnitude(float a, float b) { return std::isnan(a) || !(std::fabs(a) <= std::fabs(b)) ? std::fabs(a) : std::fabs(b); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float inverse_root_approx(float x) { return 1.0f / std::sqrt(x); }

// Of A (two rows) and B (two columns) what one thread of a matrix operation needs: four registers in the order of k, twice.
struct TwinTiles {
    __m128i a[2][2], b[2][2];
};
// Of A a thread holds rows group and group + 8, of B column group, of the result columns 2 part and 2 part + 1.
inline TwinTiles twin_tiles(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto pair = [](u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; };
    const auto* all = twin::collective(pair(a0, a1), pair(a2, a3), pair(b0, b1));
    const u32 group = laneid() >> 2, part = laneid() & 3;
    const auto apart = [&](u32 which, u32 first, __m128i& low, __m128i& high) {  // the halves of four threads' values
        const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(all[which] + first));
        const __m256i halves = _mm256_permutevar8x32_epi32(four, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        low = _mm256_castsi256_si128(halves), high = _mm256_extracti128_si256(halves, 1);
    };
    TwinTiles tiles;
    for (u32 k = 0; k < 2; ++k) apart(k, 4 * group, tiles.a[0][k], tiles.a[1][k]);
    for (u32 column = 0; column < 2; ++column) apart(2, 4 * (2 * part + column), tiles.b[column][0], tiles.b[column][1]);
    return tiles;
}
// m16n8k16: products of pairs of k are added, and these sums to the result, one after the other.
template <class Format>
void twin_mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const TwinTiles tiles = twin_tiles(a0, a1, a2, a3, b0, b1);
    __m128 low[4], high[4];  // of each result: pairs 0, 1, 4 and 5; 2, 3, 6 and 7
#pragma GCC unroll 4
    for (u32 i = 0; i < 4; ++i) {
        const auto &row = tiles.a[i >> 1], &column = tiles.b[i & 1];
        const __m256 first = _mm256_mul_ps(Format::floats(row[0]), Format::floats(column[0]));
        const __m256 second = _mm256_mul_ps(Format::floats(row[1]), Format::floats(column[1]));
        const __m256 sums = _mm256_hadd_ps(first, second);
        low[i] = _mm256_castps256_ps128(sums), high[i] = _mm256_extractf128_ps(sums, 1);
    }
    _MM_TRANSPOSE4_PS(low[0], low[1], low[2], low[3]);
    _MM_TRANSPOSE4_PS(high[0], high[1], high[2], high[3]);
    __m128 result = _mm_loadu_ps(d);
    for (const __m128 sums : {low[0], low[1], high[0], high[1], low[2], low[3], high[2], high[3]}) result = _mm_add_ps(result, sums);
    _mm_storeu_ps(d, result);
}
// m16n8k32 of bytes, those of A of one kind and B's signed: likewise, four of k in a register.
template <class Byte>
void twin_mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const TwinTiles tiles = twin_tiles(a0, a1, a2, a3, b0, b1);
    const auto widened = [](__m128i bytes) { return std::is_signed_v<Byte> ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes); };
    __m256i sums[4];
#pragma GCC unroll 4
    for (u32 i = 0; i < 4; ++i) {
        const auto &row = tiles.a[i >> 1], &column = tiles.b[i & 1];
        const __m256i first = _mm256_madd_epi16(widened(row[0]), _mm256_cvtepi8_epi16(column[0]));
        sums[i] = _mm256_add_epi32(first, _mm256_madd_epi16(widened(row[1]), _mm256_cvtepi8_epi16(column[1])));
    }
    const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    __m128i* result = reinterpret_cast<__m128i*>(d);
    _mm_storeu_si128(result, _mm_add_epi32(_mm_loadu_si128(result), both));
}
inline void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { twin_mma_bytes<unsigned char>(d, a0, a1, a2, a3, b0, b1); }
inline void mma_signed_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { twin_mma_bytes<signed char>(d, a0, a1, a2, a3, b0, b1); }
struct Bf16 {
    static u32 round(float v) {
        const u32 bits = __float_as_uint(v);
        return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    }
    static u32 pack(float low, float high) { return round(low) | round(high) << 16; }
    static float low(u32 packed) { return __uint_as_float(packed << 16); }
    static float high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
    static __m256 floats(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
    static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { twin_mma<Bf16>(d, a0, a1, a2, a3, b0, b1); }
};
struct Fp16 {
    static u32 round(float v) { return twin_bits<u16>(static_cast<_Float16>(v)); }
    static u32 pack(float low, float high) { return round(low) | round(high) << 16; }
    static float low(u32 packed) { return twin_bits<_Float16>(static_cast<u16>(packed)); }
    static float high(u32 packed) { return low(packed >> 16); }
    static __m256 floats(__m128i halves) { return _mm256_cvtph_ps(halves); }
    static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { twin_mma<Fp16>(d, a0, a1, a2, a3, b0, b1); }
};
inline u32 pack_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline u32 expand_e4m3(u32 codes, bool upper = false) {
    if (upper) codes >>= 16;
    return Fp16::pack(e4m3_value(codes & 0xff), e4m3_value(codes >> 8 & 0xff));
}
inline u32 add_halves(u32 a, u32 b) { return Fp16::pack(Fp16::low(a) + Fp16::low(b), Fp16::high(a) + Fp16::high(b)); }
template <class Format>
u32 pack_rest(float low, float high, u32 packed) {
    return Format::pack(low - Format::low(packed), high - Format::high(packed));
}
}  // namespace kog
