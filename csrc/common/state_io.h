// The running state in MMA accumulators, and its way from and to memory.
#pragma once

#include <cutlass/numeric_types.h>

#include "common/mma.h"
#include "params.h"

namespace flash_kda {

// Sixteen value rows of one head's state, all 128 key channels, in a warp: tile j holds channels 8 j .. 8 j + 7.
using StateRows = float[kHeadDim / 8][4];

__device__ __forceinline__ float2 load_pair(float const* p) { return *reinterpret_cast<float2 const*>(p); }
__device__ __forceinline__ float2 load_pair(cutlass::bfloat16_t const* p) {
  return unpack_bf16(*reinterpret_cast<uint32_t const*>(p));
}
__device__ __forceinline__ void store_pair(float* p, float x, float y) {
  *reinterpret_cast<float2*>(p) = make_float2(x, y);
}
__device__ __forceinline__ void store_pair(cutlass::bfloat16_t* p, float x, float y) {
  *reinterpret_cast<uint32_t*>(p) = pack_bf16(x, y);
}

// `first` is the first of the warp's sixteen [128]-rows among all states, counted in elements. `factor`, a power of
// two, goes with every element.
template <class Element>
__device__ __forceinline__ void load_state(StateRows& state, Element const* states, int64_t first, float factor,
                                           int lane) {
  Element const* p = states + first + (lane / 4) * kHeadDim + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    float2 const top = load_pair(p + 8 * j), bottom = load_pair(p + 8 * kHeadDim + 8 * j);
    state[j][0] = top.x * factor, state[j][1] = top.y * factor;
    state[j][2] = bottom.x * factor, state[j][3] = bottom.y * factor;
  }
}

template <class Element>
__device__ __forceinline__ void store_state(StateRows const& state, Element* states, int64_t first, float factor,
                                            int lane) {
  Element* p = states + first + (lane / 4) * kHeadDim + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    store_pair(p + 8 * j, state[j][0] * factor, state[j][1] * factor);
    store_pair(p + 8 * kHeadDim + 8 * j, state[j][2] * factor, state[j][3] * factor);
  }
}

// Zero where there is no initial state.
__device__ __forceinline__ void load_initial_state(StateRows& state, FwdParams const& p, int64_t first, float factor,
                                                   int lane) {
  if (p.initial_state == nullptr) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) state[i / 4][i % 4] = 0.f;
  } else if (p.state_is_fp32) {
    load_state(state, static_cast<float const*>(p.initial_state), first, factor, lane);
  } else {
    load_state(state, static_cast<cutlass::bfloat16_t const*>(p.initial_state), first, factor, lane);
  }
}

// Nothing where no final state is wanted.
__device__ __forceinline__ void store_final_state(StateRows const& state, FwdParams const& p, int64_t first,
                                                  float factor, int lane) {
  if (p.final_state == nullptr) return;
  if (p.state_is_fp32) {
    store_state(state, static_cast<float*>(p.final_state), first, factor, lane);
  } else {
    store_state(state, static_cast<cutlass::bfloat16_t*>(p.final_state), first, factor, lane);
  }
}

}  // namespace flash_kda
