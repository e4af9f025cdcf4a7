// The matrix warps: y = W x for the rows of this thread block. K is split over the warps, so that each needs only its own few values
// of x; the finaliser adds their partial sums in a fixed order. One mma takes eight rows and 32 columns: the upper eight rows of
// its A operand are the first halves of the columns, the lower eight the second; the columns of B are x in two 16-bit parts (high,
// low) of the first half, then of the second. Useful results are column 0 + 1 of the upper rows and column 2 + 3 of the lower rows.
#pragma once
#include "coded_four.cuh"
#include "coded_integers.cuh"
#include "coded_tokens.cuh"
#include "gather.cuh"

namespace kog {

// Partial sums of a block of rows in a thread of a matrix warp: as the matrix unit leaves them, or those of quantised weights.
template <class Sums>
constexpr u32 kGroupsOfSum = 1;  // groups of eight rows that have one sum in a thread: a row's four threads have one group's, or two of them each
template <class Weights>
struct SumsOfKind {
    using Type = float[kRowGroups][4];
};
#ifdef KOG_CODE
#ifdef KOG_INTEGERS
using CodedSums = IntegerSums;
using CodedTokenSums = IntegerTokenSums;
#else
using CodedTokenSums = FloatTokenSums;
template <bool kFour>
struct CodedSumsOf {
    using Type = EightBitSums;
};
template <>
struct CodedSumsOf<true> {
    using Type = FourBitSums;
};
using CodedSums = CodedSumsOf<kFourBits>::Type;
template <>
constexpr u32 kGroupsOfSum<FourBitSums> = FourBitSums::kShared;
#endif
template <>
struct SumsOfKind<CodedWeights> {
    using Type = CodedSums;
};
__device__ __forceinline__ float row_sum(const CodedSums& sums, u32 lane, int group) {
    float sum = sums.part(lane, group);
    if constexpr (kIntegers) sum += __shfl_xor_sync(kFullWarp, sum, 2);
    return sum + __shfl_xor_sync(kFullWarp, sum, 1);
}
#endif
#ifdef KOG_HEAD_FORMAT
template <>
struct SumsOfKind<HeadWeights> {
    using Type = HeadSums;
};
__device__ __forceinline__ float row_sum(const HeadSums& sums, u32 lane, int group) {
    const float sum = sums.part(lane, group);
    return sum + __shfl_xor_sync(kFullWarp, sum, 1);
}
#endif
// The same of a pass: several tokens have sums of their own.
template <class Weights>
struct SumsOfTokens {
    using Type = TokenSums;
};
#ifdef KOG_CODE
template <>
struct SumsOfTokens<CodedWeights> {
    using Type = CodedTokenSums;
};
#endif
#ifdef KOG_HEAD_FORMAT
template <>
struct SumsOfTokens<HeadWeights> {
    using Type = HeadTokenSums;
};
#endif
template <class Weights>
using SumsOfPass = typename OneOf<(kTokens > 1), SumsOfTokens<Weights>, SumsOfKind<Weights>>::Type::Type;
template <class O>
using SumsOf = SumsOfPass<typename O::Kind>;
__device__ __forceinline__ float row_sum(const float (&sums)[kRowGroups][4], u32 lane, int group) {
    const float sum = (lane & 1) ? sums[group][2] + sums[group][3] : sums[group][0] + sums[group][1];
    return sum + __shfl_xor_sync(kFullWarp, sum, 1);
}

// What thread `lane` of a matrix warp reads of x for its first mma.
template <class O>
__device__ __forceinline__ u32 first_x(const Role& role, u32 warp, u32 lane) {
    if constexpr (kTokens > 1)
        return role.base + KOG_OFFSET(x) + warp * (kMaxPer * kXStepBytes) + (O::kIntegers ? lane : lane % (8 * kTokens)) * 16;
    return role.base + KOG_OFFSET(x) + warp * (kMaxPer * 128) + (O::kIntegers ? lane * 16 : (lane & 15) * 8);
}

struct Multiplier {
    const KogDecodeParams& params;
    const Role& role;
    u32 warp, lane;
    u32 full, slot_at, parity = 0;  // of the next tile that is read: its barrier, this thread's place in its slot, the phase to wait for
    u32 num_vectors = 0, num_blocks = 0;
    u32 zero;

    __device__ __forceinline__ Multiplier(const KogDecodeParams& params_, const Role& role_, u32 warp_, u32 lane_)
        : params(params_), role(role_), warp(warp_), lane(lane_), full(opaque(role_.base + KOG_OFFSET(full) + warp / kPieceWarps * 8)),
          slot_at(opaque(role_.base + KOG_OFFSET(ring) + warp / kPieceWarps * kPieceBytes + lane * 16)), zero(__shfl_sync(kFullWarp, params_.zero, 0)) {}

    static constexpr u32 kEmptyOffset = kRingPieces * 8;  // from a piece's `full` to its `empty`

    // Where the next tile stands.
    __device__ __forceinline__ void find_tile(u32 tile_bytes) {
        if constexpr (kPacked) {
            const u32 first = role.base + KOG_OFFSET(ring) + lane * 16;
            if (slot_at > first + kRingBytes - tile_bytes) slot_at = first;
        }
    }
    __device__ __forceinline__ bool wait_for_tile() { return mbar_wait(role.stopped(), full, parity); }
    __device__ __forceinline__ void next_slot(u32 tile_bytes) {
        if constexpr (kPacked) {
            full += 8, slot_at += tile_bytes;
            if (full >= role.base + KOG_OFFSET(full) + kEmptyOffset) full -= kEmptyOffset, parity ^= 1;
            return;
        }
        full += 8 * kPieces, slot_at += kSlotBytes;
        if (full >= role.base + KOG_OFFSET(full) + kEmptyOffset) full -= kEmptyOffset, slot_at -= kNumSlots * kSlotBytes, parity ^= 1;
    }
    // The tile that stood there is in registers: its slot may be filled again. In registers for certain: the copy that fills it does not
    // queue behind loads from shared memory that are still under way, as loads and stores of threads would. Without a dependence on
    // `loaded` the arrival is issued before the data have come, and where attention keeps the load units busy a line of the next
    // tile was read now and then (docs/history/monokernel.md, round 9).
    __device__ __forceinline__ void free_slot(u32 full_barrier, u32 loaded) {
        __syncwarp();
        if (lane == 0) mbar_arrive(full_barrier + kEmptyOffset + (loaded & zero));
    }

    // What a warp takes from a tile: fragments of eight rows and 32 columns, and x.
    template <int kGroups, int kSteps>
    struct Tile {
        uint4 weights[kSteps * kGroups];
        typename OneOf<(kTokens > 1), uint4, uint2>::Type x[kSteps];  // of several tokens those of both halves of the columns
    };
    // A step's weights are kStepBytes behind those of the step before, the first at `offset` in the slot. A group of fewer than eight
    // rows reads some of what follows it: nobody looks at those products.
    template <int kGroups, int kSteps, u32 kStepBytes>
    __device__ __forceinline__ void read(Tile<kGroups, kSteps>& tile, u32 offset, u32 x_address) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            load_shared(x_address + step * kXStepBytes, tile.x[step]);
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
                load_shared(slot_at + offset + step * kStepBytes + group * 512, tile.weights[step * kGroups + group]);
        }
    }
    template <class Format, int kGroups, int kSteps>
    static __device__ __forceinline__ void add_products(const Tile<kGroups, kSteps>& tile, float (&sums)[kRowGroups][4]) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                const uint4& w = tile.weights[step * kGroups + group];
                Format::mma(sums[group], w.x, w.y, w.z, w.w, tile.x[step].x, tile.x[step].y);
            }
    }
    // The same of several tokens.
    template <class Format, int kGroups, int kSteps>
    static __device__ __forceinline__ void add_products(const Tile<kGroups, kSteps>& tile, TokenSums& sums) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            sums.template add_groups<Format, kGroups>(tile.x[step], [&](int group, u32(&a)[4]) {
                const uint4& w = tile.weights[step * kGroups + group];
                a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
            });
    }
    // Partial sums of a block of rows over this warp's columns. `kUnited`: tiles have `united_bytes`, and nothing for a warp that `is_idle`.
    template <class O, bool kUnited = false>
    __device__ __forceinline__ bool sum_tiles(u32 offset, u32 x_address, SumsOf<O>& sums, u32 united_bytes = 0, bool is_idle = false) {
        constexpr int kGroups = O::kRowGroups, kSteps = O::kSteps;
        u32 num_tiles = O::kTiles;
#pragma unroll 1
        do {
            const bool is_short = !O::kHasAll && num_tiles <= O::kTiles - O::kLongTiles;
            const u32 tile_bytes = kUnited ? united_bytes : is_short ? O::kShortTileBytes : O::kTileBytes;
            find_tile(tile_bytes);
            if (!wait_for_tile()) return false;
            if (kUnited ? is_idle : !O::kHasAll && warp >= O::kWarps - is_short * (O::kWarps - O::kShortWarps)) {  // it has come, so the slot's last tile was given back: now this one may be
                __syncwarp();
                if (lane == 0) mbar_arrive(full + kEmptyOffset);
                next_slot(tile_bytes);
                continue;
            }
            if constexpr (O::kFourBits || (O::kCoded && kTokens > 1)) {
                const u32 held = full, at = slot_at + offset;
                next_slot(tile_bytes);
                sums.template add<kGroups, O::kRows>(lane, at, x_address, [&](u32 loaded) { free_slot(held, loaded); });
                x_address += O::kXSteps * kXStepBytes;
            } else if constexpr (O::kCoded) {
                const u32 held = full, at = slot_at + offset;
                next_slot(tile_bytes);
                const u32 loaded = sums.template add<kGroups, O::kRows>(lane, at, x_address);
                x_address += O::kXSteps * kXStepBytes;
                free_slot(held, loaded);
                continue;
            } else {
                Tile<kGroups, kSteps> tile;
                read<kGroups, kSteps, kSteps == 1 ? 0 : O::kRows * 64>(tile, offset, x_address);
                const u32 held = full;
                next_slot(tile_bytes);
                x_address += kSteps * kXStepBytes;
                add_products<typename O::Format>(tile, sums);
                u32 loaded = 0;
#pragma unroll
                for (int i = 0; i < kSteps * kGroups; ++i) loaded |= tile.weights[i].x;
                free_slot(held, loaded);
            }
        } while (--num_tiles != 0);
        return true;
    }
    // The partial sums of a block of rows, to the finaliser.
    template <int kGroups, class S>
    __device__ __forceinline__ bool hand_over(u32 num_rows, const S& sums) {
        constexpr u32 kTogether = kGroupsOfSum<S>, kThreads = 4 / kTogether;  // of a row
        const u32 place = num_blocks % kSums;
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(red_empty[place]), (num_blocks / kSums & 1) ^ 1)) return false;
        const u32 token = kTokens == 1 ? 0 : lane % kTokens, at = role.base + KOG_OFFSET(red[place][token][warp]) + (lane & ~3u);
        if constexpr (kTokens > 1) {
#pragma unroll
            for (u32 group = 0; group < kGroups; ++group) {
                const float sum = sums.row_sum(lane, group);
                if ((lane & 3) < kTokens && group * 8 + (lane >> 2) < num_rows) store_shared(at + group * 32, sum);
            }
        } else {
#pragma unroll
            for (u32 first = 0; first < kGroups; first += kTogether) {
                const float sum = row_sum(sums, lane, first / kTogether);
                const u32 group = first + (lane & 3) / kThreads;
                if (lane % kThreads == 0 && group * 8 + (lane >> 2) < num_rows) store_shared(at + group * 32, sum);
            }
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(red_full[place]));
        ++num_blocks;
        return true;
    }

    template <class O>
    static constexpr bool kHasLast = O::kLastRows != O::kRows;
    // The product of a phase with x. `kIsLast` of those of one vector.
    template <class O, bool kIsLast = true>
    __device__ __forceinline__ bool blocks(u32 x_address) {
        const u32 offset = opaque(warp % kPieceWarps * O::kWarpBytes);
#pragma unroll 1
        for (u32 i = 0; i < O::kBlocks - kHasLast<O>; ++i) {
            SumsOf<O> sums = {};
            if (!sum_tiles<O>(offset, x_address, sums)) return false;
            if constexpr (O::kIntegers) sums.weigh(lane, x_address);
            if (!hand_over<O::kRowGroups>(O::kRows, sums)) return false;
        }
        if constexpr (kHasLast<O>) {
            using Last = typename O::Last;
            SumsOf<O> sums = {};
            if (!sum_tiles<Last>(opaque(warp % kPieceWarps * Last::kWarpBytes), x_address, sums)) return false;
            if constexpr (O::kIntegers) sums.weigh(lane, x_address);
            if (!hand_over<Last::kRowGroups>(Last::kRows, sums)) return false;
        }
        if constexpr (kIsLast) ++num_vectors;
        return true;
    }
#ifdef KOG_EXPERTS
    // GATE_UP of each token's chosen experts: the shares that this thread block has.
    __device__ __forceinline__ bool gate_up_of_shares(u32 x_address) {
        const u32 num = kTokens * num_shares(role.cta);
#pragma unroll 1
        for (u32 i = 0; i < num; ++i)
            if (!blocks<GateUpOp, false>(x_address)) return false;
        ++num_vectors;
        return true;
    }
#endif
#ifdef KOG_UNION
    // `offset`: of this warp's part of a tile.
    template <class O>
    __device__ __forceinline__ bool one_block(u32 offset, u32 x_address) {
        SumsOf<O> sums = {};
        if (!sum_tiles<O>(offset, x_address, sums)) return false;
        if constexpr (O::kIntegers) sums.weigh(lane, x_address);
        return hand_over<O::kRowGroups>(O::kRows, sums);
    }
    // GATE_UP of the experts of a pass, for all its tokens: as many blocks of rows as this thread block has.
    __device__ __forceinline__ bool gate_up_of_union(u32 choice_parity, u32 x_address) {
        using O = GateUpOp;
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(choice_full), choice_parity)) return false;
        UnitedBlocks blocks(role);
        const u32 offset = opaque(warp % kPieceWarps * O::kWarpBytes);
#pragma unroll 1
        for (; blocks.is_left() && !(kHasLast<O> && blocks.is_last_block()); blocks.go_on())
            if (!one_block<O>(offset, x_address)) return false;
        if constexpr (kHasLast<O>)
#pragma unroll 1
            for (; blocks.is_left(); blocks.go_on())
                if (!one_block<typename O::Last>(opaque(warp % kPieceWarps * O::Last::kWarpBytes), x_address)) return false;
        ++num_vectors;
        return true;
    }
    // DOWN of the experts of a pass. A tile has parts of kChosen of them, and of its last ones fewer. A warp multiplies its columns of one expert
    // after the other, and leaves each token's partial sums where a single token's warp with that expert would.
    template <class O = DownOp>
    __device__ __forceinline__ bool down_of_union(Gatherer& gatherer, const Place& at, const Place& next, u32 turn, u32 number) {
        constexpr u32 kPartBytes = O::kTileBytes / kChosen;
        if (!gatherer.loaded && !wait_until_near<kDownPhase>(role, at.lane(), at.index())) return false;
        if (warp == 0 && lane == 0) store_shared(role.base + KOG_OFFSET(note.num_waits), num_vectors + 1);
        const u32 num = num_united(role), own = warp / kExpertWarps;
#pragma unroll 1
        for (u32 block = 0; block < O::kBlocks; ++block) {
            const u32 sum_place = num_blocks % kSums;
            if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(red_empty[sum_place]), (num_blocks / kSums & 1) ^ 1)) return false;
#pragma unroll 1
            for (u32 first = 0; first < num; first += kChosen) {
                const u32 place = first + own, slots = place < num ? slots_at(role, place) : kNoSlots;
                if (!gather_members(gatherer, at, place, slots)) return false;
                if (warp == 0 && block == 0 && first == 0) stamp(role, kFetched, turn, number);
                if (place + kChosen < num) read_members_ahead(gatherer, at, slots_at(role, place + kChosen));
                else if (first + kChosen >= num && block == O::kBlocks - 1) {
                    if (next.phase() == kDownPhase) read_members_ahead(gatherer, next, slots_at(role, own));
                    else read_vector_ahead(gatherer, next);
                }
                SumsOf<O> sums = {};
                const u32 tile_bytes = min(num - first, static_cast<u32>(kChosen)) * kPartBytes;
                if (!sum_tiles<O, true>(warp * O::kWarpBytes, first_x<O>(role, warp, opaque(lane)), sums, tile_bytes, slots == kNoSlots)) return false;
                if constexpr (O::kIntegers) sums.weigh(lane, first_x<O>(role, warp, opaque(lane)));
                leave_sums(sums, sum_place, slots);
            }
            if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(red_full[sum_place]));
            ++num_blocks;
        }
        ++num_vectors;
        return true;
    }

private:
    // Partial sums of an expert, of each token that has chosen it.
    __device__ __forceinline__ void leave_sums(const SumsOf<DownOp>& sums, u32 sum_place, u32 slots) {
        const u32 token = lane % kTokens, slot = slot_of(slots, token);
        const u32 as_warp = slot * kExpertWarps + warp % kExpertWarps;  // of a single token
        const bool is_mine = (lane & 3) < kTokens && slot != kNoSlot;
        store_sums(sums, role.base + KOG_OFFSET(red[sum_place][token][is_mine ? as_warp : 0]), is_mine);
    }
#elif defined KOG_EXPERTS
    // DOWN of the experts of a pass of several tokens: those of one token after another's, with the tiles, warps and sums of a token alone. What
    // other tokens' columns of B are by then goes to sums that nobody takes.
    template <class O = DownOp>
    __device__ __forceinline__ bool down_of_tokens(Gatherer& gatherer, const Place& at, const Place& next, u32 turn, u32 number) {
        static_assert(!kHasLast<O>, "blocks of as many rows");
        if (warp == 0 && lane == 0) store_shared(role.base + KOG_OFFSET(note.num_waits), num_vectors + 1);
#pragma unroll 1
        for (u32 block = 0; block < O::kBlocks; ++block) {
            const u32 sum_place = num_blocks % kSums;
            if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(red_empty[sum_place]), (num_blocks / kSums & 1) ^ 1)) return false;
#pragma unroll 1
            for (u32 token = 0; token < kTokens; ++token) {
                if (block == 0) {
                    if (!gather_activations(gatherer, at, token)) return false;
                    if (warp == 0 && token == 0) stamp(role, kFetched, turn, number);
                    if (token + 1 < kTokens) read_activations_ahead(gatherer, at, token + 1);
                    else read_vector_ahead(gatherer, next);
                }
                SumsOf<O> sums = {};
                if (!sum_tiles<O>(opaque(warp % kPieceWarps * O::kWarpBytes), first_x<O>(role, warp, opaque(lane)), sums)) return false;
                if constexpr (O::kIntegers) sums.weigh(lane, first_x<O>(role, warp, opaque(lane)));
                store_sums(sums, role.base + KOG_OFFSET(red[sum_place][token][warp]), (lane & 3) == token);
            }
            if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(red_full[sum_place]));
            ++num_blocks;
        }
        ++num_vectors;
        return true;
    }

private:
#endif
#ifdef KOG_EXPERTS
    // Partial sums of DOWN of this thread's token, where they are wanted, to `at`.
    template <class S>
    __device__ __forceinline__ void store_sums(const S& sums, u32 at, bool are_wanted) {
#pragma unroll
        for (u32 group = 0; group < DownOp::kRowGroups; ++group) {
            const float sum = sums.row_sum(lane, group);
            if (are_wanted && group * 8 + (lane >> 2) < DownOp::kRows) store_shared(at + (lane & ~3u) + group * 32, sum);
        }
        __syncwarp();
    }
#endif
};

// The products of one gather, from the vector's words to the sums. Each phase has code of its own, so that nothing is asked twice: what
// stands between the words and the first tile delays every thread block. `next`: behind all of them.
template <int kPhase, class O, bool kHasNet = false>
__device__ __forceinline__ bool run_products(const Role& role, Gatherer& gatherer, Multiplier& multiplier, const Place& at, const Place& next,
                                             u32 turn, u32 number) {
    const u32 warp = multiplier.warp, lane = gatherer.lane;
#ifdef KOG_UNION
    if constexpr (kPhase == kDownPhase) return multiplier.down_of_union(gatherer, at, next, turn, number);
#elif defined KOG_EXPERTS
    if constexpr (kPhase == kDownPhase && kTokens > 1) return multiplier.down_of_tokens(gatherer, at, next, turn, number);
#endif
    constexpr u32 kTogether = kPhase == kHeadPhase ? 1 : products_of_gather(kPhase, kHasNet);
    float squares[kTokens] = {};
    if constexpr (kPhase == kHeadPhase) {
        if (!gather_head(gatherer, at, squares)) return false;
    } else {
        if (!gather_vector<kPhase, kHasNet>(gatherer, at, squares)) return false;
    }
    if (warp == 0) {
        if (lane == 0) store_shared(role.base + KOG_OFFSET(note.num_waits), multiplier.num_vectors + 1);
        stamp(role, kFetched, turn, number);
    }
    if constexpr (kPhase == kQkvPhase || kPhase == kGateUpPhase || (kStreamHead && kPhase == kHeadPhase)) {  // the finaliser scales the product
        const u32 slot = multiplier.num_vectors % kSquares;
#pragma unroll
        for (int token = 0; token < kTokens; ++token) store_shared(role.base + KOG_OFFSET(squares[slot][token][warp][lane]), squares[token]);
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(squares_full[slot]));
    }
#ifdef KOG_EXPERTS
    if constexpr (kPhase == kGateUpPhase)
        if (!multiplier.template blocks<RouteOp, false>(first_x<RouteOp>(role, warp, opaque(lane)) + kRouterX)) return false;
#endif
#ifdef KOG_SHARED_EXPERT
    if constexpr (kPhase == kGateUpPhase)
        if (!multiplier.template blocks<SharedGateUpOp, false>(first_x<SharedGateUpOp>(role, warp, opaque(lane)))) return false;
#endif
    constexpr u32 kApart = kPhase == kOutPhase || kPhase == kDownPhase ? O::kPer * kXStepBytes : 0;  // from the x of one product to the next one's
#pragma unroll 1
    for (u32 i = 0; i + 1 < kTogether; ++i) {
        if (!multiplier.template blocks<O>(first_x<O>(role, warp, opaque(lane)) + i * kApart)) return false;
        if (warp == 0) stamp(role, kFetched, turn, number + i + 1);
    }
    read_vector_ahead(gatherer, next);
#ifdef KOG_UNION
    if constexpr (kPhase == kGateUpPhase)
        return multiplier.gate_up_of_union((turn * kLayers + at.layer()) & 1, first_x<O>(role, warp, opaque(lane)));
#elif defined KOG_EXPERTS
    if constexpr (kPhase == kGateUpPhase && !(kHasOneShare && kTokens == 1)) return multiplier.gate_up_of_shares(first_x<O>(role, warp, opaque(lane)));
#endif
    return multiplier.template blocks<O>(first_x<O>(role, warp, opaque(lane)) + (kTogether - 1) * kApart);
}

__device__ __forceinline__ void multiply(const KogDecodeParams& params, const KogPeers& peers, const Role& role, u32 warp) {
    const u32 lane = opaque(laneid());
    Multiplier multiplier(params, role, warp, lane);
    Gatherer gatherer{params, peers, role, warp, lane};
    Pass pass;
    for (u32 turn = 0; begin_pass(role, turn, pass); ++turn) {
        gatherer.begin(turn, pass);
        const u32 num_vectors = kNumProducts + (has_head(role, turn) ? kHeadProducts : 0);
        Place at(first_product());
#pragma unroll 1
        for (u32 i = first_product(); i < num_vectors;) {
            const u32 together = !kOneStream || at.is_last() ? 1 : products_of_gather(at.phase(), has_delta_net(at.layer()));
            const Place next(i + together);
            gatherer.lane = opaque(lane);  // addresses are computed anew: there are no registers to keep them in
            bool ok;
            if (at.is_last()) ok = run_products<kHeadPhase, HeadOp>(role, gatherer, multiplier, at, next, turn, i);
#ifdef KOG_DELTA
            else if (at.phase() == kQkvPhase && has_delta_net(at.layer())) ok = run_products<kQkvPhase, DeltaInOp, true>(role, gatherer, multiplier, at, next, turn, i);
#endif
            else if (at.phase() == kQkvPhase) ok = run_products<kQkvPhase, QkvOp>(role, gatherer, multiplier, at, next, turn, i);
#ifdef KOG_PLAIN_NET_OUTPUTS
            else if (at.phase() == kOutPhase && has_delta_net(at.layer())) ok = run_products<kOutPhase, DeltaOutOp, true>(role, gatherer, multiplier, at, next, turn, i);
#endif
            else if (at.phase() == kOutPhase) ok = run_products<kOutPhase, OutOp>(role, gatherer, multiplier, at, next, turn, i);
            else if (at.phase() == kGateUpPhase) ok = run_products<kGateUpPhase, GateUpOp>(role, gatherer, multiplier, at, next, turn, i);
            else ok = run_products<kDownPhase, DownOp>(role, gatherer, multiplier, at, next, turn, i);
            if (!ok) return;
            at = next, i += together;
        }
    }
}

}  // namespace kog
