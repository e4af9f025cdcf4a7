// Bounded waits. A waiting loop only looks at `stopped`, in shared memory: it is inlined in many places and must stay small. The
// watchdog warp of each thread block keeps the time: when its matrix warps have stood at one place for too long, it records what
// they wait for, raises the device's abort mirror, and stops its thread block; the other watchdogs see the mirror. So every wait of
// the device ends: well, or within 9/8 of the limit. After a wait that did not end well the caller must unwind without publishing.
#pragma once
#include "abi.cuh"
#include "words.cuh"

namespace kog {

constexpr u32 kNowhere = ~0u;  // no layer: a record counts from 1

// In shared memory. Where the matrix warps stand: `num_waits` is counted by the first of them, the rest is written by any that polls
// long, before the limit. Read by the watchdog.
struct WaitNote {
    volatile u32 stopped;               // this thread block is leaving
    volatile u32 num_waits;             // counts the places
    volatile u32 phase, layer, lane;    // whose input is waited for; the phase counts from 1, 0: nothing was noted; the lane may have an expert
    volatile u32 wanted;                // the tag
    // The words that must carry it, in one piece: of two warps that write at once, not the place by one and the number by the other.
    volatile u64 packed_words;
    static constexpr u32 kPlaceBits = 46, kMostWords = (1u << (64 - kPlaceBits)) - 1;  // of an address, but for the lowest three
    __device__ __forceinline__ void set_words(const u64* words, u64 num_words) volatile {
        packed_words = reinterpret_cast<u64>(words) >> 3 | num_words << kPlaceBits;
    }
    // What the record has in `lane`, from 1 on: the lane in the lower half, the expert in the upper one.
    static __device__ __forceinline__ u32 lane_and_expert(u32 lane, u32 expert) { return lane + (expert + 1) * 0x10000u; }
};

// The waits below take shared-memory addresses; `stopped` is that of WaitNote::stopped.

// Whether this thread block is leaving. Called by a full warp, and the same in all its threads even when the flag changes meanwhile:
// a warp of which only some threads leave would wait for them for ever.
__device__ __forceinline__ bool must_leave(u32 stopped) { return __any_sync(kFullWarp, load_shared_u32(stopped) != 0); }

// Wait for a barrier's phase. Called by a full warp; the answer is the same in all its threads.
__device__ __forceinline__ bool mbar_wait(u32 stopped, u32 bar, u32 parity) {
    while (!__all_sync(kFullWarp, mbar_try(bar, parity)))
        if (must_leave(stopped)) return false;
    return true;
}

// The same for one thread; `finished` ends the wait early, too.
__device__ __forceinline__ bool mbar_wait_alone(u32 stopped, u32 bar, u32 parity, u32 finished) {
    while (!mbar_try(bar, parity))
        if (load_shared_u32(stopped) || load_shared_u32(finished)) return false;
    return true;
}

// Wait until a counter in shared memory has reached `wanted`, looking at it every kSleepNs: as rarely as the caller can bear, since looks
// at shared memory hold up the warps that read weights from it. Called by full warps.
template <u32 kSleepNs>
__device__ __forceinline__ bool counter_wait(u32 stopped, u32 counter, u32 wanted) {
    while (!__all_sync(kFullWarp, static_cast<int>(load_shared_u32(counter) - wanted) >= 0)) {
        if (must_leave(stopped)) return false;
        __nanosleep(kSleepNs);
    }
    return true;
}

// One thread keeps the time for its thread block until `finished`.
struct Watchdog {
    WaitNote& note;
    u32* abort_mirror;      // in device memory: somebody called an abort
    KogWaitRecord* record;  // written by the watchdog that raised the mirror
    u64 limit_ns;
    u32 num_waits = 0;
    u64 since_ns = 0;

    // How many words that the matrix warps polled last are missing; the tag of the first of them. None: the note is of a wait that is
    // over.
    __device__ __forceinline__ u32 num_missing(u32& seen) const {
        const u32 tag = seen = note.wanted;
        const u64 packed = note.packed_words;
        const u64* words = reinterpret_cast<const u64*>((packed & ((u64{1} << WaitNote::kPlaceBits) - 1)) << 3);
        u32 missing = 0;
#pragma unroll 1
        for (u32 i = 0; i < packed >> WaitNote::kPlaceBits; ++i) {
            const u64 word = load_relaxed(words + i);
            if (!has_tag(word, tag) && missing++ == 0) seen = tag_of(word);
        }
        return missing;
    }
    __device__ __forceinline__ void write_record(u64 elapsed_ns, u32 missing, u32 seen) {
        record->cta = blockIdx.x + 1;
        record->phase = note.phase;
        if (note.phase != 0) record->layer = note.layer + 1, record->lane = note.lane + 1;
        record->op = 1, record->num_missing = missing;
        record->epoch_wanted = note.wanted, record->epoch_seen = seen, record->elapsed_ns = elapsed_ns;
    }

    // Once in a while. False: the thread block is leaving.
    __device__ __forceinline__ bool look() {
        const u64 now = globaltimer_ns();
        if (since_ns == 0 || note.num_waits != num_waits) num_waits = note.num_waits, since_ns = now;
        if (now - since_ns > limit_ns) {
            u32 seen;
            const u32 missing = num_missing(seen);
            // Who misses nothing leaves it to others to say what is missing, for a while.
            if (missing > 0 || now - since_ns > limit_ns + limit_ns / 8) {
                if (atomicCAS(abort_mirror, 0u, 1u) == 0) write_record(now - since_ns, missing, seen);
                note.stopped = 1;
            }
        }
        if (load_relaxed_u32(abort_mirror) != 0) note.stopped = 1;
        return note.stopped == 0;
    }
};

}  // namespace kog
