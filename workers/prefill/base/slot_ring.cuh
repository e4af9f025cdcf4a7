// The turn of a producer or a consumer in a ring of slots in shared memory, with a barrier's parity of each.
#pragma once

namespace kog {

// A consumer begins with parity 0. A producer begins with 1: slots that nobody has filled yet count as empty.
template <u32 kNumSlots>
struct SlotRing {
    u32 slot = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kNumSlots) slot = 0, parity ^= 1;
    }
};

}  // namespace kog
