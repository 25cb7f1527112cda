// The running state in MMA accumulators, and its way from and to memory.
#pragma once

#include <cutlass/numeric_types.h>

#include "common/segment.h"
#include "common/stage.h"

namespace flash_kda {

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

// The row of the states that sequence n reads and writes; -1 where it has none. The host never reads the indices, so
// nothing has vetted them: one outside the pools counts as -1.
__device__ __forceinline__ int64_t state_row(FwdParams const&, int64_t n) { return n; }
__device__ __forceinline__ int64_t state_row(GeneralParams const& p, int64_t n) {
  if (p.state_indices == nullptr) return n;
  int64_t const row = p.state_indices_are_int32 ? static_cast<int32_t const*>(p.state_indices)[n]
                                                : static_cast<int64_t const*>(p.state_indices)[n];
  return row >= 0 && row < p.state_rows ? row : -1;
}

// Elements of a row of the states, where rows lie close together.
__device__ __forceinline__ int64_t row_size(FwdParams const& p) { return p.num_heads * int64_t(kHeadDim * kHeadDim); }
__device__ __forceinline__ int64_t initial_pitch(FwdParams const& p) { return row_size(p); }
__device__ __forceinline__ int64_t final_pitch(FwdParams const& p) { return row_size(p); }
__device__ __forceinline__ int64_t initial_pitch(GeneralParams const& p) { return p.initial_pitch; }
__device__ __forceinline__ int64_t final_pitch(GeneralParams const& p) { return p.final_pitch; }

// Sixteen rows of a head's state from value row `value` on, in elements from the first of a pool's row.
__device__ __forceinline__ int64_t offset_in_row(int head, int value) {
  return (int64_t(head) * kHeadDim + value) * kHeadDim;
}

// Rows of a state in memory; null: there are none.
struct StateAddress {
  void* rows;
  bool is_fp32;  // else bf16
};
__device__ __forceinline__ StateAddress state_address(void const* states, int64_t element, bool is_fp32) {
  int const element_bytes = is_fp32 ? sizeof(float) : sizeof(cutlass::bfloat16_t);
  return {const_cast<char*>(static_cast<char const*>(states)) + element * element_bytes, is_fp32};
}

// Value rows from `value` on of the state that a sequence starts from, and of the one that it leaves.
template <class Params>
__device__ __forceinline__ StateAddress initial_state_of(Params const& p, int64_t sequence_index, int head, int value) {
  static_assert(!kIsSegmented<Params>, "segments are no sequences");
  int64_t const row = state_row(p, sequence_index);
  if (p.initial_state == nullptr || row < 0) return {nullptr, true};
  return state_address(p.initial_state, row * initial_pitch(p) + offset_in_row(head, value), p.state_is_fp32);
}
template <class Params>
__device__ __forceinline__ StateAddress final_state_of(Params const& p, int64_t sequence_index, int head, int value) {
  if (p.final_state == nullptr) return {nullptr, true};
  int64_t const row = state_row(p, sequence_index);
  if (row < 0) return {nullptr, true};
  return state_address(p.final_state, row * final_pitch(p) + offset_in_row(head, value), p.state_is_fp32);
}

template <class Base>
__device__ __forceinline__ StateAddress final_state_of(Segmented<Base> const& p, int64_t slot, int head, int value) {
  Segment const segment = find_segment(p, int(slot));
  if (segment.sequence_index < 0 || !segment.is_last()) return {nullptr, true};  // the workspace has the others
  return final_state_of(static_cast<Base const&>(p), segment.sequence_index, head, value);
}

// Zero where there is no initial state.
__device__ __forceinline__ void load_state(StateRows& state, StateAddress const& from, float factor, int lane) {
  if (from.rows == nullptr) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) state[i / 4][i % 4] = 0.f;
    return;
  }
  __builtin_assume(__isGlobal(from.rows));  // or the compiler makes generic accesses, which are slower
  if (from.is_fp32) {
    load_state(state, static_cast<float const*>(from.rows), 0, factor, lane);
  } else {
    load_state(state, static_cast<cutlass::bfloat16_t const*>(from.rows), 0, factor, lane);
  }
}

template <class Params>
__device__ __forceinline__ void load_initial_state(StateRows& state, Params const& p, int64_t sequence_index, int head,
                                                   int value, float factor, int lane) {
  load_state(state, initial_state_of(p, sequence_index, head, value), factor, lane);
}
// The only segment of its sequence starts from where the sequence does, others from the workspace.
template <class Base>
__device__ __forceinline__ void load_initial_state(StateRows& state, Segmented<Base> const& p, int64_t slot, int head,
                                                   int value, float factor, int lane) {
  Segment const segment = find_segment(p, int(slot));
  if (segment.count > 1) {
    state_before(p, int(slot), head).load(state, value, factor, lane);
  } else {
    load_state(state,
               segment.sequence_index < 0
                   ? StateAddress{nullptr, true}
                   : initial_state_of(static_cast<Base const&>(p), segment.sequence_index, head, value),
               factor, lane);
  }
}

// Nothing where no final state is wanted.
__device__ __forceinline__ void store_state(StateRows const& state, StateAddress const& to, float factor, int lane) {
  if (to.rows == nullptr) return;
  __builtin_assume(__isGlobal(to.rows));
  if (to.is_fp32) {
    store_state(state, static_cast<float*>(to.rows), 0, factor, lane);
  } else {
    store_state(state, static_cast<cutlass::bfloat16_t*>(to.rows), 0, factor, lane);
  }
}

// The row among the checkpoints for the state after `tokens` of a sequence's `length` tokens; -1: none is due.
__device__ __forceinline__ int64_t checkpoint_row(GeneralParams const& p, int64_t sequence_index, int tokens,
                                                  int length) {
  Checkpoints const& c = p.checkpoints;
  if (c.data == nullptr || tokens % 64 != 0 || tokens % c.interval != 0) return -1;
  if (c.at_start ? tokens >= length : tokens == 0 || tokens > length) return -1;
  // Read by nobody but the device: rows outside the sequence's own, or outside the tensor, are left out.
  int64_t const row = c.offsets[sequence_index] + tokens / c.interval - (c.at_start ? 0 : 1);
  return row >= 0 && row < min(c.offsets[sequence_index + 1], c.rows) ? row : -1;
}

// Stores the state that a sequence has after `tokens` of its `length` tokens, where a checkpoint is due.
__device__ __forceinline__ void store_checkpoint(FwdParams const&, StateRows const&, int64_t, int, int, int, int, int) {
}
__device__ __forceinline__ void store_checkpoint(SoftplusParams const&, StateRows const&, int64_t, int, int, int, int,
                                                 int) {}
__device__ __forceinline__ void store_checkpoint(GeneralParams const& p, StateRows const& state, int64_t sequence_index,
                                                 int head, int value, int tokens, int length, int lane) {
  int64_t const row = checkpoint_row(p, sequence_index, tokens, length);
  if (row < 0) return;
  int64_t const first = row * row_size(p) + offset_in_row(head, value);
  if (p.checkpoints.is_fp32) {
    store_state(state, static_cast<float*>(p.checkpoints.data), first, kShiftUp, lane);
  } else {
    store_state(state, static_cast<cutlass::bfloat16_t*>(p.checkpoints.data), first, kShiftUp, lane);
  }
}

// A segment's, counted in its sequence's tokens. The state at a segment's start is stored by the one that ends there.
template <class Base>
__device__ __forceinline__ void store_checkpoint(Segmented<Base> const& p, StateRows const& state, int64_t slot,
                                                 int head, int value, int tokens, int, int lane) {
  if constexpr (kIsUnbounded<Base>) {
    if (p.checkpoints.data == nullptr) return;  // before the search, which every chunk would wait for
    Segment const segment = find_segment(p, int(slot));
    if (tokens == 0 && !segment.is_first()) return;
    store_checkpoint(static_cast<Base const&>(p), state, segment.sequence_index, head, value, segment.offset() + tokens,
                     segment.sequence.length, lane);
  }
}

}  // namespace flash_kda
