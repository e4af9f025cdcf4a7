// Biases of the residual.
#pragma once
#include "finalize_union.cuh"

namespace kog {

// Biases of a row of the residual, which the first lane of the model adds: of attention's output, and of the chosen experts.
struct BiasedRows : FinalizedUnion {
#ifdef KOG_EXPERTS
    static constexpr bool kHasResidualBias = kOutBias || kExpertBias, kBiasOfTokens = kExpertBias && kTokens > 1;
#else
    static constexpr bool kHasResidualBias = kOutBias, kBiasOfTokens = false;
#endif
    __device__ __forceinline__ float residual_bias(u32 kind, u32 layer, u32 lane_idx, u32 row, u32 token = 0) const {
        float bias = 0;
        if (lane_idx != 0 || (kRanks > 1 && peers.rank != 0) || row >= kHidden) return bias;
        if constexpr (kOutBias)
            if (kind == 0) bias = WeightFormat::low(reinterpret_cast<const u16*>(params.out_bias_ptr)[layer * kHidden + row]);
#ifdef KOG_EXPERTS
        if constexpr (kExpertBias)
            if (kind == 1)
#pragma unroll
                for (int k = 0; k < kChosen; ++k)
                    bias += role.shared->chosen_weights[token][k] *
                            WeightFormat::low(reinterpret_cast<const u16*>(params.down_bias_ptr)[(layer * kNumExperts + role.shared->chosen[token][k]) * kHidden + row]);
#endif
        return bias;
    }
};

}  // namespace kog
