// What gated attention and delta nets need besides, of a model with one residual stream: `workers/prefill/dense/operations.py` defines it.
#include "gates_shape.cuh"

namespace kog {

using GatesParams = KogGatesParams;
static_assert(kGates % 2 == 0 && kQkvRows % 2 == 0, "pairs");

// Outputs of heads times the sigmoid of their gates, two neighbours at a time.
__device__ __forceinline__ void gate_all(const GatesParams& params) {
    constexpr u32 kPairs = kGates / 2;
    const u32 count = params.size * kLanes * kPairs;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 pair = i % kPairs, row = i / kPairs % params.size, lane = i / kPairs / params.size;
        const float* gates = reinterpret_cast<const float*>(params.qkv_ptr) + (static_cast<u64>(row) * kLanes + lane) * kQkvRows + (kQkvRows - kGates);
        const float2 gate = reinterpret_cast<const float2*>(gates)[pair];
        u32* attended = reinterpret_cast<u32*>(params.attended_ptr) + i;
        *attended = Fp16::pack(__fdividef(Fp16::low(*attended), 1.0f + __expf(-gate.x)), __fdividef(Fp16::high(*attended), 1.0f + __expf(-gate.y)));
    }
}

// Of the prompt's last token: its gates, with all else of its row, and what a delta net has mixed. One thread block.
__device__ __forceinline__ void take_all(const GatesParams& params) {
    const u32 row = *reinterpret_cast<const int*>(params.last_position_ptr) - *reinterpret_cast<const int*>(params.place_ptr);
    const float* qkv = reinterpret_cast<const float*>(params.qkv_ptr) + static_cast<u64>(row) * (kLanes * kQkvRows);
    for (u32 i = threadIdx.x; i < kLanes * kQkvRows; i += blockDim.x) reinterpret_cast<float*>(params.last_qkv_ptr)[i] = qkv[i];
    if constexpr (kMixed > 0) {
        const u16* mixed = reinterpret_cast<const u16*>(params.mixed_ptr) + static_cast<u64>(row) * kMixed;
        for (u32 i = threadIdx.x; i < kMixed; i += blockDim.x) reinterpret_cast<u16*>(params.last_mixed_ptr)[i] = mixed[i];
    }
}

// What the shared expert gives of a row, a thread block's, times the sigmoid of its gate, is added to what the others give.
__device__ __forceinline__ void add_shared_row(const GatesParams& params) {
    constexpr u32 kPairs = kHidden / 2;
    const u32* x = reinterpret_cast<const u32*>(params.x_ptr) + static_cast<u64>(blockIdx.x) * kPairs;
    const float2* gate = reinterpret_cast<const float2*>(params.shared_gate_ptr);
    float sum = 0;
    for (u32 i = threadIdx.x; i < kPairs; i += blockDim.x) sum += Fp16::low(x[i]) * gate[i].x + Fp16::high(x[i]) * gate[i].y;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    __shared__ float sums[8];
    if (laneid() == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float logit = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) logit += sums[warp];
    const float weight = __fdividef(1.0f, 1.0f + __expf(-logit));
    for (u32 i = threadIdx.x; i < kLanes * kPairs; i += blockDim.x) {
        const u64 at = (static_cast<u64>(i / kPairs) * params.size + blockIdx.x) * kPairs + i % kPairs;
        const u32 shared = reinterpret_cast<const u32*>(params.shared_ptr)[at];
        u32* partial = reinterpret_cast<u32*>(params.partial_ptr) + at;
        *partial = Fp16::pack(Fp16::low(*partial) + weight * Fp16::low(shared), Fp16::high(*partial) + weight * Fp16::high(shared));
    }
}

}  // namespace kog

using namespace kog;

extern "C" {

__global__ void __launch_bounds__(256) gate_heads(const __grid_constant__ GatesParams params) { gate_all(params); }
__global__ void __launch_bounds__(256) add_shared(const __grid_constant__ GatesParams params) { add_shared_row(params); }
__global__ void __launch_bounds__(256) take_last_mixer(const __grid_constant__ GatesParams params) { take_all(params); }

}  // extern "C"
