// The input of OUT in layers with a delta net: each head's values are scaled by its norm, whose sums of squares come as words of their own.
#pragma once
#include "gather_union.cuh"

namespace kog {

struct DeltaGatherer : UnionGatherer {
#ifdef KOG_DELTA
    // What a head's norm multiplies with, of the words with its sums of squares that the threads of the warp have.
    static __device__ __forceinline__ float head_scale(u64 word) {
        float sum = __uint_as_float(static_cast<u32>(word));
#pragma unroll
        for (u32 offset = 1; offset < kSquareWords; offset <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, offset));
        return inverse_root_approx(sum * (1.0f / kValueDim) + kNormEps);
    }
    // Whether a head of a vector is that of the i-th unit of this thread.
    __device__ __forceinline__ bool is_head_of(u32 head, u32 vector, int i) const {
        using S = AttendedSlice;
        return S::vector_of(lane, i) == vector && (warp * S::kOfVector + S::unit_of(lane, i)) * 4 / kValueDim == head;
    }
    // x of values that have come, in a pass of one token. False: leave.
    __device__ __forceinline__ bool write_heads(const Place& at) {
        using S = AttendedSlice;
        const u32 tag = layer_tag(pass.number, at.layer()), columns = S::kOfVector * 4, first = warp * columns / kValueDim;
        const u32 end = min(((warp + 1) * columns + kValueDim - 1) / kValueDim, static_cast<u32>(kDeltaHeads));
        float scales[S::kLoads];
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) scales[i] = 0;
#pragma unroll 1
        for (u32 vector = 0; vector < kGatheredAttended; ++vector) {
            const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kDeltaSquaresOffset +
                               ((at.lane() + vector) * kReplicas + role.cta % kReplicas) * (kTokens * kDeltaSquaresStride);
#pragma unroll 1
            for (u32 head = first; head < end; ++head) {
                const u64* mine = words + head * kSquareWords + lane % kSquareWords;
                u64 word = load_relaxed(mine);
                for (u32 rounds = 1; !__all_sync(kFullWarp, value_has_tag(word, tag)); ++rounds) {
                    if (must_leave(role.stopped())) return false;
                    if (rounds % 1024 == 0) note_wait(kOutPhase, at.layer(), at.lane() + vector, tag, words, kDeltaHeads * kSquareWords);
                    word = load_relaxed(mine);
                }
                const float scale = head_scale(word);
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i)
                    if (is_head_of(head, vector, i)) scales[i] = scale;
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
#ifdef KOG_DELTA_PASSES
    // The same in passes of several tokens, whose words of a head are asked for together. It stands apart, since what one token's has would have other
    // instructions.
    using HeadScales = float[AttendedSlice::kLoads][kTokens];  // of this thread's units
    __device__ __forceinline__ bool wait_for_scales(const Place& at, HeadScales& scales) {
        using S = AttendedSlice;
        const u32 tag = layer_tag(pass.number, at.layer()), columns = S::kOfVector * 4, first = warp * columns / kValueDim;
        const u32 end = min(((warp + 1) * columns + kValueDim - 1) / kValueDim, static_cast<u32>(kDeltaHeads));
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i)
#pragma unroll
            for (int token = 0; token < kTokens; ++token) scales[i][token] = 0;
#pragma unroll 1
        for (u32 vector = 0; vector < kGatheredAttended; ++vector) {
            const u64* words = reinterpret_cast<const u64*>(params.words_ptr) + kDeltaSquaresOffset +
                               ((at.lane() + vector) * kReplicas + role.cta % kReplicas) * (kTokens * kDeltaSquaresStride);
#pragma unroll 1
            for (u32 head = first; head < end; ++head) {
                const u64* mine = words + head * kSquareWords + lane % kSquareWords;
                u64 squares[kTokens];
                for (u32 rounds = 1; !have_squares(mine, tag, squares); ++rounds) {
                    if (must_leave(role.stopped())) return false;
                    if (rounds % 1024 == 0) note_wait(kOutPhase, at.layer(), at.lane() + vector, tag, words, kDeltaHeads * kSquareWords);
                }
#pragma unroll
                for (int token = 0; token < kTokens; ++token) {
                    const float scale = head_scale(squares[token]);
#pragma unroll
                    for (int i = 0; i < S::kLoads; ++i)
                        if (is_head_of(head, vector, i)) scales[i][token] = scale;
                }
            }
        }
        return true;
    }
    // Look for a thread's words of all tokens; whether all threads of the warp have theirs.
    static __device__ __forceinline__ bool have_squares(const u64* mine, u32 tag, u64 (&squares)[kTokens]) {
        bool have = true;
#pragma unroll
        for (int token = 0; token < kTokens; ++token) squares[token] = load_relaxed(mine + token * kDeltaSquaresStride);
#pragma unroll
        for (int token = 0; token < kTokens; ++token) have = have && value_has_tag(squares[token], tag);
        return __all_sync(kFullWarp, have);
    }
    // x of a token's values, which are in `got` from `from` on.
    __device__ __forceinline__ void write_heads(const HeadScales& scales, u32 token, int from) {
        using S = AttendedSlice;
        const auto unit = [&](int i) {
            const float4 v = S::is_real(warp, lane, i) ? values(got[from + i]) : make_float4(0, 0, 0, 0);
            const float scale = of_token(scales[i], token);
            return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        };
        write_all<NetOutputX, S::kLoads, S::kOfVector>(unit, [&](int i) { return S::is_mine(lane, i); }, token);
    }
#endif
};

}  // namespace kog
