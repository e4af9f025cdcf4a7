// Bounded waits for words that other ranks (or other thread blocks) write, and the record of one that did not end.
//
// A waiting warp polls local memory and looks at `stopped` in shared memory; it never reads a clock. When it has polled for long it
// leaves a note. A watchdog thread keeps the time of the notes: past the limit it writes the wait record, raises the device's abort
// mirror and stops the thread block. It also brings the host's abort word to the mirror, so that only one thread reads over PCIe.
#pragma once
#include "wait.cuh"

namespace kog {

constexpr u32 kNoRow = ~0u;
constexpr u32 kRoundsBeforeNote = 256;

// In shared memory, one for each warp that waits. Written by that warp, read by the watchdog.
struct PeerNote {
    volatile u32 waiting;  // 0, or the number of the wait
    volatile u32 op, mailbox, slot, wanted;
    volatile u32 num_rows, own_row, row_words, num_words;  // words i < num_words of each row; `own_row` is not waited for
    volatile u32 tag_bit;  // the lowest bit of a word's tag, which reaches to the end
    const u64* volatile words;
};

// What a wait is about; for the record only.
struct PeerPlace {
    u32 op, mailbox, slot;
};

// Called by one thread of the waiting warp.
__device__ __forceinline__ void begin_note(PeerNote& note, u32 number, const PeerPlace& place, u32 wanted, const u64* words,
                                           u32 num_words, u32 num_rows, u32 own_row, u32 row_words, u32 tag_bit = 32) {
    note.op = place.op, note.mailbox = place.mailbox, note.slot = place.slot, note.wanted = wanted;
    note.words = words, note.num_words = num_words;
    note.num_rows = num_rows, note.own_row = own_row, note.row_words = row_words, note.tag_bit = tag_bit;
    note.waiting = number;
}

// `number`: of the wait. It may have ended meanwhile, and the warp may write its next note: what was copied is of this wait only if the
// number is still there afterwards; else nothing is missing.
__device__ __forceinline__ void write_peer_record(const PeerNote& note, u32 number, u32 rank, u64 elapsed_ns, KogWaitRecord* record) {
    const u32 op = note.op, mailbox = note.mailbox, slot = note.slot, wanted = note.wanted, own_row = note.own_row;
    const u32 row_words = note.row_words, num_words = note.num_words, tag_bit = note.tag_bit, all_rows = note.num_rows;
    const u64* words = note.words;
    const u32 num_rows = note.waiting == number ? all_rows : 0;
    u32 missing = 0, peer = rank, seen = wanted;
#pragma unroll 1
    for (u32 row = 0; row < num_rows; ++row) {
        if (row == own_row) continue;
#pragma unroll 1
        for (u32 i = 0; i < num_words; ++i) {
            const u64 word = load_system(words + row * row_words + i);
            const u32 tag = static_cast<u32>(word >> tag_bit);
            if (tag != wanted && missing++ == 0) peer = num_rows > 1 ? row : rank, seen = tag;
        }
    }
    record->rank = rank, record->cta = blockIdx.x + 1, record->phase = 0;
    record->op = op, record->mailbox = mailbox, record->slot = slot;
    record->peer = peer, record->num_missing = missing;
    record->epoch_wanted = wanted, record->epoch_seen = seen;
    record->elapsed_ns = elapsed_ns;
}

// One thread keeps the time for its thread block.
template <int kNotes>
struct PeerWatchdog {
    const PeerNote* notes;
    volatile u32* stopped;      // in shared memory: this thread block is leaving
    u32* abort_mirror;          // in device memory: somebody called an abort
    const u32* host_abort;      // the host's abort word, read by the first thread block
    KogWaitRecord* record;      // written by the thread that raised the mirror
    u32 rank;
    u64 limit_ns;
    u32 number[kNotes] = {};
    u64 since_ns[kNotes] = {};

    // Once in a while. False: the thread block is leaving.
    __device__ __forceinline__ bool look() {
        if (blockIdx.x == 0 && load_system_u32(host_abort) != 0) atomicExch(abort_mirror, 1u);
        const u64 now = globaltimer_ns();
        u64 waited_ns = 0;
        int late = 0;
        u32 late_number = 0;
#pragma unroll
        for (int i = 0; i < kNotes; ++i) {
            const u32 waiting = notes[i].waiting;
            if (waiting == 0 || waiting != number[i]) number[i] = waiting, since_ns[i] = now;
            if (now - since_ns[i] > limit_ns) late = i, late_number = number[i], waited_ns = now - since_ns[i];
        }
        if (waited_ns != 0) {
            if (atomicCAS(abort_mirror, 0u, 1u) == 0) write_peer_record(notes[late], late_number, rank, waited_ns, record);
            *stopped = 1;
        }
        if (load_relaxed_u32(abort_mirror) != 0) *stopped = 1;
        return *stopped == 0;
    }
};

}  // namespace kog
