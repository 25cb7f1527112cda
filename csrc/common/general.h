// Preparing a chunk for the calls that need more than the plain form: other gates, dtypes and activations, and decays
// of any strength.
#pragma once

#include "common/softplus.h"

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
  float2 constants;  // slope and floor of Gate, or those of SoftplusGate
  float4 bias;       // dt_bias; for the sigmoid, times its slope
  SoftplusProduct product;
  RowsOut rows_out;

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
      return {rows, {sigmoid.slope, sigmoid.floor}, times(c.bias, sigmoid.slope), {}, {}};
    }
    SoftplusGate const softplus = SoftplusGate::of_head(c.A_log);
    return {rows, {softplus.slope, softplus.A_log2}, c.bias, {}, {}};
  }

  // From its place in the stage, or from device memory, where rows past the end are not there to be read.
  __device__ Row load(GeneralParams const& p, uint2 const* staged, int token, bool is_valid) const {
    if (!p.g_is_fp32) return widen(*staged);
    return is_valid ? *reinterpret_cast<float4 const*>(rows.first + token * p.g.token_stride)
                    : float4{0.f, 0.f, 0.f, 0.f};
  }

  __device__ static float4 log2_of_log(Row natural) {
    float4 const x = times(natural, kLog2e);
    return {clamp_decay(x.x), clamp_decay(x.y), clamp_decay(x.z), clamp_decay(x.w)};
  }
  __device__ SoftplusChannels softplus() const { return {{constants.x, constants.y}, bias}; }

  // The log2 decays of a token.
  __device__ float4 log2_decay(GeneralParams const& p, Row raw) const {
    if (p.gate == GateKind::kSigmoid) {
      return LaneGate{{constants.x, constants.y}, bias}.accumulated({0.f, 0.f, 0.f, 0.f}, raw);
    }
    return p.gate == GateKind::kLog ? log2_of_log(raw) : softplus().log2_decay(raw);
  }

  // After each row of a group, of which some are valid; `sum` is the one before it, and then the last.
  __device__ void accumulate(GeneralParams const& p, float4 (&sums)[kGroupRows], float4& sum,
                             Row const (&rows)[kGroupRows], int valid) {
    if (p.gate == GateKind::kSoftplus) {
      product.accumulate(SoftplusConstants::of(softplus()), rows_out, sums, sum, rows, valid,
                         [&] { return softplus(); });
      return;
    }
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
    run([&](int r) { return plus(sum, log2_of_log(rows[r])); });
    if (is_at_least(sum, kWeakest)) return;  // sums fall from row to row: the last one mostly tells for all
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) rows_out.add_row(is_at_least(sums[r], kWeakest));
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
template <Pass kPass, class Params, class TokenGate>
__device__ __forceinline__ void exact_factors(Params const& p, Stage<kPass>& stage, Scratch& scratch,
                                              KeyNorms& key_norms, TokenGate const& gate, ChunkOrigin const& origin,
                                              int in_range, int lane) {
  int const channel = kLaneChannels * lane, head = origin.head, token = origin.token, valid = origin.valid;
  Sequence chunk = find_sequence(p, origin.sequence_index);  // once more: cheaper than to keep it in registers
  chunk.begin += token;
  bf16 const* const k = first_row<bf16 const>(p.k, chunk, key_head(p, head)) + channel;
  bf16 const* const q = first_row<bf16 const>(p.q, chunk, key_head(p, head)) + channel;
  bf16 const* const g = first_row<bf16 const>(p.g, chunk, head) + channel;
  auto const decay_of = [&](int row) {
    auto const* const staged = reinterpret_cast<uint2 const*>(g + row * p.g.token_stride);  // if bf16
    return gate.log2_decay(p, gate.load(p, staged, token + row, true));
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
      float4 q_i = {0.f, 0.f, 0.f, 0.f};
      if constexpr (kPass == Pass::kForward) {
        q_i = times(raw_channels(q, p.q.token_stride, i), scratch.query_norm[i]);
      }
      float4 between = {0.f, 0.f, 0.f, 0.f};  // the decay from token j to token i
#pragma unroll 1
      for (int j = i; j >= 0; --j) {
        float4 const k_j = times(raw_channels(k, p.k.token_stride, j), exp2_approx(between));
        float const l = warp_sum(dot(k_i, k_j));
        if (lane == j) l_row = __fmul_rn(__fmul_rn(row, l), key_norms.data[j]);
        if constexpr (kPass == Pass::kForward) {
          float const m = warp_sum(dot(q_i, k_j));
          if (lane == j) m_row = m;
        }
        between = plus(between, decay_of(j));
      }
    }
    if (lane < kChunk) {
      *stage.l().at(i, lane) = lane < i ? l_row : 0.f;
      if constexpr (kPass == Pass::kForward) *stage.m.at(i, lane) = bf16(m_row);
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

// What goes before the gates: query norms and beta.
template <Pass kPass>
__device__ __forceinline__ void begin_factors(GeneralParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                              GeneralBeta const& beta, float logit, int valid, int lane) {
  if constexpr (kPass == Pass::kForward) {
    if (p.normalise) {
      query_norms(stage, scratch, p.scale, lane);
    } else if (lane < kChunk) {
      scratch.query_norm[lane] = p.scale;
    }
  }
  if (lane < kChunk) scratch.beta[lane] = lane < valid ? beta.activated(p, logit) : 0.f;
  __syncwarp();
}

// Leaves the number of rows in range to the second half.
__device__ __forceinline__ void end_factors(Scratch& scratch, RowsOut const& rows_out, int lane) {
  int const most = __reduce_max_sync(0xffffffff, rows_out.count);
  if (lane == 0) scratch.rows_in_range = kChunk - most;
  __syncwarp();
}

template <Pass kPass>
__device__ __forceinline__ void make_factors(GeneralParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                             GateRows const& gate_rows, GeneralBeta const& beta, float logit, int head,
                                             int token, int valid, int lane) {
  lane = opaque(lane);
  auto const constants = GeneralLaneGate::Constants::of_head(p, head, lane);  // first: they come from far
  begin_factors(p, stage, scratch, beta, logit, valid, lane);
  GeneralLaneGate gate = GeneralLaneGate::of(p, gate_rows, constants);
  factors(p, stage, scratch, gate, token, valid, opaque(lane));
  end_factors(scratch, gate.rows_out, lane);
}

template <Pass kPass, class Params>
  requires kIsUnbounded<Params>
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
  invert(stage, scratch, key_norms, opaque(lane));
  __syncwarp();
}

template <class Params>
  requires kIsUnbounded<Params>
struct Forms<Params> {
  using Gate = GateRows;
  using Beta = GeneralBeta;
};

// The softplus gate of one head and a bf16 g: what a lane keeps from chunk to chunk.
struct SoftplusGateOfHead {
  SoftplusConstants constants;

  __device__ static SoftplusChannels channels(SoftplusParams const& p, int head, int lane) {
    auto const c = GeneralLaneGate::Constants::of_head(p, head, lane);
    return {SoftplusGate::of_head(c.A_log), c.bias};
  }
  __device__ static SoftplusGateOfHead of(SoftplusParams const& p, Sequence const&, int head, int lane) {
    return {SoftplusConstants::of(channels(p, head, lane))};
  }
  __device__ void prefetch(SoftplusParams const&, int, int) const {}
};

// The same for a chunk.
struct SoftplusLaneGate {
  using Row = uint2;
  static constexpr bool kPaddingDecays = false;

  SoftplusConstants constants;
  int head, lane;
  SoftplusProduct product = {};
  RowsOut rows_out = {};

  __device__ Row load(SoftplusParams const&, uint2 const* g, int, bool) const { return *g; }
  __device__ void accumulate(SoftplusParams const& p, float4 (&sums)[kGroupRows], float4& sum,
                             Row const (&rows)[kGroupRows], int valid) {
    product.accumulate(constants, rows_out, sums, sum, rows, valid,
                       [&] { return SoftplusGateOfHead::channels(p, opaque(head), opaque(lane)); });
  }
};

// Token by token, as exact_factors wants it.
struct SoftplusTokenGate {
  SoftplusChannels channels;

  __device__ uint2 load(SoftplusParams const&, uint2 const* g, int, bool) const { return *g; }
  __device__ float4 log2_decay(SoftplusParams const&, uint2 g) const { return channels.log2_decay(widen(g)); }
};

template <Pass kPass>
__device__ __forceinline__ void make_factors(SoftplusParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                             SoftplusGateOfHead const& of_head, GeneralBeta const& beta, float logit,
                                             int head, int token, int valid, int lane) {
  lane = opaque(lane);
  begin_factors(p, stage, scratch, beta, logit, valid, lane);
  SoftplusLaneGate gate = {of_head.constants, head, lane};
  factors(p, stage, scratch, gate, token, valid, opaque(lane));
  end_factors(scratch, gate.rows_out, lane);
}

template <Pass kPass>
__device__ __forceinline__ void make_matrices(SoftplusParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                              KeyNorms& key_norms, ChunkOrigin const& origin, int lane) {
  gram(stage, scratch, key_norms, p.normalise, opaque(lane));
  __syncwarp();
  if (scratch.rows_in_range < kChunk) {
    SoftplusTokenGate const gate = {SoftplusGateOfHead::channels(p, opaque(origin.head), opaque(lane))};
    exact_factors(p, stage, scratch, key_norms, gate, origin, scratch.rows_in_range, opaque(lane));
    __syncwarp();
  }
  invert(stage, scratch, key_norms, opaque(lane));
  __syncwarp();
}

template <>
struct Forms<SoftplusParams> {
  using Gate = SoftplusGateOfHead;
  using Beta = GeneralBeta;
};

}  // namespace flash_kda
