// The one bounded wait of the device. Every polling loop asks `give_up` once in a while: it answers yes when the thread block is
// leaving, or when this wait has lasted too long. Polling code is inlined in many places, so it only notes what it waited for; the
// watchdog warp of the thread block writes the record, raises the device's abort mirror, and looks at the mirror for all others.
// After a wait that did not end well the caller must unwind without publishing.
#pragma once
#include "ptx.cuh"

namespace kog {

// In shared memory.
struct WaitNote {
    volatile u32 stopped;     // this thread block is leaving
    volatile u32 timed_out;   // one of its waits has lasted too long; the rest says which
    volatile u32 phase, layer, lane, wanted, seen;
};

struct Watch {
    WaitNote* note;
    u32 limit_us;  // at most 2 s
};

// Where a wait stands: what the record shows as `phase`, `slot` (the layer) and `mailbox` (the lane).
struct Place {
    u32 phase, layer, lane;
};

// A clock in units of 1.024 us.
__device__ __forceinline__ u32 clock_us() { return static_cast<u32>(globaltimer_ns() >> 10); }

__device__ __forceinline__ bool give_up(const Watch& watch, u32& since_us, const Place& place, u32 wanted, u32 seen, u32 patience = 1) {
    if (watch.note->stopped) return true;
    const u32 now = clock_us() | 1;
    if (since_us == 0) since_us = now;
    if (now - since_us < watch.limit_us * patience) return false;
    watch.note->phase = place.phase, watch.note->layer = place.layer, watch.note->lane = place.lane;
    watch.note->wanted = wanted, watch.note->seen = seen;
    watch.note->timed_out = 1;
    watch.note->stopped = 1;
    return true;
}

// The watchdog's part, once in a while, by one thread. False: the thread block is leaving.
__device__ __forceinline__ bool watch_over(const Watch& watch, u32* abort_mirror, KogWaitRecord* record) {
    WaitNote& note = *watch.note;
    if (note.timed_out) {
        if (atomicCAS(abort_mirror, 0u, 1u) == 0) {
            record->cta = blockIdx.x;
            record->phase = note.phase, record->slot = note.layer, record->mailbox = note.lane;
            record->op = 1, record->num_missing = 1;
            record->epoch_wanted = note.wanted, record->epoch_seen = note.seen;
            record->elapsed_ns = static_cast<u64>(watch.limit_us) * 1024;
        }
        return false;
    }
    if (load_relaxed_u32(abort_mirror) != 0) note.stopped = 1;
    return note.stopped == 0;
}

// Wait for a barrier's phase. Called by a full warp, and the answer is the same in all its threads.
__device__ __forceinline__ bool mbar_wait(const Watch& watch, u32 bar, u32 parity, const Place& place) {
    if (__all_sync(kFullWarp, mbar_try(bar, parity))) return true;
    u32 since_us = 0;
    for (u32 polls = 1;; ++polls) {
        if (__all_sync(kFullWarp, mbar_try(bar, parity))) return true;
        if ((polls & 15) == 0 && __any_sync(kFullWarp, give_up(watch, since_us, place, parity, parity ^ 1, 2))) return false;
    }
}

// The same for one thread; `finished` ends the wait early, without an abort.
__device__ __forceinline__ bool mbar_wait_alone(const Watch& watch, u32 bar, u32 parity, const Place& place, volatile u32* finished) {
    u32 since_us = 0;
    for (u32 polls = 1; !mbar_try(bar, parity); ++polls) {
        if (*finished) return false;
        if ((polls & 15) == 0 && give_up(watch, since_us, place, parity, parity ^ 1, 2)) return false;
    }
    return true;
}

}  // namespace kog
