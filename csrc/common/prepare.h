// From a chunk's rows to its factors: the work of one warp, which talks to no other. Loops over rows and channels stay
// rolled as far as registers allow: warps are at different places of this code, and the instruction cache has to hold
// all of it.
#pragma once

#include "common/gate.h"
#include "common/stage.h"

namespace flash_kda {

// Outside of matrix fragments a lane owns channels 4 lane .. 4 lane + 3 of every row.
constexpr int kLaneChannels = kHeadDim / kWarp;
// From a place among the k rows of a stage to the same among its q rows.
constexpr int kQuery = tile_offset<2 * kChunk>(kChunk, 0);

__device__ __forceinline__ float4 widen(uint2 x) {
  float2 const a = unpack_bf16(x.x), b = unpack_bf16(x.y);
  return {a.x, a.y, b.x, b.y};
}
__device__ __forceinline__ uint2 narrow(float4 x) { return make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)); }
__device__ __forceinline__ float4 times(float4 x, float s) {
  return {__fmul_rn(x.x, s), __fmul_rn(x.y, s), __fmul_rn(x.z, s), __fmul_rn(x.w, s)};
}
__device__ __forceinline__ float4 times(float4 x, float4 y) {
  return {__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y), __fmul_rn(x.z, y.z), __fmul_rn(x.w, y.w)};
}
__device__ __forceinline__ float4 plus(float4 x, float s) {
  return {__fadd_rn(x.x, s), __fadd_rn(x.y, s), __fadd_rn(x.z, s), __fadd_rn(x.w, s)};
}
__device__ __forceinline__ float4 minus(float4 x) { return {-x.x, -x.y, -x.z, -x.w}; }
__device__ __forceinline__ float4 exp2_approx(float4 x) {
  return {exp2_approx(x.x), exp2_approx(x.y), exp2_approx(x.z), exp2_approx(x.w)};
}

// 1 / |k_i| and scale / |q_i|. The square sums are the diagonals of k k^T and q q^T.
__device__ __forceinline__ void norms(Stage& stage, Scratch& scratch, float scale, int lane) {
  float k_sums[2][4] = {}, q_sums[2][4] = {};  // columns 0-7 and 8-15
  // The four matrices of an A operand are, in another order, those of two B operands.
  int const offset = tile_offset<2 * kChunk>(BlockPlace::of_a(lane));
#pragma unroll 2
  for (int b = 0; b < kHeadDim / 16; ++b) {
    uint32_t k[4], q[4];
    load_matrices(k, stage.kq.in_block(b, offset));
    load_matrices(q, stage.kq.in_block(b, offset + kQuery));
    mma(k_sums[0], k, k[0], k[2]);
    mma(k_sums[1], k, k[1], k[3]);
    mma(q_sums[0], q, q[0], q[2]);
    mma(q_sums[1], q, q[1], q[3]);
  }
  // Lane 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8: the diagonal where t = g / 2.
  int const g = lane / 4;
  if (lane % 4 == g / 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const k_sum = g % 2 ? k_sums[half][2 * half + 1] : k_sums[half][2 * half];
      float const q_sum = g % 2 ? q_sums[half][2 * half + 1] : q_sums[half][2 * half];
      scratch.norm[g + 8 * half] = {rsqrt_approx(__fadd_rn(k_sum, 1e-6f)),
                                    __fmul_rn(rsqrt_approx(__fadd_rn(q_sum, 1e-6f)), scale)};
    }
  }
}

// Turns raw rows into K+, Q+ and K- in place, each lane its own channels.
__device__ __forceinline__ void factors(Stage& stage, Scratch const& scratch, Gate const& gate, float4 shifted_bias,
                                        int valid, int lane) {
  float4 sum = {0.f, 0.f, 0.f, 0.f};  // G
#pragma unroll 4
  for (int i = 0; i < kChunk; ++i) {
    uint2* const k = reinterpret_cast<uint2*>(stage.kq.at(i, kLaneChannels * lane));
    uint2* const q = reinterpret_cast<uint2*>(stage.kq.at(kChunk + i, kLaneChannels * lane));
    uint2* const g = reinterpret_cast<uint2*>(stage.g.at(i, kLaneChannels * lane));
    float2 const norm = scratch.norm[i];

    // Padded rows do not decay: their sigmoid is finite, and fma(0, sigmoid, sum) is the sum.
    Gate const row_gate = {gate.slope, i < valid ? gate.floor : 0.f};
    float4 const raw = widen(*g);
    sum.x = row_gate.accumulate(raw.x, shifted_bias.x, sum.x);
    sum.y = row_gate.accumulate(raw.y, shifted_bias.y, sum.y);
    sum.z = row_gate.accumulate(raw.z, shifted_bias.z, sum.z);
    sum.w = row_gate.accumulate(raw.w, shifted_bias.w, sum.w);

    // The sum itself stays unshifted: added to 57, slow decays would lose their last bits.
    float4 const exponent = plus(sum, kShift);
    float4 const shrink = exp2_approx(exponent), grow = exp2_approx(minus(exponent));
    float4 const unit_k = times(widen(*k), norm.x);
    *q = narrow(times(times(widen(*q), norm.y), shrink));
    *k = narrow(times(unit_k, shrink));
    *g = narrow(times(unit_k, grow));
  }
  *reinterpret_cast<float4*>(&stage.decay[kLaneChannels * lane]) = exp2_approx(sum);
}

// L and M.
__device__ __forceinline__ void gram(Stage& stage, Scratch& scratch, int lane) {
  float l[2][4] = {}, m[2][4] = {};
  int const offset = tile_offset<2 * kChunk>(BlockPlace::of_a(lane));
  int const column_offset = tile_offset<kChunk>(BlockPlace::of_b(lane));
#pragma unroll 2
  for (int b = 0; b < kHeadDim / 16; ++b) {
    uint32_t k[4], q[4], columns[4];
    load_matrices(k, stage.kq.in_block(b, offset));
    load_matrices(q, stage.kq.in_block(b, offset + kQuery));
    load_matrices(columns, stage.g.in_block(b, column_offset));
    mma(l[0], k, columns[0], columns[1]);
    mma(l[1], k, columns[2], columns[3]);
    mma(m[0], q, columns[0], columns[1]);
    mma(m[1], q, columns[2], columns[3]);
  }
  // The triangles are cut out by selection: what lies outside may be infinite.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const i = lane / 4 + 8 * r, j = 8 * half + 2 * (lane % 4);
      float const beta = scratch.beta[i];
      scratch.l_transposed[j][i] = j < i ? __fmul_rn(beta, l[half][2 * r]) : 0.f;
      scratch.l_transposed[j + 1][i] = j + 1 < i ? __fmul_rn(beta, l[half][2 * r + 1]) : 0.f;
      *reinterpret_cast<uint32_t*>(stage.m.at(i, j)) =
          pack_bf16(j <= i ? m[half][2 * r] : 0.f, j + 1 <= i ? m[half][2 * r + 1] : 0.f);
    }
  }
}

// A = (I + L)^{-1} diag(beta) by forward substitution in fp32, split into two bf16 parts. Both half-warps solve for
// column lane % 16; the lower one stores the high part, the upper one what is left of it.
__device__ __forceinline__ void invert(Stage& stage, Scratch const& scratch, int lane) {
  int const j = lane % 16;
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = i == j ? 1.f : 0.f;
#pragma unroll
  for (int r = 0; r < kChunk - 1; ++r) {
#pragma unroll
    for (int i4 = (r + 1) / 4 * 4; i4 < kChunk; i4 += 4) {
      float4 const l = *reinterpret_cast<float4 const*>(&scratch.l_transposed[r][i4]);
      float const column[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i4 + i > r) x[i4 + i] = __fmaf_rn(-column[i], x[r], x[i4 + i]);
      }
    }
  }
  float const beta = scratch.beta[j];
  bf16* const part = (lane < 16 ? stage.a_hi : stage.a_lo).at(0, j);
  constexpr int kRowPitch = square_offset(1, 0);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float const a = __fmul_rn(x[i], beta);
    bf16 const hi(a);
    part[i * kRowPitch] = lane < 16 ? hi : bf16(__fsub_rn(a, float(hi)));
  }
}

// The gate of one head, as a lane needs it.
struct LaneGate {
  Gate gate;
  float4 shifted_bias;

  __device__ static LaneGate of_head(FwdParams const& p, int head, int lane) {
    Gate const gate = Gate::of_head(p.A_log[head], p.lower_bound);
    float const* const bias = p.dt_bias + head * kHeadDim + kLaneChannels * lane;
    return {gate, times({bias[0], bias[1], bias[2], bias[3]}, gate.slope)};
  }
};

// All of it. Lane i < 16 brings beta_i. k, q and g have arrived in the stage; V is not touched. On return the factors
// are written and the scratch may be reused.
__device__ __forceinline__ void prepare_chunk(Stage& stage, Scratch& scratch, LaneGate const& gate, float scale,
                                              float beta, int valid, int lane) {
  norms(stage, scratch, scale, lane);
  if (lane < kChunk) scratch.beta[lane] = beta;
  __syncwarp();
  factors(stage, scratch, gate.gate, gate.shifted_bias, valid, lane);
  __syncwarp();
  gram(stage, scratch, lane);
  __syncwarp();
  invert(stage, scratch, lane);
  __syncwarp();
}

}  // namespace flash_kda
