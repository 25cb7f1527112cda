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

// Address of the first row of (sequence, head).
template <class Element>
__device__ __forceinline__ Element* first_row(TensorView const& t, Sequence const& s, int head) {
  return static_cast<Element*>(t.data) + s.batch * t.batch_stride + s.begin * t.token_stride + head * t.head_stride;
}

}  // namespace flash_kda
