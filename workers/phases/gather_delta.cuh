// The input of OUT in layers with a delta net: each head's values are scaled by its norm, whose sums of squares come as words of their own.
#pragma once
#include "gather_union.cuh"

namespace kog {

struct DeltaGatherer : UnionGatherer {
#ifdef KOG_DELTA
    // x of a token's values, which are in `got` from `from` on. False: leave.
    __device__ __forceinline__ bool write_heads(const Place& at, u32 token = 0, int from = 0) {
        using S = AttendedSlice;
        const u32 tag = layer_tag(pass.number, at.layer()), columns = S::kOfVector * 4, first = warp * columns / kValueDim;
        const u32 end = min(((warp + 1) * columns + kValueDim - 1) / kValueDim, static_cast<u32>(kDeltaHeads));
        float scales[S::kLoads];
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) scales[i] = 0;
#pragma unroll 1
        for (u32 vector = 0; vector < kGatheredAttended; ++vector) {
            const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kDeltaSquaresOffset +
                               (((at.lane() + vector) * kReplicas + role.cta % kReplicas) * kTokens + token) * kDeltaSquaresStride;
#pragma unroll 1
            for (u32 head = first; head < end; ++head) {
                const u64* mine = words + head * kSquareWords + lane % kSquareWords;
                u64 word = load_relaxed(mine);
                for (u32 rounds = 1; !__all_sync(kFullWarp, value_has_tag(word, tag)); ++rounds) {
                    if (must_leave(role.stopped())) return false;
                    if (rounds % 1024 == 0) note_wait(kOutPhase, at.layer(), at.lane() + vector, tag, words, kDeltaHeads * kSquareWords);
                    word = load_relaxed(mine);
                }
                float sum = __uint_as_float(static_cast<u32>(word));
#pragma unroll
                for (u32 offset = 1; offset < kSquareWords; offset <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, offset));
                const float scale = inverse_root_approx(sum * (1.0f / kValueDim) + kNormEps);
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i)
                    if (S::vector_of(lane, i) == vector && (warp * S::kOfVector + S::unit_of(lane, i)) * 4 / kValueDim == head) scales[i] = scale;
            }
        }
        const auto unit = [&](int i) {
            const float4 v = S::is_real(warp, lane, i) ? values(got[from + i]) : make_float4(0, 0, 0, 0);
            return make_float4(v.x * scales[i], v.y * scales[i], v.z * scales[i], v.w * scales[i]);
        };
        write_all<NetOutputX, S::kLoads, S::kOfVector>(unit, [&](int i) { return S::is_mine(lane, i); }, token);
        return true;
    }
#endif
};

}  // namespace kog
