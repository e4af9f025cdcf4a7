// Delta nets of a chunk of tokens, but for the rule (rule.cu): what stands between the products and it. `workers/prefill/delta/plain.py` defines
// what is computed. Everything here is bounded by memory.
#include "delta_shape.cuh"
#include "delta_rows.cuh"

namespace kog {

constexpr u32 kParts = kLanes * (2 * kKeyHeads + kHeads);  // queries, keys and values of heads of all lanes
constexpr int kBefore = kConvWidth - 1;

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(kFullWarp, value, offset);
    return value;
}
// log(1 + exp(x)): the larger of x and 0, and 2 artanh(t / (2 + t)) of t = exp(-|x|), whose series is cut at 1e-9.
__device__ __forceinline__ float softplus(float x) {
    const float t = __expf(-fabsf(x)), s = t / (t + 2.0f), square = s * s;
    float series = 1.0f / 15;
#pragma unroll
    for (int odd = 13; odd > 0; odd -= 2) series = series * square + 1.0f / odd;
    return 2.0f * s * series + fmaxf(x, 0.0f);
}

// A head's query, key or value in some neighbouring rows, by a warp; a thread has four neighbouring channels of each 128.
struct PreparedPart {
    const DeltaParams& params;
    u32 lane, head, channel, width;  // `head`: among those of its kind in the lane; `channel`: its first one; `width`: values of it
    bool is_value, is_query;

    __device__ __forceinline__ PreparedPart(const DeltaParams& all, u32 part) : params(all) {
        lane = part / (2 * kKeyHeads + kHeads);
        const u32 of_lane = part % (2 * kKeyHeads + kHeads);
        is_query = of_lane < kKeyHeads, is_value = of_lane >= 2 * kKeyHeads;
        head = is_value ? of_lane - 2 * kKeyHeads : of_lane % kKeyHeads;
        channel = is_value ? 2 * kKeys + head * kValueDim : (is_query ? 0 : kKeys) + head * kKeyDim;
        width = is_value ? kValueDim : kKeyDim;
    }
    // Of row `row`, which may be one before the chunk.
    __device__ __forceinline__ float4 input(int row, u32 at) const {
        if (row >= 0) return four_of_input(projected_at(params, row, lane) + channel + at);
        const int position = start_of(params) + row;
        if (position < 0) return make_float4(0, 0, 0, 0);
        const float* from = own_states(params) + input_at(params, lane, channel + at, position);
        return make_float4(from[0], from[1], from[2], from[3]);
    }
    __device__ __forceinline__ void store(u32 row, u32 at, const float4& v, bool& finite) const {
        const uint2 packed = make_uint2(Fp16::pack(v.x, v.y), Fp16::pack(v.z, v.w));
        const float sum = (Fp16::low(packed.x) + Fp16::high(packed.x)) * 0.0f + (Fp16::low(packed.y) + Fp16::high(packed.y)) * 0.0f;
        finite = finite && sum == 0;
        const u32 heads = is_value ? kHeads : kKeyHeads;
        const u64 to = is_value ? params.value_ptr : is_query ? params.query_ptr : params.key_ptr;
        *reinterpret_cast<uint2*>(to + ((static_cast<u64>(row) * kLanes + lane) * heads + head) * width * 2 + at * 2) = packed;
    }
    // Rows `first` to `first` + kPreparedRows - 1. False: a value is not finite.
    __device__ __forceinline__ bool run(int first, int tokens) const {
        constexpr u32 kTurns = ((kValueDim > kKeyDim ? kValueDim : kKeyDim) + 127) / 128;
        static_assert(kKeyDim <= 128, "a query is that of one turn");
        bool finite = true;
        const float* taps = reinterpret_cast<const float*>(params.taps_ptr) + static_cast<u64>(lane) * kChannels * kConvWidth;
#pragma unroll 1
        for (u32 turn = 0; turn < kTurns; ++turn) {
            const u32 at = turn * 128 + laneid() * 4;
            if (turn * 128 >= width) break;
            const bool is_mine = at < width;
            const u32 from = is_mine ? at : 0;
            float4 inputs[kBefore + kPreparedRows], tap[kConvWidth];  // all are asked for at once; of a tap the four channels'
#pragma unroll
            for (int i = 0; i < kBefore + kPreparedRows; ++i) {
                const int row = first + i - kBefore;
                inputs[i] = row < tokens && first < tokens ? input(row, from) : make_float4(0, 0, 0, 0);
            }
            const float* of_channel = taps + (channel + from) * kConvWidth;
#pragma unroll
            for (int i = 0; i < kConvWidth; ++i)
                tap[i] = make_float4(of_channel[i], of_channel[kConvWidth + i], of_channel[2 * kConvWidth + i], of_channel[3 * kConvWidth + i]);
#pragma unroll
            for (int r = 0; r < kPreparedRows; ++r) {
                float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < kConvWidth; ++i) {
                    const float4& one = inputs[r + i];
                    v.x += one.x * tap[i].x, v.y += one.y * tap[i].y, v.z += one.z * tap[i].z, v.w += one.w * tap[i].w;
                }
                v = make_float4(v.x * sigmoid(v.x), v.y * sigmoid(v.y), v.z * sigmoid(v.z), v.w * sigmoid(v.w));
                if (first + r >= tokens) v = make_float4(0, 0, 0, 0);
                if (!is_value) {  // the same in all threads
                    const float squares = warp_sum(is_mine ? v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w : 0.0f);
                    const float scale = (is_query ? kQueryScale : 1.0f) / sqrtf(squares + kUnitEps);
                    v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
                }
                if (is_mine) store(first + r, at, v, finite);
            }
        }
        return finite;
    }
};

// Logarithms of decays, and betas, of kPreparedRows rows by a warp. They are 0 where no token is.
__device__ __forceinline__ void prepare_factors(const DeltaParams& params, u32 first, int tokens) {
    const u32 padded = num_blocks(params) * kBlock;
    for (u32 i = laneid(); i < kPreparedRows * kLanes * kHeads; i += 32) {
        const u32 head = i / kPreparedRows, row = first + i % kPreparedRows, lane = head / kHeads, of_lane = head % kHeads;
        float log_decay = 0, beta = 0;
        if (static_cast<int>(row) < tokens) {
            const float* factors = reinterpret_cast<const float*>(params.factors_ptr) + lane * (2 * kHeads) + of_lane;
            const float* input = projected_at(params, row, lane) + kChannels + kValues + of_lane * kTerms;
            float of_decay = 0, of_beta = 0;
#pragma unroll
            for (u32 term = 0; term < kTerms; ++term) of_decay += input[term], of_beta += input[kHeads * kTerms + term];
            log_decay = fmaxf(-__expf(factors[0]) * softplus(of_decay + factors[kHeads]), kLeastLog);
            beta = sigmoid(of_beta);
        }
        reinterpret_cast<float*>(params.logs_ptr)[static_cast<u64>(head) * padded + row] = log_decay;
        reinterpret_cast<float*>(params.beta_ptr)[static_cast<u64>(head) * padded + row] = beta;
    }
}

// A warp has kPreparedRows rows of a part; of each of these groups of rows one more has the factors.
__device__ __forceinline__ void prepare_rows(const DeltaParams& params) {
    const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, part = warp % (kParts + 1);
    const int first = static_cast<int>(warp / (kParts + 1)) * kPreparedRows, tokens = num_tokens(params);
    if (first >= static_cast<int>(num_blocks(params) * kBlock)) return;
    if (part == kParts) return prepare_factors(params, first, tokens);
    if (!PreparedPart(params, part).run(first, tokens)) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
}

// The convolution's inputs before the next chunk: of this one, or, if it has too few tokens, those that were there.
__device__ __forceinline__ void keep_rows(const DeltaParams& params) {
    const int tokens = num_tokens(params), end = start_of(params) + tokens;
    const float* before = own_states(params);
    float* made = reinterpret_cast<float*>(params.made_ptr);
    const u32 count = kLanes * kHeads * kSlices * kBefore * kItemChannels;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 place = i % kItemChannels, back = 1 + i / kItemChannels % kBefore, item = i / (kItemChannels * kBefore);
        const int position = end - static_cast<int>(back), row = tokens - static_cast<int>(back);
        if (position < 0) continue;
        const u32 slice = item % kSlices, head = item / kSlices, lane = head / kHeads, of_lane = head % kHeads;
        const u64 at = item_at(params, head, slice) + kSliceValues + position % kConvWidth * kItemChannels + place;
        u32 channel = 2 * kKeys + of_lane * kValueDim + slice * kSliceColumns + place - 2 * kKeyDim;
        if (place < 2 * kKeyDim) channel = place / kKeyDim * kKeys + of_lane / kSharers * kKeyDim + place % kKeyDim;
        made[at] = row >= 0 ? projected_at(params, row, lane)[channel] : before[at];
    }
}

// The norm of a head's outputs in a row, times SiLU of its gates, by a warp.
__device__ __forceinline__ void norm_rows(const DeltaParams& params) {
    constexpr int kTurns = (kValueDim + 127) / 128;
    const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, head = warp % (kLanes * kHeads), row = warp / (kLanes * kHeads);
    if (row >= params.size) return;
    const u32 lane = head / kHeads, of_lane = head % kHeads;
    const float* out = projected_at(params, row, lane) + 2 * kKeys + of_lane * kValueDim;
    const float* norm = reinterpret_cast<const float*>(params.norm_ptr);
    float4 values[kTurns];
    float squares = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const u32 at = turn * 128 + laneid() * 4;
        values[turn] = at < kValueDim ? four_of_input(out + at) : make_float4(0, 0, 0, 0);
        const float4& v = values[turn];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = 1.0f / sqrtf(warp_sum(squares) * (1.0f / kValueDim) + kNormEps);
    uint2* to = reinterpret_cast<uint2*>(params.mixed_ptr) + ((static_cast<u64>(row) * kLanes + lane) * kHeads + of_lane) * (kValueDim / 4);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const u32 at = turn * 128 + laneid() * 4;
        if (at >= kValueDim) break;
        const float4 v = values[turn], z = four_of_input(out + kValues + at), w = *reinterpret_cast<const float4*>(norm + at);
        to[at / 4] = make_uint2(Fp16::pack(v.x * scale * w.x * (z.x * sigmoid(z.x)), v.y * scale * w.y * (z.y * sigmoid(z.y))),
                                Fp16::pack(v.z * scale * w.z * (z.z * sigmoid(z.z)), v.w * scale * w.w * (z.w * sigmoid(z.w))));
    }
}

// What a chunk has made of all states of a sequence.
__device__ __forceinline__ void keep_all(const DeltaParams& params) {
    if (*reinterpret_cast<const int*>(params.overflow_ptr)) return;
    const float4* made = reinterpret_cast<const float4*>(params.made_ptr);
    float4* states = reinterpret_cast<float4*>(const_cast<float*>(own_states(params)));
    static_assert(kSequenceValues % 4 == 0, "whole fours");
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < kSequenceValues / 4; i += static_cast<u64>(gridDim.x) * blockDim.x) states[i] = made[i];
}

}  // namespace kog

using namespace kog;

#define KOG_DELTA_KERNEL(name, body) \
    __global__ void __launch_bounds__(256) name(const __grid_constant__ DeltaParams params) { body(params); }

extern "C" {

KOG_DELTA_KERNEL(prepare, prepare_rows)
KOG_DELTA_KERNEL(keep_inputs, keep_rows)
KOG_DELTA_KERNEL(norm_heads, norm_rows)
KOG_DELTA_KERNEL(keep_states, keep_all)

}  // extern "C"
