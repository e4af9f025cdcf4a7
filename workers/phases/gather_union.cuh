// The input of DOWN in passes of several tokens with experts: a matrix warp takes one expert of the union after the other, with activations of
// the tokens that have chosen it, its members.
#pragma once
#include "gather_experts.cuh"
#include "union.cuh"

namespace kog {

#ifdef KOG_UNION
// Members whose words are asked for together.
constexpr int kMembersAtOnce = 2 * kWarpLoads <= kUnitsAtOnce ? 2 : 1;
static_assert(kMembersAtOnce * kWarpLoads <= kTokens * kMany, "what a thread holds");

template <bool kMissing>
__device__ __forceinline__ void load_member(Gatherer& self, const Place& at, u32 slots, u32 token, int first) {
    const Source from = self.source<kDownPhase>(at);
    const u64* words = from.words + token * kActivationStride + slot_of(slots, token) * (kFfn / 2);
#pragma unroll
    for (int i = 0; i < kWarpLoads; ++i)
        if (has_unit(self, at, i) && (!kMissing || tag_difference(self.got[first + i], from.tag) != 0))
            self.got[first + i] = load_relaxed_x2(words + 2 * unit_of_expert(self, at, i));
}
__device__ __forceinline__ bool have_member(const Gatherer& self, const Place& at, u32 tag, int first) {
    u32 wrong = 0;
#pragma unroll
    for (int i = 0; i < kWarpLoads; ++i)
        if (has_unit(self, at, i)) wrong |= tag_difference(self.got[first + i], tag);
    return __all_sync(kFullWarp, wrong == 0);
}
template <bool kMissing>
__device__ __forceinline__ void load_members(Gatherer& self, const Place& at, u32 slots, u32 first) {
    if (first < kTokens) load_member<kMissing>(self, at, slots, first, 0);
    if constexpr (kMembersAtOnce == 2)
        if (const u32 second = next_member(slots, first + 1); second < kTokens) load_member<kMissing>(self, at, slots, second, kWarpLoads);
}
// Read what is there of an expert's first members; never waits.
__device__ __forceinline__ void read_members_ahead(Gatherer& self, const Place& at, u32 slots) {
    load_members<false>(self, at, slots, next_member(slots, 0)), self.loaded = true;
}
template <class X = LayerX>
__device__ __forceinline__ void write_member(Gatherer& self, const Place& at, u32 token, int first) {
    const auto unit = [&](int i) { return has_unit(self, at, i) ? values(self.got[first + i]) : make_float4(0, 0, 0, 0); };
    if constexpr (X::kIsInteger) {
        float4 v[kWarpLoads];
#pragma unroll
        for (int i = 0; i < kWarpLoads; ++i) v[i] = unit(i);
        X::template write<kWarpUnits / 32>(self.lane, self.role.base + KOG_OFFSET(x) + self.warp * (kMaxPer * kXStepBytes) + X::of_token(token), v);
    } else {
#pragma unroll
        for (int i = 0; i < kWarpLoads; ++i)
            if (i * 32 + self.lane < kWarpUnits) self.write_x<X>(self.place_of(i * 32 + self.lane, token), unit(i));
    }
}
// x of DOWN of the expert at a place of the union; those of other tokens are anything. False: leave.
__device__ __forceinline__ bool gather_members(Gatherer& self, const Place& at, u32 place, u32 slots) {
    const u32 tag = self.source<kDownPhase>(at).tag;
#pragma unroll 1
    for (u32 first = next_member(slots, 0); first < kTokens;) {
        const u32 second = kMembersAtOnce == 2 ? next_member(slots, first + 1) : kTokens;
        if (!self.loaded) load_members<false>(self, at, slots, first);
        for (u32 rounds = 1; !(have_member(self, at, tag, 0) && (second == kTokens || have_member(self, at, tag, kWarpLoads))); ++rounds) {
            if (must_leave(self.role.stopped())) return false;
            if (rounds % 1024 == 0) {
                const u64* words = self.source<kDownPhase>(at).words + first * kActivationStride + slot_of(slots, first) * (kFfn / 2);
                self.note_wait(kDownPhase, at.layer(), WaitNote::lane_and_expert(at.lane(), united_at(self.role, place)), tag, words, kFfn / 2);
            }
            load_members<true>(self, at, slots, first);
        }
        write_member(self, at, first, 0);
        if (second < kTokens) write_member(self, at, second, kWarpLoads);
        self.loaded = false, first = next_member(slots, (kMembersAtOnce == 2 ? second : first) + 1);
    }
    self.loaded = false;
    __syncwarp();
    return true;
}
#endif

}  // namespace kog
