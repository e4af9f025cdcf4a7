// Experts in a pass of several tokens. Its union, all experts that any of its tokens has chosen, stands in ascending order in `united`; an
// expert's number there is its place. A token's chosen experts have slots, also in ascending order: so many as one token alone has. Each
// expert's weights are read once for all tokens that have chosen it. Whose rows and columns are multiplied when, and by whom, does not
// matter to bits: a sum of GATE_UP is of one expert, and DOWN's partial sums lie by slots for the finaliser, as a single token's do.
#pragma once
#include "layout.cuh"

#ifdef KOG_UNION
namespace kog {

static_assert(kTokens > 1 && kOneStream && kPacked, "passes of several tokens");
static_assert(kTokens * kChosen <= 32, "a thread for each slot of each token");

constexpr u64 kUnitedBlockBytes = kExpertCtas * GateUpOp::block_bytes(GateUpOp::kRows);  // of GATE_UP, of all thread blocks that share an expert

// Of each token 8 bits: the slot in which it has an expert, or none.
constexpr u32 kNoSlot = 0xff, kNoSlots = 0xffffffff;
__device__ __forceinline__ u32 slot_of(u32 slots, u32 token) { return slots >> 8 * token & 0xff; }
// The first token from `from` on that has the expert, or kTokens.
__device__ __forceinline__ u32 next_member(u32 slots, u32 from) {
    u32 found = kTokens;
#pragma unroll
    for (int token = kTokens - 1; token >= 0; --token)
        if (static_cast<u32>(token) >= from && slot_of(slots, token) != kNoSlot) found = token;
    return found;
}
__device__ __forceinline__ u32 num_united(const Role& role) { return load_shared_u32(role.base + KOG_OFFSET(num_united)); }
__device__ __forceinline__ u32 united_at(const Role& role, u32 place) { return load_shared_u32(role.base + KOG_OFFSET(united) + place * 4); }
__device__ __forceinline__ u32 slots_at(const Role& role, u32 place) { return load_shared_u32(role.base + KOG_OFFSET(united_slots) + place * 4); }

// The blocks of rows of GATE_UP that a thread block has: of each kExpertCtas-th part of an expert's rows, first blocks first. They are dealt
// to kChosen groups of thread blocks in turn. Where all tokens have chosen the same, they are those of a single token.
struct UnitedBlocks {
    u32 num, place, block = 0;  // places; those of the next block

    __device__ __forceinline__ UnitedBlocks(const Role& role) : num(num_united(role)), place(role.cta / kExpertCtas) {}
    __device__ __forceinline__ bool is_left() const { return block < GateUpOp::kBlocks; }
    __device__ __forceinline__ bool is_last_block() const { return block + 1 == GateUpOp::kBlocks; }
    __device__ __forceinline__ void go_on() {
        place += kChosen;
        if (place >= num) place -= num, ++block;
    }
};

}  // namespace kog
#endif
