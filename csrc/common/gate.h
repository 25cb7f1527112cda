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
};

__device__ __forceinline__ float beta_of_logit(float logit) {
  return sigmoid_of_negated_log2(__fmul_rn(logit, -kLog2e));
}

// log2(1 + y) for y >= 0. The approximate logarithm has an absolute error, so that small y take a polynomial for
// log2(1 + y) / y on [0, 1/8], which is right to 2e-8.
__device__ __forceinline__ float log2_of_one_plus(float y) {
  float series = __fmaf_rn(0.22492473f, y, -0.3541066f);
  series = __fmaf_rn(series, y, 0.48061351f);
  series = __fmaf_rn(series, y, -0.72134315f);
  series = __fmaf_rn(series, y, 1.44269503f);
  return y < 0.125f ? __fmul_rn(series, y) : log2_approx(__fadd_rn(1.f, y));
}

// A decay of 2^-300 takes every fp32 number to zero, as any stronger one does. Sums of 16 such stay finite.
constexpr float kStrongestDecay = -300.f;

// Selected, not the maximum: a NaN stays one.
__device__ __forceinline__ float clamp_decay(float log2_decay) {
  return log2_decay < kStrongestDecay ? kStrongestDecay : log2_decay;
}

// -exp(A_log) softplus(x) in base 2, for every finite x and A_log: softplus(x) log2(e) = log2(1 + 2^z), z = x log2(e).
struct SoftplusGate {
  float slope;   // -exp(A_log), finite
  float A_log2;  // A_log log2(e)

  static constexpr float kMost = 3.4028235e38f;

  __device__ static SoftplusGate of_head(float A_log) {
    float const magnitude = expf(A_log);
    return {-(magnitude > kMost ? kMost : magnitude), __fmul_rn(A_log, kLog2e)};
  }

  // Beyond, log2(1 + 2^z) is z; below its negative, 2^z log2(e).
  static constexpr float kBend = 20.f;

  // For |z| up to kBend.
  __device__ float at_the_bend(float z) const {
    return clamp_decay(__fmul_rn(slope, log2_of_one_plus(exp2_approx(z))));
  }

  // For every x.
  __device__ float anywhere(float x) const {
    float const z = __fmul_rn(x, kLog2e);
    // Where softplus is an exponential, the slope goes into its exponent: alone, one might vanish and the other
    // overflow.
    if (z < -kBend) return clamp_decay(__fmul_rn(-kLog2e, exp2_approx(__fadd_rn(z, A_log2))));
    if (z > kBend) return clamp_decay(__fmul_rn(__fmul_rn(slope, x > kMost ? kMost : x), kLog2e));
    return at_the_bend(z);
  }
};

}  // namespace flash_kda
