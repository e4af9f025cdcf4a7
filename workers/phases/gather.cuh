// How a matrix warp gets its slice of the next vector: it polls the words of its own columns, applies the norm's weights, and writes
// x into its own part of shared memory, as the B operand of its products. No other warp takes part, so nothing has to be handed over.
// The words of the vector after the present one are read before the present one is multiplied, where enough lanes take turns for them to
// have arrived by then. The RMS scale is applied to the product, so nothing waits for the sum of squares.
#pragma once
#include "gather_delta.cuh"

namespace kog {

struct Gatherer : DeltaGatherer {
    // ---- the embedding ----
    // The token's embedding, where the words of a stream will lie later.
    __device__ __forceinline__ void load_embedding() {
        load_embedding_of(0);
    }
    __device__ __forceinline__ void load_embedding_of(u32 token) {
        const u64* row = reinterpret_cast<const u64*>(params.embedding_ptr) + static_cast<u64>(of_token(pass.tokens, token)) * (kHidden / 4) + warp * HiddenSlice::kOfVector + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) got[i].x = row[32 * i];
    }
    __device__ __forceinline__ void widen_embedding() {
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) {
                const float4 v = widen(make_uint2(static_cast<u32>(got[i].x), static_cast<u32>(got[i].x >> 32)));
                got[i] = make_ulonglong2(make_pair_word(v.x, v.y, 0), make_pair_word(v.z, v.w, 0));
            }
    }

    // ---- any vector ----
    // Lanes whose inputs of a phase are gathered at a time, by the first of them: of QKV and GATE_UP the stream that all lanes share.
    static __device__ __forceinline__ constexpr u32 gathered_lanes(u32 phase) {
        return !kOneStream ? 1 : phase == kOutPhase ? kGatheredAttended : phase == kDownPhase ? kGatheredActivations : kLanes;
    }
    // Products that one gather is for, by phase: they follow each other.
    static __device__ __forceinline__ constexpr u32 products_of_gather(u32 phase, bool has_net) {
        return gathered_lanes(phase) / (!kOneStream ? 1 : phase == kQkvPhase ? (has_net ? kDeltaInLanes : kQkvLanes) : phase == kGateUpPhase ? kGateUpLanes : 1);
    }
    // Norms' weights are read as early, where there are registers for them while products are multiplied.
    static constexpr bool kReadsWordsAhead = kLanes > 2, kReadsNormsAhead = kReadsWordsAhead && !kFourBits && kTokens == 1;
    // Read what may be there already of the next vector; never waits. One lane alone is never ahead of itself. Of two lanes only the
    // attention's output is early enough: two of three looks at other words would come too early, and each delays the present product.
    __device__ __forceinline__ void read_ahead(const Place& at) {
        loaded = false;
        if constexpr (kLaneHead) {
            if (at.is_last() && at.lane() > 0) {  // all streams come at about the same time
                load_last_stream(at.lane());
                loaded = true;
            }
        }
        if (kLanes == 1 || at.is_last() || (!kReadsWordsAhead && at.phase() != kOutPhase && at.index() != 0)) return;
        if constexpr (kReadsNormsAhead) {
            if (at.phase() == kQkvPhase) load_norm<kQkvPhase>(at);
            else if (at.phase() == kGateUpPhase) load_norm<kGateUpPhase>(at);
        }
        if (at.index() == 0) {
            if constexpr (kTokens > 1) return;
            load_embedding();
        } else if (kDirectSums && !(at.phase() & 1)) {
            return;
        } else if (!is_near(role, (at.phase() & 1) || !kOneStream ? at.lane() : kLanes - 1, at.index())) {
            return;
        } else if (at.phase() == kOutPhase) {
            if constexpr (kAhead<AttendedSlice> == 0) return;
            load_vectors<AttendedSlice, kOutPhase>(source<kOutPhase>(at));
        } else if constexpr (kReadsWordsAhead) {
            if (at.phase() == kDownPhase) {
#ifdef KOG_UNION
                return;  // see down_of_union
#elif defined KOG_EXPERTS
                load_activations<false>(at);
#else
                if constexpr (kAhead<FfnSlice> == 0) return;
                load_vectors<FfnSlice, kDownPhase>(source<kDownPhase>(at));
#endif
            } else if constexpr (kTokens > 1) return;
            else load_units<HiddenSlice>(at.phase() == kGateUpPhase ? source<kGateUpPhase>(at).words : source<kQkvPhase>(at).words);
        }
        loaded = true;
    }
    // Far into a context all thread blocks attend for long, and for about as long. Where that is bound by instructions, attention's output is looked
    // for only when this one has done its share: looks take instructions from it. False: leave.
    __device__ __forceinline__ bool wait_for_own_attention(const Place& at) {
#ifdef KOG_AWAITS_ATTENTION
        if (at.lane() != 0 || pass.position < kNearContext) return true;
        const u32 parity = (turn * kLayers + at.layer()) & 1;
        for (u32 rounds = 1; !__all_sync(kFullWarp, mbar_try(role.base + KOG_OFFSET(attended_full), parity)); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 16 == 0) {
                const Source from = source<kOutPhase>(at);
                note_wait(kOutPhase, at.layer(), at.lane(), from.tag, from.words, AttendedSlice::kColumns / 2);
            }
        }
#endif
        return true;
    }
    // How x of a layer's first product is kept.
    template <bool kHasNet>
    using MixerX = typename OneOf<kHasNet, NetInputX, AttentionX>::Type;
    // x of the vector of each token, in this warp's part of shared memory. `squares`: of this thread's values. False: leave.
    // `kHasNet`: of a delta net's input; where its output has a form of its own, of that, too.
    template <int kPhase, bool kHasNet>
    __device__ __forceinline__ bool gather(const Place& at, float (&squares)[kTokens]) {
        if constexpr (kTokens > 1) {
            if constexpr (kPhase == kOutPhase) {
#ifdef KOG_DELTA_PASSES
                if (kPlainNetOutputs ? kHasNet : has_delta_net(at.layer())) {
                    HeadScales scales;
                    if (!wait_for_scales(at, scales)) return false;
                    if (!take_tokens<AttendedSlice, kOutPhase>(at, [&](u32 token, int from) { write_heads(scales, token, from); })) return false;
                } else
#endif
                    if (!gather_tokens<AttendedSlice, kOutPhase, false, AttentionX>(at, squares)) return false;
            } else if constexpr (kPhase == kDownPhase) {
#ifndef KOG_EXPERTS  // else see down_of_union
                if (!gather_tokens<FfnSlice, kDownPhase, false, LayerX>(at, squares)) return false;
#endif
            } else {
                load_norm<kPhase>(at);  // words take as long
                if (kPhase == kQkvPhase && at.index() == 0) {
#pragma unroll 1
                    for (u32 token = 0; token < kTokens; ++token) {
                        load_embedding_of(token);
                        widen_embedding();
                        write_token<HiddenSlice, true, MixerX<kHasNet>>(token, squares);
                    }
                } else if constexpr (kPhase == kQkvPhase) {
                    if (!gather_tokens<HiddenSlice, kPhase, true, MixerX<kHasNet>>(at, squares)) return false;
                } else if (!gather_tokens<HiddenSlice, kPhase, true, LayerX, kRouterX != 0>(at, squares)) {
                    return false;
                }
            }
        } else if constexpr (kPhase == kOutPhase) {
            if (!wait_for_own_attention(at)) return false;
            if (!gather_units<AttendedSlice, kOutPhase>(at)) return false;
#ifdef KOG_DELTA
            if (kPlainNetOutputs ? kHasNet : has_delta_net(at.layer())) {
                if (!write_heads(at)) return false;
            } else
#endif
            write_units<AttendedSlice, false, AttentionX>(squares);
        } else if constexpr (kPhase == kDownPhase) {
#ifdef KOG_EXPERTS
            return gather_activations(at);
#else
            if (!gather_units<FfnSlice, kDownPhase>(at)) return false;
            write_units<FfnSlice, false>(squares);
#endif
        } else {
            if (!kReadsNormsAhead || (kPhase == kQkvPhase && at.index() == 0 && !loaded)) load_norm<kPhase>(at);  // words take as long
            if (kPhase == kQkvPhase && at.index() == 0) {
                if (!loaded) load_embedding();
                widen_embedding();
                if constexpr (kDirectSums) begin_stream();
            } else if constexpr (kDirectSums) {
                if (!wait_until_near<kPhase>(role, kLanes - 1, at.index())) return false;
                const u32 tag = source<kPhase>(at).tag;
                if (!gather_sums(kPhase == kQkvPhase, tag, [&](const u64* words, u32 rank) {
                        note_wait(kPhase, at.layer(), rank, tag, words, kHidden / 2);  // a stream has no lane
                    }))
                    return false;
            } else if (!gather_units<HiddenSlice, kPhase>(at)) {
                return false;
            }
            if constexpr (kPhase == kQkvPhase) write_units<HiddenSlice, true, MixerX<kHasNet>>(squares);
            else write_units<HiddenSlice, true, LayerX, kRouterX != 0>(squares);
        }
        loaded = false;
        __syncwarp();
        return true;
    }
};

}  // namespace kog
