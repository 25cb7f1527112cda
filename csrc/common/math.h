// Scalar arithmetic with its rounding spelled out: tests mirror it operation for operation, so nothing here may be
// contracted or reordered by the compiler.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace flash_kda {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + 2^z). Right in both limits: 2^z overflows to infinity (result 0) or vanishes (result 1).
__device__ __forceinline__ float sigmoid_of_negated_log2(float z) { return rcp_approx(__fadd_rn(1.f, exp2_approx(z))); }

// Two bf16 in one register, `lo` in the lower half: the element order of every MMA fragment.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// Two numbers as the sums of two bf16 parts each, as far as those reach.
struct PairParts {
  uint32_t hi, lo;
  __device__ static PairParts of(float x, float y) {
    uint32_t const hi = pack_bf16(x, y);
    float2 const kept = unpack_bf16(hi);
    return {hi, pack_bf16(__fsub_rn(x, kept.x), __fsub_rn(y, kept.y))};
  }
};

// The same number, of which the compiler knows nothing: what is derived from it is made where it is needed, and not
// kept in registers throughout the kernel, of which there are too few here.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash_kda
