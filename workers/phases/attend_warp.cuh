// A warp of attention: who it is and where it stands. It is all that the parts of attention, in attend_*.cuh, have in common, and know by themselves.
#pragma once
#include "layout.cuh"

namespace kog {

// What a warp has, by its number: its team, whose warps have all rows.
__device__ __forceinline__ u32 team_of(u32 warp) { return kTeams == 1 ? 0 : warp / kTeamWarps; }
// The first of its tokens.
__device__ __forceinline__ u32 token_of(u32 warp) { return kTokens == 1 ? 0 : warp / kTokenWarps * kWarpTokens; }
// Of its team's warps: which batches are its.
__device__ __forceinline__ u32 share_of(u32 warp) { return kTeams == 1 ? warp : warp % kTeamWarps; }

// Changed by `attend` from product to product, and by SplitMerger, which counts items.
struct AttendWarp {
    const KogDecodeParams& params;
    const Role& role;
    u32 warp, lane;  // the warp is also the number of its team times kTeamWarps, and of its share of batches
    u32 num_items = 0, first_vector = 0, turn = 0, product = 0;  // products of earlier passes; the pass in this launch; the number of the QKV product
#ifdef KOG_COMPANY
    // Of the token that the warp has in this pass: its request's cache, its position, and whether its row goes there. A token that stands in for
    // another one appends nothing: rows are appended by the threads that read them as long as their request has this seat.
    u64 kv_ptr = 0;
    u32 position = 0;
    bool appends = true;

    __device__ __forceinline__ void sit(const Pass& pass) {
        const u32 token = token_of(warp), seat = pass.seat_of(token);
        kv_ptr = role.company.kv_ptr[seat], position = pass.position_of(token), appends = seat == token;
    }
#endif
    __device__ __forceinline__ u64 cache() const {
#ifdef KOG_COMPANY
        return kv_ptr;
#else
        return params.kv_ptr;
#endif
    }
    __device__ __forceinline__ bool is_appended() const {
#ifdef KOG_COMPANY
        return appends;
#else
        return true;
#endif
    }

    // The tag of a layer's words, computed anew each time: registers are full.
    __device__ __forceinline__ u32 tag_in(u32 layer) const {
        return layer_tag(load_shared_u32(role.base + KOG_OFFSET(passes[turn & 1].number)), layer);
    }
};

}  // namespace kog
