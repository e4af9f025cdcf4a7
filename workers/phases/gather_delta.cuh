// The input of OUT in layers with a delta net: each head's values are scaled by its norm, whose sums of squares come as words of their own.
#pragma once
#include "gather_union.cuh"

namespace kog {

struct DeltaGatherer : UnionGatherer {
#ifdef KOG_DELTA
    // Heads that a warp's columns are of: whole ones, a part of one, or parts of neighbours. Words of their squares lie side by side; a thread has
    // every 32nd of them, and all are under way at once: one head after the other, each would take a way to L2.
    static constexpr u32 kSliceColumns = AttendedSlice::kOfVector * 4;
    static constexpr u32 kMostHeads = kSliceColumns % kValueDim == 0 ? kSliceColumns / kValueDim : kValueDim % kSliceColumns == 0 ? 1 : kSliceColumns / kValueDim + 2;
    static constexpr u32 kSquareLoads = (kMostHeads * kSquareWords + 31) / 32;
    u64 square_words[kGatheredAttended][kSquareLoads];

    __device__ __forceinline__ u32 first_head() const { return warp * kSliceColumns / kValueDim; }
    __device__ __forceinline__ bool has_square(u32 i) const {
        const u32 end = min(((warp + 1) * kSliceColumns + kValueDim - 1) / kValueDim, static_cast<u32>(kDeltaHeads));
        return first_head() * kSquareWords + i * 32 + lane < end * kSquareWords;
    }
    __device__ __forceinline__ const u64* squares_of(const Place& at, u32 vector) const {
        return reinterpret_cast<const u64*>(params.words_ptr) + kDeltaSquaresOffset +
               ((at.lane() + vector) * kReplicas + role.cta % kReplicas) * (kTokens * kDeltaSquaresStride);
    }
    __device__ __forceinline__ void load_squares(const Place& at, u32 vector) {
        const u64* words = squares_of(at, vector) + first_head() * kSquareWords + lane;
#pragma unroll
        for (u32 i = 0; i < kSquareLoads; ++i)
            if (has_square(i)) square_words[vector][i] = load_relaxed(words + i * 32);
    }
    __device__ __forceinline__ void load_squares(const Place& at) {
#pragma unroll
        for (u32 vector = 0; vector < kGatheredAttended; ++vector) load_squares(at, vector);
    }
    // x of values that have come; `squares_loaded`: their squares may have, too. False: leave.
    __device__ __forceinline__ bool write_heads(const Place& at, bool squares_loaded) {
        using S = AttendedSlice;
        const u32 tag = layer_tag(pass.number, at.layer());
        if (!squares_loaded) load_squares(at);
        float scales[S::kLoads] = {};
#pragma unroll
        for (u32 vector = 0; vector < kGatheredAttended; ++vector) {
            for (u32 rounds = 1;; ++rounds) {
                bool ready = true;
#pragma unroll
                for (u32 i = 0; i < kSquareLoads; ++i) ready = ready && (!has_square(i) || value_has_tag(square_words[vector][i], tag));
                if (__all_sync(kFullWarp, ready)) break;
                if (must_leave(role.stopped())) return false;
                if (rounds % 1024 == 0) note_wait(kOutPhase, at.layer(), at.lane() + vector, tag, squares_of(at, vector), kDeltaHeads * kSquareWords);
                load_squares(at, vector);
            }
#pragma unroll
            for (u32 load = 0; load < kSquareLoads; ++load) {
                float sum = has_square(load) ? __uint_as_float(static_cast<u32>(square_words[vector][load])) : 0;
#pragma unroll
                for (u32 offset = 1; offset < kSquareWords; offset <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, offset));
                const float scale = inverse_root_approx(sum * (1.0f / kValueDim) + kNormEps);
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i) {
                    const u32 head = (warp * S::kOfVector + S::unit_of(lane, i)) * 4 / kValueDim, place = (head - first_head()) * kSquareWords;
                    const float found = __shfl_sync(kFullWarp, scale, place % 32);
                    if (S::vector_of(lane, i) == vector && place / 32 == load) scales[i] = found;
                }
            }
        }
        const auto unit = [&](int i) {
            const float4 v = S::is_real(warp, lane, i) ? values(got[i]) : make_float4(0, 0, 0, 0);
            return make_float4(v.x * scales[i], v.y * scales[i], v.z * scales[i], v.w * scales[i]);
        };
        write_all<NetOutputX, S::kLoads, S::kOfVector>(unit, [&](int i) { return S::is_mine(lane, i); });
        return true;
    }
#endif
};

}  // namespace kog
