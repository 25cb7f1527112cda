// Preparing a chunk for the calls that need more than the plain form: other gates, dtypes and activations, and decays
// of any strength.
#pragma once

#include "common/prepare.h"

namespace flash_kda {

// Where a lane finds its channels of an fp32 g: the sequence's first token.
struct GateRows {
  float const* first;

  __device__ static GateRows of(GeneralParams const& p, Sequence const& s, int head, int lane) {
    return {first_row<float const>(p.g, s, head) + kLaneChannels * lane};
  }

  // Brings the rows of a later chunk into L2.
  __device__ void prefetch(GeneralParams const& p, int token, int length) const {
    if (!p.g_is_fp32) return;
#pragma unroll 1
    for (int row = token; row < min(token + kChunk, length); ++row) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(first + row * p.g.token_stride));
    }
  }
};

// The gate of one head, of any kind, as a lane needs it for a chunk. Made anew for each: its registers are needed
// elsewhere in between.
struct GeneralLaneGate {
  using Row = float4;                            // four channels' g of a token
  static constexpr bool kPaddingDecays = false;  // fp32 rows past the end are not there to be repeated

  GateRows rows;
  float2 constants;   // slope and floor of Gate, or those of SoftplusGate
  float4 bias;        // dt_bias; for the sigmoid, times its slope
  int rows_in_range;  // the first rows of the chunk whose G stays within the range of the factors

  // What it is made of, on its way from device memory.
  struct Constants {
    float A_log;
    float4 bias;

    __device__ static Constants of_head(GeneralParams const& p, int head, int lane) {
      Constants c = {p.A_log == nullptr ? 0.f : p.A_log[head], {0.f, 0.f, 0.f, 0.f}};
      if (p.dt_bias != nullptr) {
        float const* const bias = p.dt_bias + int64_t(head) * kHeadDim + kLaneChannels * lane;
        c.bias = {bias[0], bias[1], bias[2], bias[3]};
      }
      return c;
    }
  };

  __device__ static GeneralLaneGate of(GeneralParams const& p, GateRows rows, Constants const& c) {
    if (p.gate == GateKind::kSigmoid) {
      Gate const sigmoid = Gate::of_head(c.A_log, p.lower_bound);
      return {rows, {sigmoid.slope, sigmoid.floor}, times(c.bias, sigmoid.slope), 0};
    }
    SoftplusGate const softplus = SoftplusGate::of_head(c.A_log);
    return {rows, {softplus.slope, softplus.A_log2}, c.bias, 0};
  }

  // From its place in the stage, or from device memory, where rows past the end are not there to be read.
  __device__ Row load(GeneralParams const& p, uint2 const* staged, int token, bool is_valid) const {
    if (!p.g_is_fp32) return widen(*staged);
    return is_valid ? *reinterpret_cast<float4 const*>(rows.first + token * p.g.token_stride)
                    : float4{0.f, 0.f, 0.f, 0.f};
  }

  // The log2 decays of some tokens under the unbounded gates.
  template <int kRows>
  __device__ void unbounded(GeneralParams const& p, float4 (&decays)[kRows], Row const (&rows)[kRows]) const {
    if (p.gate == GateKind::kLog) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float4 const x = times(rows[r], kLog2e);
        decays[r] = {clamp_decay(x.x), clamp_decay(x.y), clamp_decay(x.z), clamp_decay(x.w)};
      }
      return;
    }
    SoftplusGate const softplus = {constants.x, constants.y};
    // One way or the other for all rows: where both are right they agree to the bit, so that a row still does not
    // depend on what follows it.
    bool is_ordinary = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      decays[r] = times(plus(rows[r], bias), kLog2e);
      constexpr float kBend = SoftplusGate::kBend;
      is_ordinary = is_ordinary && fabsf(decays[r].x) <= kBend && fabsf(decays[r].y) <= kBend &&
                    fabsf(decays[r].z) <= kBend && fabsf(decays[r].w) <= kBend;
    }
    if (is_ordinary) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        decays[r] = {softplus.at_the_bend(decays[r].x), softplus.at_the_bend(decays[r].y),
                     softplus.at_the_bend(decays[r].z), softplus.at_the_bend(decays[r].w)};
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 const x = plus(rows[r], bias);
      decays[r] = {softplus.anywhere(x.x), softplus.anywhere(x.y), softplus.anywhere(x.z), softplus.anywhere(x.w)};
    }
  }

  // The log2 decays of a token.
  __device__ float4 log2_decay(GeneralParams const& p, Row raw) const {
    if (p.gate == GateKind::kSigmoid) {
      return LaneGate{{constants.x, constants.y}, bias}.accumulated({0.f, 0.f, 0.f, 0.f}, raw);
    }
    float4 decays[1];
    unbounded(p, decays, {raw});
    return decays[0];
  }

  // After each row of a group, of which some are valid; `sum` is the one before it, and then the last.
  __device__ void accumulate(GeneralParams const& p, float4 (&sums)[kGroupRows], float4& sum,
                             Row const (&rows)[kGroupRows], int valid) {
    // The others do not decay. Mostly there are none.
    auto const run = [&](auto const& further) {
      if (valid >= kGroupRows) {
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) sums[r] = sum = further(r);
      } else {
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
          if (r < valid) sum = further(r);
          sums[r] = sum;
        }
      }
    };
    if (p.gate == GateKind::kSigmoid) {
      LaneGate const sigmoid = {{constants.x, constants.y}, bias};
      run([&](int r) { return sigmoid.accumulated(sum, rows[r]); });
      return;  // always in range
    }
    float4 decays[kGroupRows];
    unbounded(p, decays, rows);
    run([&](int r) { return plus(sum, decays[r]); });
    // Just past what the bounded gate reaches in a chunk. A NaN is out of range. Sums fall from row to row, so that the
    // last one mostly tells for all.
    constexpr float kWeakest = -116.f;
    auto const is_in_range = [](float4 x) {
      return x.x >= kWeakest && x.y >= kWeakest && x.z >= kWeakest && x.w >= kWeakest;
    };
    if (is_in_range(sum)) {
      rows_in_range += kGroupRows;
    } else {
#pragma unroll
      for (int r = 0; r < kGroupRows; ++r) rows_in_range += is_in_range(sums[r]);
    }
  }
};

struct GeneralBeta {
  using Logit = float;

  void const* first;

  __device__ static GeneralBeta of(GeneralParams const& p, Sequence const& s, int head) {
    return {p.beta_is_fp32 ? static_cast<void const*>(first_row<float>(p.beta, s, head))
                           : static_cast<void const*>(first_row<bf16>(p.beta, s, head))};
  }
  __device__ Logit load(GeneralParams const& p, int64_t token, int valid, int lane) const {
    if (lane >= valid) return 0.f;
    int64_t const offset = (token + lane) * p.beta.token_stride;
    return p.beta_is_fp32 ? static_cast<float const*>(first)[offset] : float(static_cast<bf16 const*>(first)[offset]);
  }
  __device__ float activated(GeneralParams const& p, Logit logit) const {
    if (p.beta_kind == BetaKind::kActivated) return logit;
    float const beta = beta_of_logit(logit);
    return p.beta_kind == BetaKind::kTwiceSigmoid ? __fmul_rn(2.f, beta) : beta;
  }
};

__device__ __forceinline__ float dot(float4 x, float4 y) {
  return __fmaf_rn(x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmul_rn(x.x, y.x))));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  return x;
}

// Four channels of a token in device memory.
__device__ __forceinline__ float4 raw_channels(bf16 const* first, int64_t pitch, int row) {
  return widen(*reinterpret_cast<uint2 const*>(first + row * pitch));
}

// The factors of a chunk whose G leaves the range of K-, exact for decays of any strength. Rows before `in_range` of L
// and M are those that `factors` and `gram` made: a row must not depend on what follows it. The others come pair by
// pair from the decay between their tokens, a sum of its own for each pair and at most 0. K- gives way to
//   K~_j = k_j 2^{G_C - G_j - c},   S' <- S' diag(2^{G_C}) + U^T K~
// for which the recurrence has to decay the state first: negative decays tell it so. Slow, and rarely needed. The rows
// are read again from device memory, since the stage's have been overwritten.
template <Pass kPass, class Params>
__device__ __forceinline__ void exact_factors(Params const& p, Stage<kPass>& stage, Scratch& scratch,
                                              KeyNorms& key_norms, GeneralLaneGate const& gate,
                                              ChunkOrigin const& origin, int in_range, int lane) {
  int const channel = kLaneChannels * lane, head = origin.head, token = origin.token, valid = origin.valid;
  Sequence chunk = find_sequence(p, origin.sequence_index);  // once more: cheaper than to keep it in registers
  chunk.begin += token;
  bf16 const* const k = first_row<bf16 const>(p.k, chunk, key_head(p, head)) + channel;
  bf16 const* const q = first_row<bf16 const>(p.q, chunk, key_head(p, head)) + channel;
  bf16 const* const g = first_row<bf16 const>(p.g, chunk, head) + channel;
  auto const decay_of = [&](int row) {
    auto const* const staged = reinterpret_cast<uint2 const*>(g + row * p.g.token_stride);  // if bf16
    float4 decays[1];
    gate.unbounded(p, decays, {gate.load(p, staged, token + row, true)});
    return decays[0];
  };

#pragma unroll 1
  for (int i = in_range; i < kChunk; ++i) {
    float4 const k_i = i < valid ? raw_channels(k, p.k.token_stride, i) : float4{0.f, 0.f, 0.f, 0.f};
    float const square_sum = warp_sum(dot(k_i, k_i));
    if (lane == 0) {
      key_norms.data[i] = p.normalise ? inverse_norm(square_sum) : 1.f;
      scratch.key_weight[i] = -__fmul_rn(scratch.beta[i], key_norms.data[i]);
    }
    __syncwarp();
    float l_row = 0.f, m_row = 0.f;  // lane j's is column j
    if (i < valid) {
      float const row = __fmul_rn(scratch.beta[i], key_norms.data[i]);
      float4 const q_i = times(raw_channels(q, p.q.token_stride, i), scratch.query_norm[i]);
      float4 between = {0.f, 0.f, 0.f, 0.f};  // the decay from token j to token i
#pragma unroll 1
      for (int j = i; j >= 0; --j) {
        float4 const k_j = times(raw_channels(k, p.k.token_stride, j), exp2_approx(between));
        float const l = warp_sum(dot(k_i, k_j)), m = warp_sum(dot(q_i, k_j));
        if (lane == j) l_row = __fmul_rn(__fmul_rn(row, l), key_norms.data[j]), m_row = m;
        between = plus(between, decay_of(j));
      }
    }
    if (lane < kChunk) {
      *stage.l().at(i, lane) = lane < i ? l_row : 0.f;
      *stage.m.at(i, lane) = bf16(m_row);
    }
  }

  float4 after = {0.f, 0.f, 0.f, 0.f};  // the decay from the token to the chunk's end
#pragma unroll 1
  for (int j = kChunk - 1; j >= 0; --j) {
    float4 row = {0.f, 0.f, 0.f, 0.f};
    if (j < valid) {
      row = times(raw_channels(k, p.k.token_stride, j), exp2_approx(plus(after, -kShift)));
      after = plus(after, decay_of(j));
    }
    *reinterpret_cast<uint2*>(stage.rows.at(Stage<kPass>::kGateRow + j, channel)) = narrow(row);
  }
  float4 const decay = minus(exp2_approx(after));
  *reinterpret_cast<float2*>(stage.decay.pair(lane / 2, lane % 2 * 2)) = {decay.x, decay.y};
  *reinterpret_cast<float2*>(stage.decay.pair(lane / 2, lane % 2 * 2 + 1)) = {decay.z, decay.w};
}

template <Pass kPass>
__device__ __forceinline__ void make_factors(GeneralParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                             GateRows const& gate_rows, GeneralBeta const& beta, float logit, int head,
                                             int token, int valid, int lane) {
  lane = opaque(lane);
  auto const constants = GeneralLaneGate::Constants::of_head(p, head, lane);  // first: they come from far
  if constexpr (kPass == Pass::kForward) {
    if (p.normalise) {
      query_norms(stage, scratch, p.scale, lane);
    } else if (lane < kChunk) {
      scratch.query_norm[lane] = p.scale;
    }
  }
  if (lane < kChunk) scratch.beta[lane] = lane < valid ? beta.activated(p, logit) : 0.f;
  __syncwarp();
  GeneralLaneGate gate = GeneralLaneGate::of(p, gate_rows, constants);
  factors(p, stage, scratch, gate, token, valid, opaque(lane));
  int const in_range = __reduce_min_sync(0xffffffff, gate.rows_in_range);
  if (lane == 0) scratch.rows_in_range = in_range;
  __syncwarp();
}

template <Pass kPass, class Params>
  requires kIsGeneral<Params>
__device__ __forceinline__ void make_matrices(Params const& p, Stage<kPass>& stage, Scratch& scratch,
                                              KeyNorms& key_norms, ChunkOrigin const& origin, int lane) {
  gram(stage, scratch, key_norms, p.normalise, opaque(lane));
  __syncwarp();
  if (p.gate != GateKind::kSigmoid && scratch.rows_in_range < kChunk) {
    GateRows const rows = GateRows::of(p, find_sequence(p, origin.sequence_index), origin.head, opaque(lane));
    auto const constants = GeneralLaneGate::Constants::of_head(p, origin.head, opaque(lane));
    exact_factors(p, stage, scratch, key_norms, GeneralLaneGate::of(p, rows, constants), origin, scratch.rows_in_range,
                  opaque(lane));
    __syncwarp();
  }
  if constexpr (kPass == Pass::kForward) {
    invert(stage, scratch, key_norms, opaque(lane));
  } else {
    invert_and_fold(stage, scratch, key_norms, opaque(lane));
  }
  __syncwarp();
}

template <class Params>
  requires kIsGeneral<Params>
struct Forms<Params> {
  using Gate = GateRows;
  using Beta = GeneralBeta;
};

}  // namespace flash_kda
