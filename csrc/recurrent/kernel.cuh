// The kernel for short sequences (decoding): token by token in fp32, without tensor cores. What takes its time is the
// way of the states from and to memory, so that the work is cut to keep as much of that in flight as possible. Serves
// every length and every gate.
#pragma once

#include "common/general.h"
#include "common/state_io.h"

namespace flash_kda::recurrent {

// A warp carries sixteen value rows of a (sequence, head) pair, a lane four channels of each row; two CTAs share a
// pair. Warps do not talk to each other.
constexpr int kRows = 16;
constexpr int kParts = 2;
constexpr int kWarps = kHeadDim / kRows / kParts;
constexpr int kThreads = kWarps * kWarp;
constexpr int kCtas = 3;  // on a multiprocessor: 168 registers a thread

using Rows = float4[kRows];

__device__ __forceinline__ float4 load_channels(float const* p) { return *reinterpret_cast<float4 const*>(p); }
__device__ __forceinline__ float4 load_channels(bf16 const* p) { return widen(*reinterpret_cast<uint2 const*>(p)); }
__device__ __forceinline__ void store_channels(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
__device__ __forceinline__ void store_channels(bf16* p, float4 x) { *reinterpret_cast<uint2*>(p) = narrow(x); }

// `first` is where the warp's rows begin among all states, in elements.
template <class Element>
__device__ __forceinline__ void load_rows(Rows& state, void const* states, int64_t first, int lane) {
  Element const* const p = static_cast<Element const*>(states) + first + kLaneChannels * lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r) state[r] = load_channels(p + r * kHeadDim);
}

__device__ __forceinline__ void store_rows(Rows const& state, void* states, bool is_fp32, int64_t first, int lane) {
  first += kLaneChannels * lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (is_fp32) {
      store_channels(static_cast<float*>(states) + first + r * kHeadDim, state[r]);
    } else {
      store_channels(static_cast<bf16*>(states) + first + r * kHeadDim, state[r]);
    }
  }
}

// One step of a sum over the lanes: of two rows a lane keeps the one that `keep_second` says, and adds the share of the
// lane at `distance`, which keeps the other one.
__device__ __forceinline__ float fold(float first, float second, int distance, bool keep_second) {
  float const mine = keep_second ? second : first, other = keep_second ? first : second;
  return mine + __shfl_xor_sync(0xffffffff, other, distance);
}

// The last four steps, from rows r and r + 8 already folded by distance 16: a lane receives the sum of row lane / 2.
__device__ __forceinline__ float row_sum(float const (&x)[kRows / 2], int lane) {
  float y[4], z[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = fold(x[i], x[i + 4], 8, lane & 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) z[i] = fold(y[i], y[i + 2], 4, lane & 4);
  float const sum = fold(z[0], z[1], 2, lane & 2);
  return sum + __shfl_xor_sync(0xffffffff, sum, 1);
}

// What a lane reads of a token.
struct Token {
  uint2 k, q;
  float4 g;
  float logit;
  bf16 v;  // of row lane / 2
};

__global__ void __launch_bounds__(kThreads, kCtas) fwd_kernel(__grid_constant__ GeneralParams const p) {
  int64_t const sequence_index = blockIdx.x / p.num_heads;
  int const head = blockIdx.x % p.num_heads;
  int const warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int const first_value = kRows * (int(blockIdx.y) * kWarps + warp), channel = kLaneChannels * lane;

  Rows state;
  int64_t const row = state_row(p, sequence_index);
  int64_t const in_row = offset_in_row(head, first_value);
  if (p.initial_state == nullptr || row < 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) state[r] = {0.f, 0.f, 0.f, 0.f};
  } else if (p.state_is_fp32) {
    load_rows<float>(state, p.initial_state, row * p.initial_pitch + in_row, lane);
  } else {
    load_rows<bf16>(state, p.initial_state, row * p.initial_pitch + in_row, lane);
  }

  Sequence const sequence = find_sequence(p, sequence_index);
  int const length = int(sequence.length);
  bf16 const* const k = first_row<bf16 const>(p.k, sequence, key_head(p, head)) + channel;
  bf16 const* const q = first_row<bf16 const>(p.q, sequence, key_head(p, head)) + channel;
  bf16 const* const v = first_row<bf16 const>(p.v, sequence, head) + first_value + lane / 2;
  bf16 const* const g = first_row<bf16 const>(p.g, sequence, head) + channel;  // if bf16
  bf16* const out = first_row<bf16>(p.out, sequence, head) + first_value + lane / 2;
  GeneralLaneGate const gate =
      GeneralLaneGate::of(p, GateRows::of(p, sequence, head, lane), GeneralLaneGate::Constants::of_head(p, head, lane));
  GeneralBeta const beta = GeneralBeta::of(p, sequence, head);
  auto const load = [&](int t) -> Token {
    return {*reinterpret_cast<uint2 const*>(k + t * p.k.token_stride),
            *reinterpret_cast<uint2 const*>(q + t * p.q.token_stride),
            gate.load(p, reinterpret_cast<uint2 const*>(g + t * p.g.token_stride), t, true), beta.load(p, t, kWarp, 0),
            v[t * p.v.token_stride]};
  };
  auto const checkpoint = [&](int tokens) {
    int64_t const to = checkpoint_row(p, sequence_index, tokens, length);
    if (to >= 0) store_rows(state, p.checkpoints.data, p.checkpoints.is_fp32, to * row_size(p) + in_row, lane);
  };

  Token next = {};
  if (length > 0) next = load(0);
  checkpoint(0);
#pragma unroll 1
  for (int t = 0; t < length; ++t) {
    Token const token = next;
    if (t + 1 < length) next = load(t + 1);

    float4 unit_k = widen(token.k), query = widen(token.q);
    if (p.normalise) {
      unit_k = times(unit_k, rsqrtf(warp_sum(dot(unit_k, unit_k)) + 1e-6f));
      query = times(query, rsqrtf(warp_sum(dot(query, query)) + 1e-6f));
    }
    query = times(query, p.scale);
    float const along = warp_sum(dot(unit_k, query));
    float4 const decay = exp2_approx(gate.log2_decay(p, token.g));

    float predicted[kRows / 2], seen[kRows / 2];  // by the state before the update: of v, and by the query
#pragma unroll
    for (int r = 0; r < kRows / 2; ++r) {
      float4 &upper = state[r], &lower = state[r + kRows / 2];
      upper = times(upper, decay), lower = times(lower, decay);
      predicted[r] = fold(dot(upper, unit_k), dot(lower, unit_k), 16, lane & 16);
      seen[r] = fold(dot(upper, query), dot(lower, query), 16, lane & 16);
    }
    float const u = beta.activated(p, token.logit) * (float(token.v) - row_sum(predicted, lane));
    float const o = row_sum(seen, lane) + u * along;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float const u_r = __shfl_sync(0xffffffff, u, 2 * r);
      state[r].x += u_r * unit_k.x, state[r].y += u_r * unit_k.y;
      state[r].z += u_r * unit_k.z, state[r].w += u_r * unit_k.w;
    }
    if (lane % 2 == 0) out[t * p.out.token_stride] = bf16(o);
    checkpoint(t + 1);
  }

  if (p.final_state != nullptr && row >= 0) {
    store_rows(state, p.final_state, p.state_is_fp32, row * p.final_pitch + in_row, lane);
  }
}

}  // namespace flash_kda::recurrent
