// The finaliser: one warp adds the partial sums of a block of rows, does what the phase asks (norm scale, rotary embedding, SwiGLU,
// residual and delayed sums, best logit), and publishes the rows that this thread block owns. A row of the residual streams has one
// owner for the whole token, so streams and partials never leave its shared memory.
#pragma once
#include "finalize_head.cuh"
#include "finalize_residual.cuh"
#include "finalize_union.cuh"

namespace kog {

// What the warp keeps from product to product. It is one object, since the compiler makes other instructions of three.
struct Finalizer {
    FinalizedRows rows;
    EarlySums early;           // of the next product that a residual takes
    TokenScales shared_scale;  // of the stream that all lanes share, for their QKV or GATE_UP
};

__device__ __forceinline__ void finalize(const KogDecodeParams& params, const KogPeers& peers, const Role& role) {
    Finalizer finalizer{{params, peers, role, laneid()}};
    FinalizedRows& rows = finalizer.rows;
    for (u32 turn = 0; begin_pass(role, turn, rows.pass); ++turn) {
        rows.turn = turn, rows.first_vector = rows.num_vectors;
        if (!kHeadOnly) begin_streams(rows);
#pragma unroll 1
        for (u32 number = first_product(); number < kNumProducts; ++number) {
            const Place at(number);
            const u32 tag = layer_tag(rows.pass.number, at.layer());
            if (kRanks > 1) rows.lane = opaque(laneid());  // addresses are computed anew instead of being kept
            if (kRowScales) rows.product = number;
            if (!(at.phase() & 1)) look_ahead(rows, finalizer.early, number);
            bool ok;
#ifdef KOG_DELTA
            if (at.phase() == kQkvPhase && has_delta_net(at.layer())) ok = finalize_delta_in(rows, finalizer.shared_scale, at.lane(), tag);
            else
#endif
            if (at.phase() == kQkvPhase) ok = finalize_qkv(rows, finalizer.shared_scale, at.layer(), at.lane(), tag);
#ifdef KOG_UNION
            else if (at.phase() == kGateUpPhase) ok = gate_up_of_union(rows, at.layer(), tag);
#elif defined KOG_EXPERTS
            else if (at.phase() == kGateUpPhase) ok = kTokens == 1 ? gate_up_of_experts(rows, at.layer(), tag) : gate_up_of_pass(rows, at.layer(), tag);
#else
            else if (at.phase() == kGateUpPhase) ok = finalize_gate_up(rows, finalizer.shared_scale, at.lane(), tag);
#endif
            else if (kOneStream) ok = finalize_shared_residual(rows, at.phase() >> 1, at.layer(), at.lane(), tag);
            else ok = finalize_residual(rows, finalizer.early, at.phase() >> 1, at.layer(), at.lane(), tag, number);
            if (!ok) return;
        }
        Candidate best[kTokens];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) best[token] = {-INFINITY, kIdMask};
        if (has_head(role, turn)) {
#pragma unroll 1
            for (u32 product = 0; product < kHeadProducts; ++product)
                if (!finalize_head(rows, product, best)) return;
        }
        end_pass(rows, best);
    }
}

}  // namespace kog
