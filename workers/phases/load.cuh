// The loader: one thread streams the tape into the ring, ahead of everything, and never looks at what the weights are for.
#pragma once
#include "union.cuh"

namespace kog {

__device__ __forceinline__ void init_ring(const Role& role) {
    for (int i = 0; i < kRingPieces; ++i) {
        mbar_init(role.base + KOG_OFFSET(full[i]), 1);
        mbar_init(role.base + KOG_OFFSET(empty[i]), kPieceWarps);
    }
}

// Copies are of pieces of tiles, so that how much is under way can be bounded finely: less leaves memory idle, and with more the polls
// of those who wait for words queue behind it. A piece has 0.25 us where tiles are halved, so the way through here is kept short.
struct Loader {
    const Role& role;
    u64 policy;
    const unsigned char* source;  // of the next copy
    u32 first_full, full, slot;   // barriers of the first piece in the ring and of the next copy, whose slot begins at `slot`
    u32 parity = 1;               // of the `empty` barriers to wait for, which start as if they had been passed
    // Of a packed ring: the oldest tile that may still be read, its barrier and where it begins, and how many there are from it on.
    u32 oldest, oldest_at, oldest_parity = 0, num_kept = 0;
    u32 landing, landing_parity = 0, num_under_way = 0;  // barrier of the oldest copy that was not seen to land
    u32 most = kPiecesInFlight;                          // that may be under way
#ifdef KOG_EXPERTS
    const unsigned char* experts = nullptr;  // of all layers
    u32 chosen[kChosen];                     // of the layer whose DOWN comes next
    u32 choice_parity = 0;
    const unsigned char* ahead = nullptr;  // what L2 is asked for next, so many times more, and when it was last
    u32 num_ahead = 0, asked_at = 0;
    u32 num_products = 0, asks_behind = 0;  // of this launch: products that were issued; L2 is asked when so many are done
#endif

    static constexpr u32 kEmptyOffset = kRingPieces * 8;  // from a piece's `full` to its `empty`

    __device__ __forceinline__ Loader(const Role& role_)
        : role(role_), policy(evict_first_policy()), first_full(role_.base + KOG_OFFSET(full)), full(first_full),
          slot(role_.base + KOG_OFFSET(ring)), oldest(first_full), oldest_at(slot), landing(first_full) {}

    // The first look is not in the loop: there the compiler lets other warps go first, which takes 60 cycles each time.
    __device__ __forceinline__ bool wait(u32 bar, u32 its_parity, u32 finished) {
        return mbar_try(bar, its_parity) || mbar_wait_alone(role.stopped(), bar, its_parity, finished);
    }
    // The same where memory has nothing to do meanwhile.
    __device__ __forceinline__ bool wait_idle(u32 bar, u32 its_parity) {
#ifdef KOG_EXPERTS
        while (num_ahead != 0) {
            if (mbar_test(bar, its_parity)) return true;
            if (load_shared_u32(role.stopped()) || load_shared_u32(role.base + KOG_OFFSET(finished))) return false;
            if (clock_cycles() - asked_at < kAheadCycles || static_cast<int>(role.shared->num_finalized - asks_behind) < 0) continue;
            prefetch_l2(ahead, kAheadBytes);
            ahead += kNumCtas * kAheadBytes, --num_ahead, asked_at = clock_cycles();
        }
#endif
        return wait(bar, its_parity, role.base + KOG_OFFSET(finished));
    }
    __device__ __forceinline__ void count_landed() {
        --num_under_way, landing += 8;
        if (landing == first_full + kEmptyOffset) landing = first_full, landing_parity ^= 1;
    }
    __device__ __forceinline__ bool wait_for_landing() {
        if (!wait(landing, landing_parity, role.stopped())) return false;
        count_landed();
        return true;
    }
    __device__ __forceinline__ bool limit(u32 count) {
        most = count;
        while (num_under_way > most)
            if (!wait_for_landing()) return false;
        return true;
    }
    // Where a tile's beginning is noted, by its barrier.
    __device__ __forceinline__ u32 place_of(u32 full_barrier) const { return role.base + KOG_OFFSET(places) + (full_barrier - first_full) / 2; }
    // Wait until a tile of `bytes` fits behind the newest one, or at the ring's beginning, and a barrier is free; `slot`: where.
    __device__ __forceinline__ bool make_room(u32 bytes) {
        const u32 ring = role.base + KOG_OFFSET(ring), end = ring + kRingBytes;
        const bool wraps = slot + bytes > end;
        while (num_kept != 0) {
            const bool fits = wraps ? oldest_at < slot && ring + bytes <= oldest_at : oldest_at < slot || slot + bytes <= oldest_at;
            if (fits && num_kept < kNumSlots) break;
            if (!wait_idle(oldest + kEmptyOffset, oldest_parity)) return false;
            --num_kept, oldest += 8;
            if (oldest == first_full + kEmptyOffset) oldest = first_full, oldest_parity ^= 1;
            oldest_at = load_shared_u32(place_of(oldest));
        }
        if (wraps) slot = ring;
        if (num_kept++ == 0) oldest_at = slot;
        store_shared(place_of(full), slot);
        return true;
    }
    __device__ __forceinline__ bool issue(u32 to, u32 bytes) {
        if (!kPacked && !wait(full + kEmptyOffset, parity, role.base + KOG_OFFSET(finished))) return false;
        mbar_arrive_expect(full, bytes);
        // All is prepared when the turn comes: between a landing and the next copy memory has less to do.
        if (num_under_way == most && !wait_for_landing()) return false;
        bulk_load(to, source, bytes, full, policy);
        source += bytes, full += 8, ++num_under_way;
        return true;
    }
    // Of a product: its first tiles lie at `tiles`, those of all thread blocks side by side. Only where parts are left out: of the tiles of
    // a block those behind the first `num_long` have `less` bytes less; the last block may have fewer rows.
    static constexpr bool kEven = QkvOp::kIsEven && DeltaInOp::kIsEven && OutOp::kIsEven && DeltaOutOp::kIsEven && GateUpOp::kIsEven && DownOp::kIsEven && HeadOp::kIsEven;
    struct Tiles {
        u32 count, bytes, of_block, num_long, less, last_bytes, last_less;
    };
    template <class O>
    static __device__ __forceinline__ Tiles tiles_of() {
        return {O::kBlocks * O::kTiles, O::kTileBytes, O::kTiles, O::kLongTiles, O::kTileBytes - O::kShortTileBytes, O::Last::kTileBytes,
                O::Last::kTileBytes - O::Last::kShortTileBytes};
    }
    __device__ __forceinline__ bool issue_uneven(const unsigned char*& tiles, const Tiles& of) {
        return issue_uneven(tiles, of, role.cta, kNumCtas);
    }
    // `cta` of the `num_ctas` thread blocks that have such tiles.
    __device__ __forceinline__ bool issue_uneven(const unsigned char*& tiles, const Tiles& of, u32 cta, u32 num_ctas) {
        u32 place = 0;
#pragma unroll 1
        for (u32 i = 0; i < of.count; ++i) {
            const bool is_last = i + of.of_block >= of.count;
            const u32 bytes = (is_last ? of.last_bytes : of.bytes) - (place < of.num_long ? 0 : is_last ? of.last_less : of.less);
            source = tiles + cta * bytes, tiles += u64{num_ctas} * bytes;
            if (++place == of.of_block) place = 0;
            if ((kPacked && !make_room(bytes)) || !issue(slot, bytes)) return false;
            slot += kPacked ? bytes : kSlotBytes;
            if (full == first_full + kEmptyOffset) full = first_full, slot -= kPacked ? 0 : kNumSlots * kSlotBytes, parity ^= 1;
        }
        return true;
    }
    __device__ __forceinline__ bool issue_tiles(const unsigned char* tiles, u32 count, u32 bytes) {
        source = tiles + role.cta * bytes;
#pragma unroll 1
        for (u32 i = 0; i < count; ++i) {
            if (kPacked && !make_room(bytes)) return false;
#pragma unroll
            for (u32 k = 0; k < kPieces; ++k)
                if (!issue(slot + k * kPieceBytes, bytes / kPieces)) return false;
            source += (kNumCtas - 1) * bytes, slot += kPacked ? bytes : kSlotBytes;
            if (full == first_full + kEmptyOffset) full = first_full, slot -= kPacked ? 0 : kNumSlots * kSlotBytes, parity ^= 1;
        }
        return true;
    }
    __device__ __forceinline__ bool issue_pass(const unsigned char* tape, u32 turn) {
        const unsigned char* tiles = tape + (kHeadOnly ? kNumCtas * kLayerBytes : 0);
        const bool is_near = role.shared->newest_position < kNearContext;  // perhaps of the pass before
        if (!limit(is_near ? kPiecesInFlight : kFarPiecesInFlight)) return false;
#pragma unroll 1
        for (u32 number = first_product(); number < kNumProducts + (has_head(role, turn) ? kHeadProducts : 0); ++number) {
            const Place at(number);
#ifdef KOG_EXPERTS
            if (!issue_with_experts(tiles, at, is_near)) return false;
            ++num_products;
#else
            if constexpr (!kEven) {
                Tiles of = tiles_of<HeadOp>();
                if (!at.is_last()) {
                    if (at.phase() == kQkvPhase) of = has_delta_net(at.layer()) ? tiles_of<DeltaInOp>() : tiles_of<QkvOp>();
                    if (at.phase() == kOutPhase) of = kPlainNetOutputs && has_delta_net(at.layer()) ? tiles_of<DeltaOutOp>() : tiles_of<OutOp>();
                    if (at.phase() == kGateUpPhase) of = tiles_of<GateUpOp>();
                    if (at.phase() == kDownPhase) of = tiles_of<DownOp>();
                }
                if (!issue_uneven(tiles, of)) return false;
                continue;
            }
            u32 count = HeadOp::kBlocks * HeadOp::kTiles, bytes = HeadOp::kTileBytes;
            if (!at.is_last()) {
                if (at.phase() == kQkvPhase) count = QkvOp::kBlocks * QkvOp::kTiles, bytes = QkvOp::kTileBytes;
                if (at.phase() == kQkvPhase && has_delta_net(at.layer())) count = DeltaInOp::kBlocks * DeltaInOp::kTiles, bytes = DeltaInOp::kTileBytes;
                if (at.phase() == kOutPhase) count = OutOp::kBlocks * OutOp::kTiles, bytes = OutOp::kTileBytes;
                if (kPlainNetOutputs && at.phase() == kOutPhase && has_delta_net(at.layer())) count = DeltaOutOp::kBlocks * DeltaOutOp::kTiles, bytes = DeltaOutOp::kTileBytes;
                if (at.phase() == kGateUpPhase) count = GateUpOp::kBlocks * GateUpOp::kTiles, bytes = GateUpOp::kTileBytes;
                if (at.phase() == kDownPhase) count = DownOp::kBlocks * DownOp::kTiles, bytes = DownOp::kTileBytes;
            }
            if (!issue_tiles(tiles, count, bytes)) return false;
            tiles += u64{kNumCtas} * count * bytes;
#endif
        }
        return true;
    }
#ifdef KOG_EXPERTS
    // Products of attention and the LM head, and the router, stand on the tape; experts where the choice says, which has to be awaited.
    // Their sizes are static, so all that comes behind them is read ahead as always.
    __device__ __forceinline__ bool issue_with_experts(const unsigned char*& tiles, const Place& at, bool near_context) {
        if (at.is_last()) return issue_uneven(tiles, tiles_of<HeadOp>());
        if (at.phase() == kQkvPhase) return issue_uneven(tiles, has_delta_net(at.layer()) ? tiles_of<DeltaInOp>() : tiles_of<QkvOp>());
        if (at.phase() == kOutPhase) {
            if (at.lane() == 0) begin_ahead(tiles, near_context);
            return issue_uneven(tiles, kPlainNetOutputs && has_delta_net(at.layer()) ? tiles_of<DeltaOutOp>() : tiles_of<OutOp>());
        }
#ifdef KOG_UNION
        if (at.phase() == kDownPhase) return issue_down_of_union(at);
#elif defined KOG_SLOTS_IN_TURN
        if (at.phase() == kDownPhase) return issue_down_in_turn(tiles, at);
#else
        if (at.phase() == kDownPhase) return issue_down(at);
#endif
        if (!issue_uneven(tiles, tiles_of<RouteOp>())) return false;
#ifdef KOG_SHARED_EXPERT
        if (!issue_uneven(tiles, tiles_of<SharedGateUpOp>())) return false;
#endif
#pragma unroll 1
        for (u32 token = 0; token < kReadChoices; ++token) {
            if (kWaitsForChoice && !wait_idle(role.base + KOG_OFFSET(choice_full[token]), choice_parity)) return false;
            if (token + 1 == kReadChoices) choice_parity ^= 1;
            num_ahead = 0;
#ifdef KOG_UNION
            if (!issue_gate_up_of_union(at)) return false;
#else
            if (!issue_gate_up_of_shares(at, token)) return false;
#endif
        }
        return true;
    }
#ifndef KOG_UNION
    // The shares of a token's chosen experts that this thread block has.
    __device__ __forceinline__ bool issue_gate_up_of_shares(const Place& at, u32 token) {
        const u32 num = num_shares(role.cta);
#pragma unroll 1
        for (u32 i = 0; i < num; ++i) {
            const u32 share = role.cta * kExpertShares + i;
            const unsigned char* own = experts_of(at.layer()) + u64{chosen_at(token, share / kExpertCtas)} * kExpertBytes;
            if (!issue_uneven(own, tiles_of<GateUpOp>(), share % kExpertCtas, kExpertCtas)) return false;
        }
        read_choice(token);
        return true;
    }
#endif
    // Between QKV and the choice the ring is full, or nothing is known that could be copied: L2 is asked for the next layer's QKV (or what a delta
    // net has in its place), which stands behind OUT, the router and a shared expert, or for the LM head. Each thread block asks for a share of what all need, piece by piece in time, so
    // that words do not queue behind them; far into a context when attention has read its rows. Experts' copies leave L2 first.
    static constexpr u32 kAheadBytes = 4096, kAheadCycles = 400, kMostAhead = LayerWeights::kCoded ? 0 : 40;
    __device__ __forceinline__ void begin_ahead(const unsigned char* out, bool near_context) {
        constexpr u64 kQkvBytes = kQkvProductsOfLayer * kOpBytes<QkvOp>, kNetBytes = kDeltaInProductsOfLayer * kOpBytes<DeltaInOp>;
        constexpr u64 kInputBytes = kQkvBytes < kNetBytes ? kQkvBytes : kNetBytes, kNextBytes = kInputBytes < kOpBytes<HeadOp> ? kInputBytes : kOpBytes<HeadOp>;
        constexpr u32 kPieces = static_cast<u32>(kNextBytes / kAheadBytes), kAsked = kPieces < kMostAhead ? kPieces : kMostAhead;
        if constexpr (!kWaitsForChoice || kAsked == 0) return;
        ahead = out + kNumCtas * (kLanes * kOpBytes<OutOp> + kRouteBytes + kSharedExpertBytes) + role.cta * kAheadBytes;
        num_ahead = kAsked, asked_at = clock_cycles(), asks_behind = near_context ? num_products : num_products + 1;
    }
    // Where the experts of a layer begin.
    __device__ __forceinline__ const unsigned char* experts_of(u32 layer) const { return experts + u64{layer * kNumExperts} * kExpertBytes; }
    __device__ __forceinline__ u32 chosen_at(u32 token, u32 place) const {
        return load_shared_u32(role.base + KOG_OFFSET(chosen) + (token * kChosen + place) * 4);
    }
    __device__ __forceinline__ void read_choice(u32 token) {
#pragma unroll
        for (u32 k = 0; k < kChosen; ++k) chosen[k] = chosen_at(token, k);
    }
#ifdef KOG_SLOTS_IN_TURN
    // Columns of DOWN come one expert behind the other, so a tile has all that some experts have in this thread block, in one piece each, and
    // perhaps a beginning and an end of others. Those of a shared expert are the last, from the tape.
    __device__ __forceinline__ bool issue_down_in_turn(const unsigned char*& tiles, const Place& at) {
        static_assert(kExpertBytes < (u64{1} << 32) && kPacked, "a multiplication of 32 bits");
        constexpr u32 kOfChosen = kChosen * kSlotParts, kParts = kOfChosen + kSharedParts, kPartBytes = DownOp::kWarpBytes;
        const unsigned char* first = experts_of(at.layer()) + kExpertGateUpBytes + (u64{at.lane() * DownOp::kBlocks} * kNumCtas + role.cta) * (kSlotParts * kPartBytes);
#pragma unroll 1
        for (u32 block = 0; block < DownOp::kBlocks; ++block, first += kNumCtas * kSlotParts * kPartBytes) {
            [[maybe_unused]] const unsigned char* const shared_parts = tiles + role.cta * (kSharedParts * kPartBytes);
            tiles += kNumCtas * kSharedParts * kPartBytes;
#pragma unroll 1
            for (u32 token = 0; token < kReadChoices; ++token) {  // what several have chosen is read again, as the shared expert's is
                if constexpr (kReadChoices > 1) read_choice(token);
#pragma unroll
                for (u32 tile = 0; tile < DownOp::kTiles; ++tile) {
                    const u32 begin = tile * kMatrixWarps, end = min(begin + kMatrixWarps, kParts), bytes = (end - begin) * kPartBytes;
                    if (!make_room(bytes)) return false;
                    mbar_arrive_expect(full, bytes);
                    if (num_under_way == most && !wait_for_landing()) return false;
#pragma unroll
                    for (u32 part = begin; part < end; ++part) {
                        const u32 slot_idx = min(part / kSlotParts, static_cast<u32>(kChosen)), of_slot = part - slot_idx * kSlotParts;
                        if (part > begin && of_slot > 0) continue;  // came with the one before
                        const u32 num_parts = min((slot_idx < kChosen ? kSlotParts : kSharedParts) - of_slot, end - part);
                        const unsigned char* from = slot_idx < kChosen ? first + u64{chosen[slot_idx % kChosen]} * static_cast<u32>(kExpertBytes) : shared_parts;
                        bulk_load(slot + (part - begin) * kPartBytes, from + of_slot * kPartBytes, num_parts * kPartBytes, full, policy);
                    }
                    full += 8, ++num_under_way, slot += bytes;
                    if (full == first_full + kEmptyOffset) full = first_full, parity ^= 1;
                }
            }
        }
        return true;
    }
#else
    // Tiles of DOWN have a part of each chosen expert. Copies are so small that what memory brings is bound by what one costs this thread:
    // so there is no loop over them, and an address is one multiplication.
    __device__ __forceinline__ bool issue_down(const Place& at) {
        static_assert(DownOp::kIsEven && DownOp::kTileBytes % kChosen == 0 && kExpertBytes < (u64{1} << 32), "equal parts");
        constexpr u32 kTiles = DownOp::kBlocks * DownOp::kTiles, kPartBytes = DownOp::kTileBytes / kChosen;
        const unsigned char* part = experts_of(at.layer()) + kExpertGateUpBytes + (u64{at.lane() * kTiles} * kNumCtas + role.cta) * kPartBytes;
#pragma unroll 1
        for (u32 i = 0; i < kTiles; ++i, part += kNumCtas * kPartBytes) {
            if (!make_room(DownOp::kTileBytes)) return false;
            mbar_arrive_expect(full, DownOp::kTileBytes);
            if (num_under_way == most && !wait_for_landing()) return false;
#pragma unroll
            for (u32 k = 0; k < kChosen; ++k)
                bulk_load(slot + k * kPartBytes, part + u64{chosen[k]} * static_cast<u32>(kExpertBytes), kPartBytes, full, policy);
            full += 8, ++num_under_way, slot += DownOp::kTileBytes;
            if (full == first_full + kEmptyOffset) full = first_full, parity ^= 1;
        }
        return true;
    }
#endif
#ifdef KOG_UNION
    __device__ __forceinline__ bool issue_gate_up_of_union(const Place& at) {
#pragma unroll 1
        for (UnitedBlocks blocks(role); blocks.is_left(); blocks.go_on()) {
            Tiles of = tiles_of<GateUpOp>();
            of.count = of.of_block;
            if (!blocks.is_last_block()) of.last_bytes = of.bytes, of.last_less = of.less;
            const unsigned char* own = experts_of(at.layer()) + u64{united_at(role, blocks.place)} * kExpertBytes + blocks.block * kUnitedBlockBytes;
            if (!issue_uneven(own, of, role.cta % kExpertCtas, kExpertCtas)) return false;
        }
        return true;
    }
    // Tiles of DOWN have a part of each of kChosen experts, of the last ones fewer. A block of rows is multiplied with all experts in turn.
    __device__ __forceinline__ bool issue_down_of_union(const Place& at) {
        static_assert(DownOp::kIsEven && DownOp::kTileBytes % kChosen == 0 && kExpertBytes < (u64{1} << 32), "equal parts");
        constexpr u32 kPartBytes = DownOp::kTileBytes / kChosen;
        const unsigned char* first_part =
            experts_of(at.layer()) + kExpertGateUpBytes + (u64{at.lane() * (DownOp::kBlocks * DownOp::kTiles)} * kNumCtas + role.cta) * kPartBytes;
        const u32 num = num_united(role);
#pragma unroll 1
        for (u32 block = 0; block < DownOp::kBlocks; ++block, first_part += u64{DownOp::kTiles} * kNumCtas * kPartBytes)
#pragma unroll 1
            for (u32 first = 0; first < num; first += kChosen) {
                const unsigned char* part = first_part;
                const u32 count = min(num - first, static_cast<u32>(kChosen)), bytes = count * kPartBytes;
#pragma unroll 1
                for (u32 i = 0; i < DownOp::kTiles; ++i, part += kNumCtas * kPartBytes) {
                    if (!make_room(bytes)) return false;
                    mbar_arrive_expect(full, bytes);
                    if (num_under_way == most && !wait_for_landing()) return false;
#pragma unroll
                    for (u32 k = 0; k < kChosen; ++k)
                        if (k < count)
                            bulk_load(slot + k * kPartBytes, part + u64{united_at(role, first + k)} * static_cast<u32>(kExpertBytes), kPartBytes, full, policy);
                    full += 8, ++num_under_way, slot += bytes;
                    if (full == first_full + kEmptyOffset) full = first_full, parity ^= 1;
                }
            }
        return true;
    }
#endif
#ifdef KOG_STREAM  // reads as for one token
    static constexpr bool kWaitsForChoice = false;
    static constexpr u32 kReadChoices = 1;
#else
    static constexpr bool kWaitsForChoice = true;
    static constexpr u32 kReadChoices = kChoices;
#endif
#endif
    // Copies still under way write into shared memory: a thread block must not end before they have landed.
    __device__ __forceinline__ void drain() {
        while (num_under_way != 0) {
            while (!mbar_try(landing, landing_parity)) {  // ends: memory answers every copy
            }
            count_landed();
        }
    }
};

// The tape of all thread blocks is [product][tile][thread block].
__device__ __forceinline__ void load_tape(const KogDecodeParams& params, const Role& role) {
    if (!elect_one()) return;
    Loader loader(role);
#ifdef KOG_EXPERTS
    loader.experts = reinterpret_cast<const unsigned char*>(params.experts_ptr);
#endif
    for (u32 turn = 0; turn < params.num_steps; ++turn)
        if (!loader.issue_pass(reinterpret_cast<const unsigned char*>(params.tape_ptr), turn)) break;
    loader.drain();
}

}  // namespace kog
