// The gate of Kimi Delta Attention (arXiv 2510.26692), in base 2:
//   log2 decay = lower_bound * log2(e) * sigmoid(exp(A_log) * (g + dt_bias))
#pragma once

#include "common/math.h"

namespace flash_kda {

// Constants of one head; sigmoid(x) is evaluated as 1 / (1 + 2^z) with z = -x log2(e) = g slope + shifted_bias, where
// shifted_bias = dt_bias slope.
struct Gate {
  float slope;  // -exp(A_log) log2(e)
  float floor;  // lower_bound log2(e)

  __device__ static Gate of_head(float A_log, float lower_bound) {
    return {__fmul_rn(-expf(A_log), kLog2e), __fmul_rn(lower_bound, kLog2e)};
  }

  // The running sum of log2 decays, one token further.
  __device__ float accumulate(float g, float shifted_bias, float sum) const {
    return __fmaf_rn(floor, sigmoid_of_negated_log2(__fmaf_rn(g, slope, shifted_bias)), sum);
  }
  __device__ void accumulate(float4& sum, float4 g, float4 shifted_bias) const {
    sum = {accumulate(g.x, shifted_bias.x, sum.x), accumulate(g.y, shifted_bias.y, sum.y),
           accumulate(g.z, shifted_bias.z, sum.z), accumulate(g.w, shifted_bias.w, sum.w)};
  }
};

__device__ __forceinline__ float beta_of_logit(float logit) {
  return sigmoid_of_negated_log2(__fmul_rn(logit, -kLog2e));
}

}  // namespace flash_kda
