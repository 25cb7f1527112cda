// From a chunk's rows to its factors: the work of one warp, which talks to no other. Loops over rows and channels stay
// rolled as far as registers allow: warps are at different places of this code, and the instruction cache has to hold
// all of it.
#pragma once

#include "common/gate.h"
#include "common/sequence.h"
#include "common/stage.h"

namespace flash_kda {

// Outside of matrix fragments a lane owns channels 4 lane .. 4 lane + 3 of every row.
constexpr int kLaneChannels = kHeadDim / kWarp;
// Rows go in groups of half the swizzle's period: all of a group is loaded before any of it is stored, since the
// compiler has to keep that order, and their gates do not wait for each other.
constexpr int kGroupRows = 4;

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
__device__ __forceinline__ float4 plus(float4 x, float4 y) {
  return {__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w)};
}
__device__ __forceinline__ float4 minus(float4 x) { return {-x.x, -x.y, -x.z, -x.w}; }
__device__ __forceinline__ float4 exp2_approx(float4 x) {
  return {exp2_approx(x.x), exp2_approx(x.y), exp2_approx(x.z), exp2_approx(x.w)};
}

// f of the diagonal of a 16 x 16 product, given as accumulators of columns 0-7 and 8-15. Lane 4 g + t holds columns 2 t
// and 2 t + 1 of rows g and g + 8: the diagonal where t = g / 2.
template <class F>
__device__ __forceinline__ void store_diagonal(float* to, float const (&left)[4], float const (&right)[4], int lane,
                                               F const& f) {
  int const g = lane / 4;
  if (lane % 4 != g / 2) return;
  to[g] = f(g % 2 ? left[1] : left[0]);
  to[g + 8] = f(g % 2 ? right[3] : right[2]);
}

// The gate of one head, as a lane needs it.
struct LaneGate {
  using Row = uint2;  // four channels' g of a token
  // Rows past the chunk's end repeat its last one, and decay: G's total is summed apart.
  static constexpr bool kPaddingDecays = true;

  Gate gate;
  float4 shifted_bias;

  __device__ static LaneGate of(FwdParams const& p, Sequence const&, int head, int lane) {
    Gate const gate = Gate::of_head(p.A_log[head], p.lower_bound);
    float const* const bias = p.dt_bias + int64_t(head) * kHeadDim + kLaneChannels * lane;
    return {gate, times({bias[0], bias[1], bias[2], bias[3]}, gate.slope)};
  }

  // From its place in the stage.
  __device__ Row load(FwdParams const&, uint2 const* g, int, bool) const { return *g; }

  // The running log2 decay, one token further.
  __device__ float4 accumulated(float4 sum, float4 raw) const {
    return {gate.accumulate(raw.x, shifted_bias.x, sum.x), gate.accumulate(raw.y, shifted_bias.y, sum.y),
            gate.accumulate(raw.z, shifted_bias.z, sum.z), gate.accumulate(raw.w, shifted_bias.w, sum.w)};
  }
  // After each row of a group; `sum` is the one before it, and then the last.
  __device__ void accumulate(FwdParams const&, float4 (&sums)[kGroupRows], float4& sum, Row const (&rows)[kGroupRows],
                             int) const {
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) sums[r] = sum = accumulated(sum, widen(rows[r]));
  }

  __device__ void prefetch(FwdParams const&, int, int) const {}
};

// The logits of beta of one head. A lane brings one: lane i < 16 that of row i. Rows past the end have none.
struct Beta {
  using Logit = bf16;

  bf16 const* logits;
  int64_t pitch;

  __device__ static Beta of(FwdParams const& p, Sequence const& s, int head) {
    return {first_row<bf16 const>(p.beta, s, head), p.beta.token_stride};
  }
  __device__ Logit load(FwdParams const&, int64_t token, int valid, int lane) const {
    return lane < valid ? logits[(token + lane) * pitch] : bf16(0.f);
  }
  __device__ float activated(FwdParams const&, Logit logit) const { return beta_of_logit(float(logit)); }
};

// 1 / |x| of a square sum.
__device__ __forceinline__ float inverse_norm(float square_sum) { return rsqrt_approx(__fadd_rn(square_sum, 1e-6f)); }

// G of the chunk's first rows, which are raw still: of a chunk that ends before its last row.
template <Pass kPass>
__device__ __forceinline__ float4 sum_gates(Stage<kPass>& stage, LaneGate const& gate, int rows, int channel) {
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    sum = gate.accumulated(
        sum, widen(*reinterpret_cast<uint2 const*>(stage.rows.at(Stage<kPass>::kGateRow + row, channel))));
  }
  return sum;
}

// scale / |q_i|. The square sums are the diagonal of q q^T.
__device__ __forceinline__ void query_norms(ForwardStage& stage, Scratch& scratch, float scale, int lane) {
  float sums[2][4] = {};  // columns 0-7 and 8-15
  // The four matrices of an A operand are, in another order, those of two B operands.
  int const offset = tile_offset<ForwardStage::kRows>(BlockPlace::of_a(lane)) + ForwardStage::kToQuery;
#pragma unroll
  for (int b = 0; b < kHeadDim / 16; ++b) {
    uint32_t q[4];
    load_matrices(q, stage.rows.in_block(b, offset));
    mma(sums[0], q, q[0], q[2]);
    mma(sums[1], q, q[1], q[3]);
  }
  store_diagonal(scratch.query_norm, sums[0], sums[1], lane,
                 [&](float sum) { return __fmul_rn(inverse_norm(sum), scale); });
}

// Turns raw rows into K+, Q+ and K- in place, each lane its own channels. `token` is the chunk's first. Rows past the
// end are zero in k and q, and in g as finite as the others.
template <Pass kPass, class Params, class LaneGate>
__device__ __forceinline__ void factors(Params const& p, Stage<kPass>& stage, Scratch const& scratch, LaneGate& gate,
                                        int token, int valid, int lane) {
  constexpr int kRows = kGroupRows;
  int const channel = kLaneChannels * lane;
  char* const rows = reinterpret_cast<char*>(stage.rows.data);
  auto const row_at = [&](int offset, int to) {
    return reinterpret_cast<uint2*>(rows + offset + to * int(sizeof(bf16)));
  };
  int offset[kRows];  // in bytes, of the group's rows
#pragma unroll
  for (int r = 0; r < kRows; ++r) offset[r] = tile_offset<Stage<kPass>::kRows>(r, channel) * int(sizeof(bf16));

  float4 total = {0.f, 0.f, 0.f, 0.f};  // G after the last row that is valid
  if constexpr (LaneGate::kPaddingDecays) {
    if (valid < kChunk) total = sum_gates(stage, gate, valid, channel);
  }

  float4 sum = {0.f, 0.f, 0.f, 0.f};  // G
#pragma unroll 1
  for (int first = 0; first < kChunk; first += kRows) {
    uint2 k_row[kRows], q_row[kRows];
    typename LaneGate::Row g_row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      k_row[r] = *row_at(offset[r], Stage<kPass>::kToKey);
      if constexpr (kPass == Pass::kForward) q_row[r] = *row_at(offset[r], Stage<kPass>::kToQuery);
      g_row[r] = gate.load(p, row_at(offset[r], Stage<kPass>::kToGate), token + first + r, first + r < valid);
    }
    alignas(16) float norm[kRows];
    if constexpr (kPass == Pass::kForward) {
      *reinterpret_cast<float4*>(norm) = *reinterpret_cast<float4 const*>(&scratch.query_norm[first]);
    }
    float4 exponent[kRows];
    gate.accumulate(p, exponent, sum, g_row, valid - first);
    // The sum itself stays unshifted: added to 57, slow decays would lose their last bits.
#pragma unroll
    for (int r = 0; r < kRows; ++r) exponent[r] = plus(exponent[r], kShift);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 const shrink = exp2_approx(exponent[r]), grow = exp2_approx(minus(exponent[r]));
      float4 const k = widen(k_row[r]);
      if constexpr (kPass == Pass::kForward) {
        *row_at(offset[r], Stage<kPass>::kToQuery) = narrow(times(times(widen(q_row[r]), norm[r]), shrink));
      }
      *row_at(offset[r], Stage<kPass>::kToKey) = narrow(times(k, shrink));
      *row_at(offset[r], Stage<kPass>::kToGate) = narrow(times(k, grow));
      // To the next group: another place in the swizzle's period.
      offset[r] = (offset[r] ^ kRows * 16) + kRows * kPanel * int(sizeof(bf16));
    }
  }
  float4 const decay = exp2_approx(LaneGate::kPaddingDecays && valid < kChunk ? total : sum);
  *reinterpret_cast<float2*>(stage.decay.pair(lane / 2, lane % 2 * 2)) = {decay.x, decay.y};
  *reinterpret_cast<float2*>(stage.decay.pair(lane / 2, lane % 2 * 2 + 1)) = {decay.z, decay.w};
}

// L, M, and n from the diagonal of K+ K-^T.
template <Pass kPass>
__device__ __forceinline__ void gram(Stage<kPass>& stage, Scratch& scratch, KeyNorms& key_norms, bool normalise,
                                     int lane) {
  float l[2][4] = {}, m[2][4] = {};
  int const offset = tile_offset<Stage<kPass>::kRows>(BlockPlace::of_a(lane));
  int const column_offset = tile_offset<Stage<kPass>::kRows>(BlockPlace::of_b(lane)) + Stage<kPass>::kToGate;
#pragma unroll
  for (int b = 0; b < kHeadDim / 16; ++b) {
    uint32_t k[4], q[4], columns[4];
    load_matrices(k, stage.rows.in_block(b, offset + Stage<kPass>::kToKey));
    if constexpr (kPass == Pass::kForward) load_matrices(q, stage.rows.in_block(b, offset + Stage<kPass>::kToQuery));
    load_matrices(columns, stage.rows.in_block(b, column_offset));
    mma(l[0], k, columns[0], columns[1]);
    mma(l[1], k, columns[2], columns[3]);
    if constexpr (kPass == Pass::kForward) {
      mma(m[0], q, columns[0], columns[1]);
      mma(m[1], q, columns[2], columns[3]);
    }
  }
  store_diagonal(key_norms.data, l[0], l[1], lane, [&](float sum) { return normalise ? inverse_norm(sum) : 1.f; });
  __syncwarp();
  float2 column_norm[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    column_norm[half] = *reinterpret_cast<float2 const*>(&key_norms.data[8 * half + 2 * (lane % 4)]);
  }
  // The triangles are cut out by selection: what lies outside may be infinite.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const i = lane / 4 + 8 * r;
    float const row = __fmul_rn(scratch.beta[i], key_norms.data[i]);
    if (kPass == Pass::kTransition && lane % 4 == 0) scratch.key_weight[i] = -row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const j = 8 * half + 2 * (lane % 4);
      float const left = __fmul_rn(__fmul_rn(row, l[half][2 * r]), column_norm[half].x);
      float const right = __fmul_rn(__fmul_rn(row, l[half][2 * r + 1]), column_norm[half].y);
      *reinterpret_cast<float2*>(stage.l().at(i, j)) = {j < i ? left : 0.f, j + 1 < i ? right : 0.f};
      if constexpr (kPass == Pass::kForward) {
        *reinterpret_cast<uint32_t*>(stage.m.at(i, j)) =
            pack_bf16(j <= i ? m[half][2 * r] : 0.f, j + 1 <= i ? m[half][2 * r + 1] : 0.f);
      }
    }
  }
}

// diag(n) (I + L)^{-1}: X (I + L) = diag(n) solved for the rows of X by back substitution in fp32. Both half-warps
// solve for row lane % 16.
template <Pass kPass>
__device__ __forceinline__ void solve(float (&x)[kChunk], Stage<kPass>& stage, KeyNorms const& key_norms, int lane) {
  int const i = lane % 16;
  float const norm = key_norms.data[i];
#pragma unroll
  for (int j = 0; j < kChunk; ++j) x[j] = i == j ? norm : 0.f;
#pragma unroll
  for (int r = kChunk - 1; r > 0; --r) {
#pragma unroll
    for (int j4 = 0; j4 < r; j4 += 4) {
      float4 const l = *reinterpret_cast<float4 const*>(stage.l().at(r, j4));
      float const row[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j4 + j < r) x[j4 + j] = __fmaf_rn(-row[j], x[r], x[j4 + j]);
      }
    }
  }
}

// A row of a [token, token] matrix as the sum of two bf16 numbers for each element.
struct RowParts {
  uint32_t hi[kChunk / 2], lo[kChunk / 2];

  // Of X diag(weights).
  __device__ static RowParts of(float const (&x)[kChunk], float const* weights) {
    RowParts parts;
#pragma unroll
    for (int j4 = 0; j4 < kChunk; j4 += 4) {
      float4 const a = times({x[j4], x[j4 + 1], x[j4 + 2], x[j4 + 3]}, *reinterpret_cast<float4 const*>(&weights[j4]));
      uint2 const high = narrow(a);
      float4 const kept = widen(high);
      uint2 const low =
          narrow({__fsub_rn(a.x, kept.x), __fsub_rn(a.y, kept.y), __fsub_rn(a.z, kept.z), __fsub_rn(a.w, kept.w)});
      parts.hi[j4 / 2] = high.x, parts.hi[j4 / 2 + 1] = high.y;
      parts.lo[j4 / 2] = low.x, parts.lo[j4 / 2 + 1] = low.y;
    }
    return parts;
  }
};
__device__ __forceinline__ void store_row(Square& to, int i, uint32_t const (&row)[kChunk / 2]) {
  *reinterpret_cast<uint4*>(to.at(i, 0)) = make_uint4(row[0], row[1], row[2], row[3]);
  *reinterpret_cast<uint4*>(to.at(i, 8)) = make_uint4(row[4], row[5], row[6], row[7]);
}

// A = diag(n) (I + L)^{-1} diag(beta), split into two bf16 parts that take L's place: the lower half-warp stores the
// high part, the upper one what is left of it.
__device__ __forceinline__ void invert(ForwardStage& stage, Scratch const& scratch, KeyNorms const& key_norms,
                                       int lane) {
  float x[kChunk];
  solve(x, stage, key_norms, lane);
  RowParts const a = RowParts::of(x, scratch.beta);
  __syncwarp();  // every lane has read L
  if (lane < 16) {
    store_row(stage.a_hi, lane % 16, a.hi);
  } else {
    store_row(stage.a_lo, lane % 16, a.lo);
  }
}

// A likewise, by the lower half-warp, and from the upper one's -A diag(n), which lies in A's place before, W in K+'s
// place.
__device__ __forceinline__ void invert(TransitionStage& stage, Scratch const& scratch, KeyNorms const& key_norms,
                                       int lane) {
  bool const is_upper = lane >= 16;
  float x[kChunk];
  solve(x, stage, key_norms, lane);
  RowParts const a = RowParts::of(x, is_upper ? scratch.key_weight : scratch.beta);
  auto const store = [&] { store_row(stage.a_hi, lane % 16, a.hi), store_row(stage.a_lo, lane % 16, a.lo); };
  __syncwarp();  // every lane has read L
  if (is_upper) store();
  __syncwarp();
  BlockPlace const place = BlockPlace::of_a(lane);
  uint32_t w_hi[4], w_lo[4];
  load_matrices(w_hi, stage.a_hi.at(place));
  load_matrices(w_lo, stage.a_lo.at(place));
  __syncwarp();  // every lane has read its part
  if (!is_upper) store();

  // Depth is the token of K+ here.
  int const offset = tile_offset<TransitionStage::kRows>(place) + TransitionStage::kToKey;
  uint32_t k[kHeadDim / 16][4];
#pragma unroll
  for (int b = 0; b < kHeadDim / 16; ++b) load_matrices_transposed(k[b], stage.rows.in_block(b, offset));
#pragma unroll
  for (int b = 0; b < kHeadDim / 16; ++b) {
    float w[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma(w[half], w_lo, k[b][2 * half], k[b][2 * half + 1]);
      mma(w[half], w_hi, k[b][2 * half], k[b][2 * half + 1]);
    }
    uint32_t packed[4];
    pack_operand(packed, w[0], w[1]);
    store_matrices(packed, stage.rows.in_block(b, offset));
  }
}

// The first half of the work. k, q (but for a transition) and g have arrived in the stage. `token` says where in its
// sequence the chunk starts.
template <Pass kPass>
__device__ __forceinline__ void make_factors(FwdParams const& p, Stage<kPass>& stage, Scratch& scratch,
                                             LaneGate const& gate, Beta const& beta, bf16 logit, int, int token,
                                             int valid, int lane) {
  if constexpr (kPass == Pass::kForward) query_norms(stage, scratch, p.scale, lane);
  // Padded rows have a beta of zero, so that their U is zero. The logit is first used here: it came from device memory.
  if (lane < kChunk) scratch.beta[lane] = lane < valid ? beta.activated(p, logit) : 0.f;
  __syncwarp();
  factors(p, stage, scratch, gate, token, valid, lane);
  __syncwarp();
}

// Where a chunk came from, for the second half.
struct ChunkOrigin {
  int sequence_index;
  int head, token, valid;
};

// The second half. On return everything is written and the scratch may be reused.
template <Pass kPass>
__device__ __forceinline__ void make_matrices(FwdParams const&, Stage<kPass>& stage, Scratch& scratch,
                                              KeyNorms& key_norms, ChunkOrigin const&, int lane) {
  gram(stage, scratch, key_norms, true, lane);
  __syncwarp();
  invert(stage, scratch, key_norms, lane);
  __syncwarp();
}

// What goes with the kernel's parameters: the plain forms above, or the general ones (common/general.h).
template <class Params>
struct Forms {
  using Gate = LaneGate;
  using Beta = flash_kda::Beta;
};

}  // namespace flash_kda
