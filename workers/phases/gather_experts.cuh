// The input of DOWN in models with experts: activations of the chosen ones, of which a matrix warp has columns of one alone.
#pragma once
#include "gather_head.cuh"

namespace kog {

#ifdef KOG_EXPERTS
constexpr u32 kWarpUnits = DownOp::kPer * 8, kWarpLoads = (kWarpUnits + 31) / 32;
static_assert(kWarpLoads <= kMany, "what a thread holds");

#ifdef KOG_SLOTS_IN_TURN
// Of the warp's parts, one of each tile, thread by thread. Parts go from warp to warp, and from expert to expert, the shared one the last.
constexpr u32 kPartUnits = DownOp::kXSteps * 8;
__device__ __forceinline__ u32 part_of(u32 warp, u32 unit) { return unit / kPartUnits * kMatrixWarps + warp; }
__device__ __forceinline__ u32 slot_of_unit(const Gatherer& self, int i) {
    const u32 slot = part_of(self.warp, i * 32 + self.lane) / kSlotParts;
    return kSharedParts == 0 ? slot : min(slot, static_cast<u32>(kChosen));
}
__device__ __forceinline__ u32 unit_of_slot(const Gatherer& self, int i) {
    return (part_of(self.warp, i * 32 + self.lane) - slot_of_unit(self, i) * kSlotParts) * kPartUnits + (i * 32 + self.lane) % kPartUnits;
}
// A thread's i-th unit among the lane's activations of all experts.
__device__ __forceinline__ u32 unit_of_expert(const Gatherer& self, const Place&, int i) {
    return slot_of_unit(self, i) * (kFfn / 4) + unit_of_slot(self, i);
}
__device__ __forceinline__ bool has_unit(const Gatherer& self, const Place&, int i) {
    const u32 slot = slot_of_unit(self, i), columns = slot < kChosen ? kFfn : kSharedFfn;
    return i * 32 + self.lane < kWarpUnits && slot < kSlots && unit_of_slot(self, i) < columns / 4;
}
__device__ __forceinline__ const u64* chosen_activations(const Gatherer& self, const Place& at, u32 token) {
    return self.source<kDownPhase>(at).words + token * kActivationStride;
}
// The place of the first expert of which this warp has no words.
__device__ __forceinline__ u32 missing_slot(const Gatherer& self, const Place& at, u32 tag) {
    u32 behind = 1;
#pragma unroll
    for (int i = 0; i < kWarpLoads; ++i)
        if (has_unit(self, at, i) && tag_difference(self.got[i], tag) != 0) behind = max(behind, kSlots - slot_of_unit(self, i));
    return kSlots - __reduce_max_sync(kFullWarp, behind);
}
#else
// A thread's i-th unit among those of the lane's columns of the warp's expert. In front of them may be columns of a group of
// quantised weights that the lane before has, and behind them padding: these are no units of it.
__device__ __forceinline__ u32 unit_of_expert(const Gatherer& self, const Place& at, int i) {
    const u32 model_lane = (kRanks == 1 ? 0 : self.peers.rank * kLanes) + at.lane();
    const u32 skew = kExpertSkew == 0 ? 0 : model_lane * kExpertSkew % 32;
    return self.warp % kExpertWarps * kWarpUnits + i * 32 + self.lane - skew / 4;
}
__device__ __forceinline__ bool has_unit(const Gatherer& self, const Place& at, int i) {
    return i * 32 + self.lane < kWarpUnits && unit_of_expert(self, at, i) < kFfn / 4;
}
__device__ __forceinline__ const u64* chosen_activations(const Gatherer& self, const Place& at, u32 token) {
    return self.source<kDownPhase>(at).words + token * kActivationStride + self.warp / kExpertWarps * (kFfn / 2);
}
#endif
// `kMissing`: only words that have another tag.
template <bool kMissing>
__device__ __forceinline__ void load_activations(Gatherer& self, const Place& at, u32 token = 0) {
    const Source from = self.source<kDownPhase>(at);
    const u64* words = chosen_activations(self, at, token);
#pragma unroll
    for (int i = 0; i < kWarpLoads; ++i)
        if (has_unit(self, at, i) && (!kMissing || tag_difference(self.got[i], from.tag) != 0))
            self.got[i] = load_relaxed_x2(words + 2 * unit_of_expert(self, at, i));
}
// Read what is there of a token's activations; never waits.
__device__ __forceinline__ void read_activations_ahead(Gatherer& self, const Place& at, u32 token) {
    load_activations<false>(self, at, token);
    self.loaded = true;
}
__device__ __forceinline__ bool have_activations(const Gatherer& self, const Place& at, u32 tag) {
    u32 wrong = 0;
#pragma unroll
    for (int i = 0; i < kWarpLoads; ++i)
        if (has_unit(self, at, i)) wrong |= tag_difference(self.got[i], tag);
    return __all_sync(kFullWarp, wrong == 0);
}
// x of DOWN of a token; false: leave.
__device__ __forceinline__ bool gather_activations(Gatherer& self, const Place& at, u32 token = 0) {
    const u32 tag = self.source<kDownPhase>(at).tag;
    if (!self.loaded) {
        if (!wait_until_near<kDownPhase>(self.role, at.lane(), at.index())) return false;
        load_activations<false>(self, at, token);
    }
    for (u32 rounds = 1; !have_activations(self, at, tag); ++rounds) {
        if (must_leave(self.role.stopped())) return false;
        if (rounds % 1024 == 0) {
#ifdef KOG_SLOTS_IN_TURN
            const u32 slot = missing_slot(self, at, tag), expert = slot < kChosen ? self.role.shared->chosen[token][slot] : kNumExperts;
            const u32 num_words = (slot < kChosen ? kFfn : kSharedFfn) / 2;
            const u64* words = chosen_activations(self, at, token) + slot * (kFfn / 2);
#else
            const u32 expert = self.role.shared->chosen[token][self.warp / kExpertWarps], num_words = kFfn / 2;
            const u64* words = chosen_activations(self, at, token);
#endif
            self.note_wait(kDownPhase, at.layer(), WaitNote::lane_and_expert(at.lane(), expert), tag, words, num_words);
        }
        load_activations<true>(self, at, token);
    }
    self.write_all<LayerX, kWarpLoads, kWarpUnits>([&](int i) { return has_unit(self, at, i) ? values(self.got[i]) : make_float4(0, 0, 0, 0); },
                                               [&](int i) { return i * 32 + self.lane < kWarpUnits; }, token);
    self.loaded = false;
    __syncwarp();
    return true;
}
#endif

}  // namespace kog
