// Which rows belong to a sequence.
#pragma once

#include "params.h"

namespace flash_kda {

struct Sequence {
  int64_t batch;   // index along the batch dimension
  int64_t begin;   // first token
  int64_t length;  // may be zero
};

// cu_seqlens lives on the device and the host never reads it, so nothing has vetted it: clamping keeps every row that a
// kernel touches inside its tensors, whatever it holds.
__device__ __forceinline__ Sequence find_sequence(FwdParams const& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {n, 0, p.num_tokens};
  int64_t const begin = min(max(p.cu_seqlens[n], int64_t(0)), p.num_tokens);
  int64_t const end = min(max(p.cu_seqlens[n + 1], begin), p.num_tokens);
  return {0, begin, end - begin};
}

// The sequence that comes at place `rank` when sequences are ordered from the longest to the shortest (ties in their
// own order), found by the whole block. More sequences than kMostRanked keep their order: there the tail of the grid is
// short anyway. `lengths` is scratch for kMostRanked entries; ends with a block barrier.
constexpr int kMostRanked = 128;
template <int kThreads>
__device__ __forceinline__ int64_t sequence_of_rank(FwdParams const& p, int rank, int64_t* lengths, int& result) {
  static_assert(kThreads >= kMostRanked);
  bool const is_ranked = p.cu_seqlens != nullptr && p.num_sequences > 1 && p.num_sequences <= kMostRanked;
  int const n = threadIdx.x;
  bool const has_sequence = is_ranked && n < p.num_sequences;
  int64_t const length = has_sequence ? find_sequence(p, n).length : 0;
  if (has_sequence) lengths[n] = length;
  __syncthreads();
  if (!is_ranked) return rank;
  if (has_sequence) {
    int before = 0;
    for (int m = 0; m < p.num_sequences; ++m) before += lengths[m] > length || (lengths[m] == length && m < n);
    if (before == rank) result = n;
  }
  __syncthreads();
  return result;
}

// Address of the first row of (sequence, head).
template <class Element>
__device__ __forceinline__ Element* first_row(TensorView const& t, Sequence const& s, int head) {
  return static_cast<Element*>(t.data) + s.batch * t.batch_stride + s.begin * t.token_stride + head * t.head_stride;
}

}  // namespace flash_kda
