// What gates are made of.
#pragma once
#include "layout.cuh"

namespace kog {

__device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(x * -kLog2e)); }

// The usual activation of an FFN.
__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

}  // namespace kog
