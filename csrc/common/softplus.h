// The softplus gate over a chunk's rows, for a lane's four channels.
//
// With y_i = 2^{z_i}, z = (g + dt_bias) log2(e), a chunk's running log2 decay is one logarithm of a running product:
//   G_i = -exp(A_log) sum_{j <= i} log2(1 + y_j) = slope log2(1 + Q_i),   1 + Q_i = prod_{j <= i} (1 + y_j)
// Q is kept without the 1, so that decays of any slowness add up in it, and the chunk's total is made from Q itself.
// The G of rows need an absolute precision only, a few 2^-22 slope, for which the approximate logarithm of 1 + Q does.
// A channel takes one instruction more than under the bounded gate. The product does not serve steep slopes and large
// biases, nor where it overflows: there, and where G leaves the range of the factors, decays are added up token by
// token.
#pragma once

#include "common/prepare.h"

namespace flash_kda {

__device__ __forceinline__ float4 widen(float4 x) { return x; }

// A g that stands for no decay.
__device__ __forceinline__ void set_no_decay(uint2& row) { row = make_uint2(0xff80ff80u, 0xff80ff80u); }
__device__ __forceinline__ void set_no_decay(float4& row) {
  float const infinity = __int_as_float(0x7f800000);
  row = {-infinity, -infinity, -infinity, -infinity};
}

// G that the factors of a chunk bear: just past what the bounded gate reaches in a chunk. A NaN is out of range.
constexpr float kWeakest = -116.f;
__device__ __forceinline__ bool is_at_least(float4 x, float bound) {
  return x.x >= bound && x.y >= bound && x.z >= bound && x.w >= bound;
}

// How many of a chunk's rows, its last ones, are out of range: from the first one on.
struct RowsOut {
  int count = 0;
  __device__ void add_row(bool is_in_range) { count += count > 0 || !is_in_range; }
};

// Token by token, for any input.
struct SoftplusChannels {
  SoftplusGate gate;
  float4 bias;

  __device__ float4 log2_decay(float4 g) const {
    float4 const x = plus(g, bias), z = times(x, kLog2e);
    constexpr float kBend = SoftplusGate::kBend;
    if (fabsf(z.x) <= kBend && fabsf(z.y) <= kBend && fabsf(z.z) <= kBend && fabsf(z.w) <= kBend) {
      return {gate.at_the_bend(z.x), gate.at_the_bend(z.y), gate.at_the_bend(z.z), gate.at_the_bend(z.w)};
    }
    return {gate.anywhere(x.x), gate.anywhere(x.y), gate.anywhere(x.z), gate.anywhere(x.w)};
  }
};

// What the product needs.
struct SoftplusConstants {
  float slope;          // NaN, and with it every G, where the product does not serve the lane's channels
  float4 shifted_bias;  // dt_bias log2(e)

  __device__ static SoftplusConstants of(SoftplusChannels const& c) {
    // Errors of G grow with the slope, those of z with the bias.
    constexpr float kSteepest = 64.f, kLargest = 64.f;
    bool const serves = c.gate.slope >= -kSteepest && fabsf(c.bias.x) <= kLargest && fabsf(c.bias.y) <= kLargest &&
                        fabsf(c.bias.z) <= kLargest && fabsf(c.bias.w) <= kLargest;
    return {serves ? c.gate.slope : __int_as_float(0x7fffffff), times(c.bias, kLog2e)};
  }
};

struct SoftplusProduct {
  float4 q = {0.f, 0.f, 0.f, 0.f};  // Q after the rows so far

  // G after each row of a group, of which the first `valid` decay; `sum` is the one before it, and then the last.
  // channels() makes the constants for single tokens.
  template <class Row, class Channels>
  __device__ __forceinline__ void accumulate(SoftplusConstants const& c, RowsOut& rows_out, float4 (&sums)[kGroupRows],
                                             float4& sum, Row const (&given)[kGroupRows], int valid,
                                             Channels const& channels) {
    Row rows[kGroupRows];
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) rows[r] = given[r];
    if (valid < kGroupRows) {
#pragma unroll
      for (int r = 0; r < kGroupRows; ++r) {
        if (r >= valid) set_no_decay(rows[r]);
      }
    }
    float4 one_plus_q = plus(q, 1.f);
    auto const further = [&](float& q, float& one_plus_q, float g, float bias) {
      float const y = exp2_approx(__fmaf_rn(g, kLog2e, bias));
      q = __fmaf_rn(one_plus_q, y, q);
      one_plus_q = __fadd_rn(q, 1.f);
      return __fmul_rn(c.slope, log2_approx(one_plus_q));
    };
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
      float4 const g = widen(rows[r]);
      sums[r] = {further(q.x, one_plus_q.x, g.x, c.shifted_bias.x), further(q.y, one_plus_q.y, g.y, c.shifted_bias.y),
                 further(q.z, one_plus_q.z, g.z, c.shifted_bias.z), further(q.w, one_plus_q.w, g.w, c.shifted_bias.w)};
    }
    float4 last = sums[kGroupRows - 1];
    // The chunk's total: its error would add up from chunk to chunk.
    if (valid <= kGroupRows) {
      last = {__fmul_rn(c.slope, log2_of_one_plus(q.x)), __fmul_rn(c.slope, log2_of_one_plus(q.y)),
              __fmul_rn(c.slope, log2_of_one_plus(q.z)), __fmul_rn(c.slope, log2_of_one_plus(q.w))};
    }
    float4 const before = sum;
    sum = last;
    if (is_at_least(last, kWeakest)) return;

    // Which way a row's G is made must not depend on what follows it. With other rows after it the group might not have
    // come here, although this G lies below kWeakest by as much as it errs: hence the distance.
    constexpr float kProductServes = kWeakest - 0.5f;
    SoftplusChannels const one = channels();
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
      float4 const added = plus(r == 0 ? before : sums[r - 1], one.log2_decay(widen(rows[r])));
      auto const choose = [](float product, float added) { return product >= kProductServes ? product : added; };
      sums[r] = {choose(sums[r].x, added.x), choose(sums[r].y, added.y), choose(sums[r].z, added.z),
                 choose(sums[r].w, added.w)};
      rows_out.add_row(is_at_least(sums[r], kProductServes));
    }
    float4 const added = sums[kGroupRows - 1];
    auto const choose = [](float total, float added) { return total >= kWeakest ? total : added; };
    sum = {choose(last.x, added.x), choose(last.y, added.y), choose(last.z, added.z), choose(last.w, added.w)};
  }
};

}  // namespace flash_kda
