// The recurrence role: a warp carries 32 value rows of the state through the chunks. Value rows never mix, so the
// recurrence warps do not talk to each other.
#pragma once

#include "common/prepare.h"
#include "common/sequence.h"
#include "common/state_io.h"
#include "portable/config.h"

namespace flash_kda::portable {

// Everything is transposed, value rows by tokens, so that the state is always the A operand or the accumulator:
//   X^T = V^T - S' K+^T diag(n),  U^T = X^T A^T,  O^T = S' Q+^T + U^T M^T,  S' <- (S' + U^T K-) diag(decay)
template <class Params>
__device__ __forceinline__ void step(StateRows (&state)[kRowTiles], ForwardStage& stage, KeyNorms const& key_norms,
                                     Tile<kChunk>& values, int first_value, int lane) {
  BlockPlace const place = BlockPlace::of_b(lane);
  int const offset = tile_offset<ForwardStage::kRows>(place);
  int const transposed_offset = tile_offset<ForwardStage::kRows>(BlockPlace::of_a(lane)) + ForwardStage::kToGate;

  float x[kRowTiles][2][4] = {}, o[kRowTiles][2][4] = {};
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; j += 2) {
    uint32_t k[4], q[4];
    load_matrices(k, stage.rows.in_block(j / 2, offset + ForwardStage::kToKey));
    load_matrices(q, stage.rows.in_block(j / 2, offset + ForwardStage::kToQuery));
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      uint32_t s[4];
      pack_operand(s, state[t][j], state[t][j + 1]);
      mma(x[t][0], s, k[0], k[1]);
      mma(x[t][1], s, k[2], k[3]);
      mma(o[t][0], s, q[0], q[1]);
      mma(o[t][1], s, q[2], q[3]);
    }
  }

  // X and A both in two bf16 parts; the product of the low parts is below fp32 rounding of the whole and left out.
  uint32_t a_hi[4], a_lo[4], u_operand[kRowTiles][4];
  load_matrices(a_hi, stage.a_hi.at(place));
  load_matrices(a_lo, stage.a_lo.at(place));
  float2 norm[2];  // of the tokens of a lane's columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    norm[half] = *reinterpret_cast<float2 const*>(&key_norms.data[8 * half + 2 * (lane % 4)]);
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    uint32_t v[4], x_hi[4], x_lo[4];
    load_matrices_transposed(v, values.at(place.row, first_value + 16 * t + place.column));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const value = unpack_bf16(v[i]);
      float const(&y)[4] = x[t][i / 2];
      float const a = __fmaf_rn(-norm[i / 2].x, y[2 * (i % 2)], value.x);
      float const b = __fmaf_rn(-norm[i / 2].y, y[2 * (i % 2) + 1], value.y);
      x_hi[i] = pack_bf16(a, b);
      float2 const hi = unpack_bf16(x_hi[i]);
      x_lo[i] = pack_bf16(__fsub_rn(a, hi.x), __fsub_rn(b, hi.y));
    }
    float u[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma(u[half], x_lo, a_hi[2 * half], a_hi[2 * half + 1]);
      mma(u[half], x_hi, a_lo[2 * half], a_lo[2 * half + 1]);
      mma(u[half], x_hi, a_hi[2 * half], a_hi[2 * half + 1]);
    }
    pack_operand(u_operand[t], u[0], u[1]);
  }

  bool const decay_first = kIsUnbounded<Params> && stage.decay.comes_first();
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; j += 2) {
    uint32_t k[4];
    // Depth is the token here.
    load_matrices_transposed(k, stage.rows.in_block(j / 2, transposed_offset));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 const d = *reinterpret_cast<float2 const*>(stage.decay.pair(j + half, lane % 4));
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        float (&tile)[4] = state[t][j + half];
        if (decay_first) {
          tile[0] = __fmul_rn(tile[0], -d.x), tile[1] = __fmul_rn(tile[1], -d.y);
          tile[2] = __fmul_rn(tile[2], -d.x), tile[3] = __fmul_rn(tile[3], -d.y);
        }
        mma(tile, u_operand[t], k[2 * half], k[2 * half + 1]);
        if (!decay_first) {
          tile[0] = __fmul_rn(tile[0], d.x), tile[1] = __fmul_rn(tile[1], d.y);
          tile[2] = __fmul_rn(tile[2], d.x), tile[3] = __fmul_rn(tile[3], d.y);
        }
      }
    }
  }

  uint32_t m[4];
  load_matrices(m, stage.m.at(place));
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    mma(o[t][0], u_operand[t], m[0], m[1]);
    mma(o[t][1], u_operand[t], m[2], m[3]);
    uint32_t packed[4];
    pack_operand(packed, o[t][0], o[t][1]);
    store_matrices_transposed(packed, values.at(place.row, first_value + 16 * t + place.column));
  }
}

template <class Params>
__device__ __forceinline__ void recur(Params const& p, SharedStorage& shared, Sequence const& sequence,
                                      int sequence_index, int head, int warp, int lane) {
  int const first_value = kWarpRows * warp;

  // An empty sequence hands its state on as it came, to the last bit.
  bool const is_empty = sequence.length == 0;
  StateRows state[kRowTiles];
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    load_initial_state(state[t], p, sequence_index, head, first_value + 16 * t, is_empty ? 1.f : kShiftDown, lane);
  }
  auto const checkpoint = [&](int64_t tokens) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      store_checkpoint(p, state[t], sequence_index, head, first_value + 16 * t, int(tokens), int(sequence.length),
                       lane);
    }
  };
  checkpoint(0);

  // Four lanes store a token's 32 values, 16 bytes each: eight tokens at a time.
  int const row = lane / 4, column = first_value + 8 * (lane % 4);
  bf16* const out = first_row<bf16>(p.out, sequence, head) + column;

  uint32_t chunk = 0;
  for (int64_t token = 0; token < sequence.length; token += kChunk, ++chunk) {
    uint32_t const s = chunk % kStages;
    ForwardStage& stage = shared.stage[s];
    shared.full[s].wait(chunk / kStages % 2);
    step<Params>(state, stage, shared.key_norms[s], shared.v[s], first_value, lane);
    __syncwarp();
#pragma unroll
    for (int i = row; i < kChunk; i += kWarp / 4) {
      if (token + i < sequence.length) {
        *reinterpret_cast<uint4*>(out + (token + i) * p.out.token_stride) =
            *reinterpret_cast<uint4 const*>(shared.v[s].at(i, column));
      }
    }
    shared.empty[s].arrive();
    if (token + kChunk <= sequence.length) checkpoint(token + kChunk);
  }

#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    store_state(state[t], final_state_of(p, sequence_index, head, first_value + 16 * t), is_empty ? 1.f : kShiftUp,
                lane);
  }
}

}  // namespace flash_kda::portable
