// What a sublayer adds to the residual streams: sums over lanes, awaited, delayed or of the lane alone, and the norm of what follows.
#pragma once

#include "prefill_units.cuh"

namespace kog {

// ...Alone: `partial` (blocking) or `past` (delayed) has all lanes of the model, to be added up here.
enum class Mode { kBlocking, kBlockingAlone, kDelayed, kDelayedAlone, kLocal };
enum class Form { kPlain, kSplit, kExact };  // kSplit: the streams have two planes, results of products one

// A thread has the same columns of all lanes of a row. What it reads of several lanes is asked for at once, as far as registers
// suffice: memory wants as much under way.
//
// kShared: the streams are the same in all lanes, and kept once; what a delayed or a local sum makes of them is written to all.
template <Mode kMode, Form kForm, bool kShared>
__device__ __forceinline__ void residual(const KogPrefillParams& params, u32 row) {
    constexpr bool kExact = kForm == Form::kExact;
    using Streams = Kept<kForm != Form::kPlain>;
    using Results = Kept<kExact>;
    constexpr bool kDelays = kMode == Mode::kDelayed || kMode == Mode::kDelayedAlone;
    constexpr bool kBlocks = kMode == Mode::kBlocking || kMode == Mode::kBlockingAlone;
    constexpr bool kHasTotal = kMode == Mode::kBlocking || kMode == Mode::kDelayed;
    constexpr bool kHoldsPasts = kDelays && !kExact && kHoldsLanes;
    constexpr int kMost = kExact ? 2 : kForm == Form::kSplit || kBlocks ? 4 : kHeldLanes, kAhead = kLanes < kMost ? kLanes : kMost;
    const u32 size = params.size;
    const u32 rest = size * kUnits;
    uint4* stream = reinterpret_cast<uint4*>(params.stream_ptr);
    const float* __restrict__ totals = reinterpret_cast<const float*>(params.total_ptr) + static_cast<u64>(row) * kHidden;
    float* own_sum = reinterpret_cast<float*>(params.own_sum_ptr);
    const Scales scales(params.unscale_ptr ? params.unscale_ptr : params.scale_ptr);
    const bool scales_input = params.unscale_ptr != 0, scales_output = params.scale_ptr != 0;
    float squares[kLanes] = {};
    for (u32 unit = threadIdx.x; unit < kUnits; unit += kRowThreads) {  // a constant: most models take one turn
        const auto stream_at = [&](int lane) { return Streams::at(lane, row, size, kUnits) + unit; };
        const auto result_at = [&](int lane) { return Results::at(lane, row, size, kUnits) + unit; };
        typename Streams::Held streams[kShared ? 1 : kAhead];
        typename Results::Held partials[kAhead], pasts[kHoldsPasts ? kLanes : 1];
        const auto load = [&](int lane) {
            if constexpr (!kShared) streams[lane % kAhead] = Streams::held_operand(stream + stream_at(lane), rest);
            if constexpr (!kBlocks) partials[lane % kAhead] = Results::held_result(params.partial_ptr, result_at(lane), rest);
        };
        Unit total{};
        Lanes tree;
        if constexpr (kHoldsPasts) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) pasts[lane] = Results::held_result(params.past_ptr, result_at(lane), rest);
        }
        if constexpr (kShared) streams[0] = Streams::held_operand(stream + stream_at(0), rest);
#pragma unroll
        for (int lane = 0; lane < kAhead; ++lane) load(lane);
        if (kHasTotal) total = float_unit(totals + unit * kUnit);
        if constexpr (kMode == Mode::kDelayedAlone || kMode == Mode::kBlockingAlone) {
#pragma unroll
            for (int lane = 0; lane < kLanes; ++lane) {
                if constexpr (kHoldsPasts) tree.add(lane, pasts[lane].unit());
                else tree.add(lane, Results::result(kDelays ? params.past_ptr : params.partial_ptr, result_at(lane), rest));
            }
            total = tree.sum;
        }
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
            Unit h = streams[kShared ? 0 : lane % kAhead].unit(), p{}, old{};
            if constexpr (!kBlocks) p = partials[lane % kAhead].unit();
            if (lane + kAhead < kLanes) load(lane + kAhead);  // before what this lane stores
            if (scales_input) multiply(h, scales.unit(lane, unit));
            if constexpr (kMode == Mode::kDelayed || kMode == Mode::kLocal) tree.add(lane, p);
            if constexpr (kHoldsPasts) old = pasts[lane].unit();
            else if constexpr (kDelays && kExact) old = Results::result(params.past_ptr, result_at(lane), rest);
            else if constexpr (kDelays) old = widened(reinterpret_cast<const uint4*>(params.past_ptr)[result_at(lane)]);  // L1 has it
#pragma unroll
            for (int k = 0; k < kUnit; ++k) {
                if (kBlocks) h.v[k] += total.v[k];
                else if (kMode == Mode::kLocal) h.v[k] += p.v[k] * kLocalScale;
                else h.v[k] += p.v[k] + (total.v[k] - old.v[k]);
            }
            squares[lane] += square_sum(h);
            if (kShared && kBlocks && lane >= params.num_written) continue;
            if (scales_output) multiply(h, scales.unit(lane, unit));
            Streams::store(stream + stream_at(lane), rest, h);
        }
        if ((kMode == Mode::kDelayed || kMode == Mode::kLocal) && own_sum)
            store_unit(own_sum + static_cast<u64>(row) * kHidden + unit * kUnit, tree.sum);
    }
    store_inverse_rms(squares, reinterpret_cast<float*>(params.inverse_rms_ptr), row, size);
}

// Whether a row of the chunk stands behind the prompt.
__device__ __forceinline__ bool is_padding(const KogPrefillParams& params, u32 row) {
    const int start = *reinterpret_cast<const int*>(params.place_ptr), last = *reinterpret_cast<const int*>(params.last_position_ptr);
    return start + static_cast<int>(row) > last;
}

template <class Streams>
__device__ __forceinline__ void clear_row(const KogPrefillParams& params, u32 row) {
    uint4* stream = reinterpret_cast<uint4*>(params.stream_ptr);
    for (u32 lane = 0; lane < kLanes; ++lane)
        for (u32 unit = threadIdx.x; unit < kUnits; unit += kRowThreads)
            Streams::store(stream + Streams::at(lane, row, params.size, kUnits) + unit, params.size * kUnits, Unit{});
}

// A thread block for each row (in a loop, without which the compiler runs out of registers).
template <Mode kMode, Form kForm>
__device__ __forceinline__ void residual_row(const KogPrefillParams& params) {
    constexpr bool kMayShare = kForm != Form::kExact && kLanes > 1 && kScales == 1;
    let_successors_begin();
    // Padding stays 0. It is not looked for where that would be waited for and is little: in small chunks, and far from the end.
    if (params.size >= 4 * kMostPadding && blockIdx.x + kMostPadding >= params.size && is_padding(params, blockIdx.x)) {
        if (kMayShare && params.is_shared && params.num_written > 1) clear_row<Kept<kForm != Form::kPlain>>(params, blockIdx.x);
        return;
    }
    for (u32 row = blockIdx.x; row < params.size; row += gridDim.x) {
        if (kMayShare && params.is_shared) residual<kMode, kForm, kMayShare>(params, row);
        else residual<kMode, kForm, false>(params, row);
    }
}

}  // namespace kog
