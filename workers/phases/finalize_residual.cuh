// The residual streams: each product's rows, with delayed or awaited sums of other lanes and ranks, into the rows of the streams that this thread block
// owns. These, and the partials of the last layers, are in its shared memory (`residual`, `history`), where nothing else changes them.
#pragma once
#include "finalize_normed.cuh"

namespace kog {

constexpr bool kSendsDelayed = kRanks > 1 && !kOneStream;
// With one stream the sums of the lanes' first and second half are rounded to words before they are added, on any number of ranks: two
// ranks send each other words.
constexpr bool kRoundsHalves = kOneStream && kModelLanes > 1;

// What peers have sent for the next product, if it has been read already.
struct EarlySums {
    SumFromPeers<kRanks, OutOp::kRows> sums;
    bool is_there = false;
};

// Biases of a row of the residual, which the first lane of the model adds: of attention's output, and of the chosen experts.
#ifdef KOG_EXPERTS
constexpr bool kHasResidualBias = kOutBias || kExpertBias, kBiasOfTokens = kExpertBias && kTokens > 1;
#else
constexpr bool kHasResidualBias = kOutBias, kBiasOfTokens = false;
#endif
__device__ __forceinline__ float residual_bias(const FinalizedRows& rows, u32 kind, u32 layer, u32 lane_idx, u32 row, u32 token = 0) {
    float bias = 0;
    if (lane_idx != 0 || (kRanks > 1 && rows.peers.rank != 0) || row >= kHidden) return bias;
    if constexpr (kOutBias)
        if (kind == 0) bias = WeightFormat::low(reinterpret_cast<const u16*>(rows.params.out_bias_ptr)[layer * kHidden + row]);
#ifdef KOG_EXPERTS
    if constexpr (kExpertBias)
        if (kind == 1)
#pragma unroll
            for (int k = 0; k < kChosen; ++k)
                bias += rows.role.shared->chosen_weights[token][k] *
                        WeightFormat::low(reinterpret_cast<const u16*>(
                            rows.params.down_bias_ptr)[(layer * kNumExperts + rows.role.shared->chosen[token][k]) * kHidden + row]);
#endif
    return bias;
}

// The token's embedding into all streams.
__device__ __forceinline__ void begin_streams(const FinalizedRows& rows) {
#pragma unroll 1
    for (u32 token = 0; token < kTokens; ++token) {
        const u16* row = reinterpret_cast<const u16*>(rows.params.embedding_ptr) + static_cast<u64>(of_token(rows.pass.tokens, token)) * kHidden;
#pragma unroll 1
        for (u32 i = rows.lane; i < OutOp::kCtaRows; i += 32) {
            const u32 column = rows.role.cta * OutOp::kCtaRows + i;
            const float value = column < kHidden ? WeightFormat::low(row[column]) : 0.0f;
#pragma unroll 1
            for (u32 stream = 0; stream < kStreams; ++stream) rows.role.shared->residual[token][stream][i] = value;
        }
    }
    __syncwarp();
}

// Binary tree over the lanes' partials of one row.
__device__ __forceinline__ float lane_sum(const float (&partials)[kLanes][OutOp::kCtaRows], u32 row) {
    float sum[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum[i] = partials[i][row];
#pragma unroll
    for (int width = 1; width < kLanes; width *= 2)
#pragma unroll
        for (int i = 0; i + width < kLanes; i += 2 * width)
            sum[i] = kRoundsHalves && kRanks == 1 && 2 * width == kLanes ? rounded_half(sum[i]) + rounded_half(sum[i + width]) : sum[i] + sum[i + width];
    return sum[0];
}

// Rows of a lane's stream, for this rank's thread blocks; the last ones for those of all ranks that read them for the LM head.
__device__ __forceinline__ void publish_stream(FinalizedRows& rows, u32 kind, u32 layer, u32 lane_idx, u32 first_row, float stream, u32 tag, u32 token = 0) {
    if (kStreamsToAll && kind == 1 && layer == kLayers - 1) {
        const u64 at = stream_box().row(kRanks, 0, rows.peers.rank) + lane_idx * kReplicas * kStreamCopyWords;
        publish_vector_to_all<kRanks, OutOp::kRows, kReplicas>(rows.peers, at, kStreamCopyWords, first_row, kHidden, stream, tag);
        return;
    }
    u64* words = reinterpret_cast<u64*>(rows.params.words_ptr) + (kind == 0 ? kMiddleOffset : kStreamOffset) + token * kStreamStride;
    rows.publish<OutOp::kRows, 1>(words + lane_idx * (kReplicas * kTokens * kStreamStride), kTokens * kStreamStride, first_row, kHidden, stream, tag);
}
// Push the own lanes' sum of these rows to the peers; does not wait. Sums of a pass's tokens lie one behind the other.
__device__ __forceinline__ void publish_sum(const FinalizedRows& rows, u32 kind, u32 layer, u32 first_row, float own_sum, u32 token = 0) {
    const u32 slot = sum_slot(kind, layer);
    publish_sum_to_peers<kRanks, OutOp::kRows>(rows.peers, sum_box(kind).behind(token * kHidden), slot, first_row, kHidden, own_sum,
                                               sum_tag(kind, rows.pass.number + 1, slot));
}
// Sum over all ranks of what they have published for a layer, from a `SumFromPeers` that may have been loaded already. False: leave.
__device__ __forceinline__ bool total_of_ranks(const FinalizedRows& rows, SumFromPeers<kRanks, OutOp::kRows>& from, bool loaded, u32 kind, u32 layer,
                                               u32 first_row, float& sum) {
    const u32 slot = sum_slot(kind, layer);
    if (loaded) from.locate(rows.peers, sum_box(kind), slot, first_row, kHidden);
    else from.load(rows.peers, sum_box(kind), slot, first_row, kHidden);
    return from.template total<kRoundsHalves>(rows.peers, sum_box(kind), sum, sum_tag(kind, rows.pass.number + 1, slot), rows.role.stopped(),
                      rows.role.shared->peer_notes[0], sum);
}
// The same of all tokens of a pass, from and to `sums`.
__device__ __forceinline__ bool totals_of_ranks(const FinalizedRows& rows, u32 kind, u32 layer, u32 first_row, float (&sums)[kTokens]) {
    const u32 slot = sum_slot(kind, layer);
    return collect_totals<kRanks, OutOp::kRows, kRoundsHalves>(rows.peers, sum_box(kind), slot, kHidden, first_row, kHidden, sums,
                                                               sum_tag(kind, rows.pass.number + 1, slot), rows.role.stopped(), rows.role.shared->peer_notes[0]);
}
// Read what peers have sent for the product after number `product` while that one is being multiplied; usually it is there. From
// here to that product nothing else may touch `early`.
__device__ __forceinline__ void look_ahead(FinalizedRows& rows, EarlySums& early, u32 product) {
    if constexpr (!kSendsDelayed) return;
    const Place next(product + 1);
    const u32 kind = next.phase() >> 1;
    early.is_there = (next.phase() & 1) && delayed_layers(kind).has(next.layer());  // none behind the last
    if (early.is_there)
        early.sums.load(rows.peers, sum_box(kind), sum_slot(kind, next.layer() - kDelay), rows.role.cta * OutOp::kCtaRows, kHidden);
}

// The output of a block (kind 0: attention, 1: MLP) into the residual streams. The last hosted lane is the last to finish a block.
__device__ __forceinline__ bool finalize_residual(FinalizedRows& rows, EarlySums& early, u32 kind, u32 layer, u32 lane_idx, u32 tag, u32 product) {
    const bool blocking = blocking_layers(kind).has(layer);
    const bool delayed = delayed_layers(kind).has(layer);
    Shared& shared = *rows.role.shared;
    const bool summed = kRanks > 1 && lane_idx == kLanes - 1 && summed_mask(kind).has(layer);
    auto& now = shared.history[0][kind][layer % kHistory];
    auto& then = shared.history[0][kind][(layer + 1) % kHistory];  // of layer - kDelay
    const bool mine = rows.lane < OutOp::kRows;
#pragma unroll 1
    for (u32 block = 0; block < OutOp::kBlocks; ++block) {
        const u32 row = block * OutOp::kRows + (mine ? rows.lane : 0), first_row = rows.role.cta * OutOp::kCtaRows + block * OutOp::kRows;
        float others = 0, sum;
        if (delayed) {
            others = lane_sum(then, row);
            if (kSendsDelayed && !total_of_ranks(rows, early.sums, block == 0 && early.is_there, kind, layer - kDelay, first_row, others)) return false;
            others -= then[lane_idx][row];
        }
        if (block == OutOp::kBlocks - 1) look_ahead(rows, early, product);
        float stream = load_shared_f32(rows.role.base + KOG_OFFSET(residual[0][lane_idx][row]));
        const float own_scale = rows.row_scale<OutOp>(block);
        if (!rows.row_sum(sum, OutOp::kRows)) return false;
        if constexpr (kRowScales) sum *= own_scale;
        sum *= kInverseXScale;
        if (!blocking) {  // the usual way, with as little as possible between the sum and its publication
            stream += (delayed ? sum : sum * kLocalScale) + others;
            publish_stream(rows, kind, layer, lane_idx, first_row, stream, tag);
            if (mine) now[lane_idx][row] = sum, shared.residual[0][lane_idx][row] = stream;
            rows.end_block();
            if (block == OutOp::kBlocks - 1) rows.count_vector(lane_idx);  // nobody here waits for what goes to the peers
            if (kSendsDelayed && summed) publish_sum(rows, kind, layer, first_row, lane_sum(now, row));
            continue;
        }
        if (mine) now[lane_idx][row] = sum;
        // A blocking sum goes to all lanes' streams once the last lane's partial is there.
        u32 from = lane_idx == kLanes - 1 ? 0 : kLanes;
        if (from == 0) {
            sum = lane_sum(now, row);
            if (summed) publish_sum(rows, kind, layer, first_row, sum);
            SumFromPeers<kRanks, OutOp::kRows> from;
            if (!total_of_ranks(rows, from, false, kind, layer, first_row, sum)) return false;
        }
#pragma unroll 1
        for (; from < kLanes; ++from) {
            stream = shared.residual[0][from][row] + sum;
            if (mine) shared.residual[0][from][row] = stream;
            publish_stream(rows, kind, layer, from, first_row, stream, tag);
        }
        rows.end_block();
        if (block == OutOp::kBlocks - 1) rows.count_vector(lane_idx);
    }
    return true;
}

// The same where all lanes share one stream: every sum is awaited, and goes to it once the last lane's partial is there. What peers
// wait for is sent before anything is awaited.
__device__ __forceinline__ bool finalize_shared_residual(FinalizedRows& rows, u32 kind, u32 layer, u32 lane_idx, u32 tag) {
    Shared& shared = *rows.role.shared;
    const bool mine = rows.lane < OutOp::kRows, is_last = lane_idx == kLanes - 1;
#pragma unroll 1
    for (u32 block = 0; block < OutOp::kBlocks; ++block) {
        const u32 row = block * OutOp::kRows + (mine ? rows.lane : 0);
        float sums[kTokens];
        const float own_scale = rows.row_scale<OutOp>(block), bias = residual_bias(rows, kind, layer, lane_idx, rows.role.cta * OutOp::kCtaRows + row);
        [[maybe_unused]] float biases[kTokens] = {bias};
        if constexpr (kBiasOfTokens)
#pragma unroll 1
            for (u32 token = 1; token < kTokens; ++token)
                set_of_token(biases, token, residual_bias(rows, kind, layer, lane_idx, rows.role.cta * OutOp::kCtaRows + row, token));
        if (!rows.row_sum(sums, OutOp::kRows)) return false;
#pragma unroll
        for (u32 token = 0; token < kTokens; ++token) {
            float sum = of_token(sums, token);
            if constexpr (kRowScales) sum *= own_scale;
            if (kPlainNetOutputs && kind == 0 && has_delta_net(layer)) sum *= kNetFactor;
            sum *= kInverseXScale;
            if constexpr (kHasResidualBias) sum += kBiasOfTokens ? of_token(biases, token) : bias;
            if (mine) shared.history[token][kind][0][lane_idx][row] = sum;
        }
        rows.end_block();
        if (kDirectSums && is_last) {
            publish_vector_to_all<kRanks, OutOp::kRows, kSumCopies>(rows.peers, sum_box(kind).row(kRanks, 0, rows.peers.rank), kHidden / 2,
                                                                   rows.role.cta * OutOp::kCtaRows + block * OutOp::kRows, kHidden,
                                                                   lane_sum(shared.history[0][kind][0], row), tag);
        } else if (kRanks > 1 && is_last) {
#pragma unroll 1
            for (u32 token = 0; token < kTokens; ++token)
                publish_sum(rows, kind, layer, rows.role.cta * OutOp::kCtaRows + block * OutOp::kRows, lane_sum(shared.history[token][kind][0], row), token);
        }
    }
#pragma unroll 1
    for (u32 block = is_last && !kDirectSums ? 0 : OutOp::kBlocks; block < OutOp::kBlocks; ++block) {
        const u32 row = block * OutOp::kRows + (mine ? rows.lane : 0), first_row = rows.role.cta * OutOp::kCtaRows + block * OutOp::kRows;
        [[maybe_unused]] float totals[kTokens];  // of all ranks, which are asked for all tokens' at once
        if constexpr (kRanks > 1 && kTokens > 1) {
#pragma unroll
            for (int token = 0; token < kTokens; ++token) totals[token] = lane_sum(shared.history[token][kind][0], row);
            if (!totals_of_ranks(rows, kind, layer, first_row, totals)) return false;
        }
#pragma unroll
        for (u32 token = 0; token < kTokens; ++token) {
            float sum;
            if constexpr (kRanks > 1 && kTokens > 1) {
                sum = of_token(totals, token);
            } else {
                sum = lane_sum(shared.history[token][kind][0], row);
                SumFromPeers<kRanks, OutOp::kRows> from;
                if (!total_of_ranks(rows, from, false, kind, layer, first_row, sum)) return false;
            }
            const float stream = shared.residual[token][0][row] + sum;
            if (mine) shared.residual[token][0][row] = stream;
            publish_stream(rows, kind, layer, 0, first_row, stream, tag, token);
        }
    }
    rows.count_vector(lane_idx);
    return true;
}

}  // namespace kog
