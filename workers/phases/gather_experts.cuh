// The input of DOWN in models with experts: activations of the chosen ones, of which a matrix warp has columns of one alone.
#pragma once
#include "gather_head.cuh"

namespace kog {

struct ExpertsGatherer : HeadGatherer {
#ifdef KOG_EXPERTS
    static constexpr u32 kWarpUnits = DownOp::kPer * 8, kWarpLoads = (kWarpUnits + 31) / 32;
    static_assert(kWarpLoads <= kMany, "what a thread holds");

#ifdef KOG_SLOTS_IN_TURN
    // Of the warp's parts, one of each tile, thread by thread. Parts go from warp to warp, and from expert to expert, the shared one the last.
    static constexpr u32 kPartUnits = DownOp::kXSteps * 8;
    static __device__ __forceinline__ u32 part_of(u32 warp, u32 unit) { return unit / kPartUnits * kMatrixWarps + warp; }
    __device__ __forceinline__ u32 slot_of_unit(int i) const {
        const u32 slot = part_of(warp, i * 32 + lane) / kSlotParts;
        return kSharedParts == 0 ? slot : min(slot, static_cast<u32>(kChosen));
    }
    __device__ __forceinline__ u32 unit_of_slot(int i) const {
        return (part_of(warp, i * 32 + lane) - slot_of_unit(i) * kSlotParts) * kPartUnits + (i * 32 + lane) % kPartUnits;
    }
    // A thread's i-th unit among the lane's activations of all experts.
    __device__ __forceinline__ u32 unit_of_expert(const Place&, int i) const { return slot_of_unit(i) * (kFfn / 4) + unit_of_slot(i); }
    __device__ __forceinline__ bool has_unit(const Place&, int i) const {
        const u32 slot = slot_of_unit(i), columns = slot < kChosen ? kFfn : kSharedFfn;
        return i * 32 + lane < kWarpUnits && slot < kSlots && unit_of_slot(i) < columns / 4;
    }
    __device__ __forceinline__ const u64* activations(const Place& at, u32 token) { return source<kDownPhase>(at).words + token * kActivationStride; }
    // The place of the first expert of which this warp has no words.
    __device__ __forceinline__ u32 missing_slot(const Place& at, u32 tag) const {
        u32 behind = 1;
#pragma unroll
        for (int i = 0; i < kWarpLoads; ++i)
            if (has_unit(at, i) && tag_difference(got[i], tag) != 0) behind = max(behind, kSlots - slot_of_unit(i));
        return kSlots - __reduce_max_sync(kFullWarp, behind);
    }
#else
    // A thread's i-th unit among those of the lane's columns of the warp's expert. In front of them may be columns of a group of
    // quantised weights that the lane before has, and behind them padding: these are no units of it.
    __device__ __forceinline__ u32 unit_of_expert(const Place& at, int i) const {
        const u32 model_lane = (kRanks == 1 ? 0 : peers.rank * kLanes) + at.lane();
        const u32 skew = kExpertSkew == 0 ? 0 : model_lane * kExpertSkew % 32;
        return warp % kExpertWarps * kWarpUnits + i * 32 + lane - skew / 4;
    }
    __device__ __forceinline__ bool has_unit(const Place& at, int i) const {
        return i * 32 + lane < kWarpUnits && unit_of_expert(at, i) < kFfn / 4;
    }
    __device__ __forceinline__ const u64* activations(const Place& at, u32 token) {
        return source<kDownPhase>(at).words + token * kActivationStride + warp / kExpertWarps * (kFfn / 2);
    }
#endif
    // `kMissing`: only words that have another tag.
    template <bool kMissing>
    __device__ __forceinline__ void load_activations(const Place& at, u32 token = 0) {
        const Source from = source<kDownPhase>(at);
        const u64* words = activations(at, token);
#pragma unroll
        for (int i = 0; i < kWarpLoads; ++i)
            if (has_unit(at, i) && (!kMissing || tag_difference(got[i], from.tag) != 0)) got[i] = load_relaxed_x2(words + 2 * unit_of_expert(at, i));
    }
    // Read what is there of a token's activations; never waits.
    __device__ __forceinline__ void read_activations_ahead(const Place& at, u32 token) { load_activations<false>(at, token), loaded = true; }
    __device__ __forceinline__ bool have_activations(const Place& at, u32 tag) {
        u32 wrong = 0;
#pragma unroll
        for (int i = 0; i < kWarpLoads; ++i)
            if (has_unit(at, i)) wrong |= tag_difference(got[i], tag);
        return __all_sync(kFullWarp, wrong == 0);
    }
    // x of DOWN of a token; false: leave.
    __device__ __forceinline__ bool gather_activations(const Place& at, u32 token = 0) {
        const u32 tag = source<kDownPhase>(at).tag;
        if (!loaded) {
            if (!wait_until_near<kDownPhase>(role, at.lane(), at.index())) return false;
            load_activations<false>(at, token);
        }
        for (u32 rounds = 1; !have_activations(at, tag); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) {
#ifdef KOG_SLOTS_IN_TURN
                const u32 slot = missing_slot(at, tag), expert = slot < kChosen ? role.shared->chosen[token][slot] : kNumExperts;
                const u32 num_words = (slot < kChosen ? kFfn : kSharedFfn) / 2;
                const u64* words = activations(at, token) + slot * (kFfn / 2);
#else
                const u32 expert = role.shared->chosen[token][warp / kExpertWarps], num_words = kFfn / 2;
                const u64* words = activations(at, token);
#endif
                note_wait(kDownPhase, at.layer(), WaitNote::lane_and_expert(at.lane(), expert), tag, words, num_words);
            }
            load_activations<true>(at, token);
        }
        write_all<LayerX, kWarpLoads, kWarpUnits>([&](int i) { return has_unit(at, i) ? values(got[i]) : make_float4(0, 0, 0, 0); },
                                                  [&](int i) { return i * 32 + lane < kWarpUnits; }, token);
        loaded = false;
        __syncwarp();
        return true;
    }
#endif
};

}  // namespace kog
