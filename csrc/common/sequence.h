// Which rows belong to a sequence.
#pragma once

#include "params.h"

namespace flash_kda {

// The host sees to it that there are fewer than 2^31 of each.
struct Sequence {
  int batch;   // index along the batch dimension
  int begin;   // first token
  int length;  // may be zero
};

// cu_seqlens lives on the device and the host never reads it, so nothing has vetted it: clamping keeps every row that a
// kernel touches inside its tensors, whatever it holds.
__device__ __forceinline__ Sequence clamped(int64_t begin, int64_t end, int64_t num_tokens) {
  begin = min(max(begin, int64_t(0)), num_tokens);
  end = min(max(end, begin), num_tokens);
  return {0, int(begin), int(end - begin)};
}
__device__ __forceinline__ Sequence find_sequence(FwdParams const& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {int(n), 0, int(p.num_tokens)};
  return clamped(p.cu_seqlens[n], p.cu_seqlens[n + 1], p.num_tokens);
}
__device__ __forceinline__ Sequence find_sequence(GeneralParams const& p, int64_t n) {
  if (p.cu_seqlens == nullptr || !p.cu_seqlens_are_int32) return find_sequence(static_cast<FwdParams const&>(p), n);
  int32_t const* const entries = reinterpret_cast<int32_t const*>(p.cu_seqlens);
  return clamped(entries[n], entries[n + 1], p.num_tokens);
}

// The head of q and k that belongs to a head of v.
__device__ __forceinline__ int key_head(FwdParams const&, int head) { return head; }
__device__ __forceinline__ int key_head(GeneralParams const& p, int head) {
  return p.group == 1 ? head : head / p.group;
}

// Whether the stage receives g: it has room for bf16.
__device__ __forceinline__ bool g_is_staged(FwdParams const&) { return true; }
__device__ __forceinline__ bool g_is_staged(GeneralParams const& p) { return !p.g_is_fp32; }
__device__ __forceinline__ bool g_is_staged(SoftplusParams const&) { return true; }

// Address of the first row of (sequence, head).
template <class Element>
__device__ __forceinline__ Element* first_row(TensorView const& t, Sequence const& s, int head) {
  return static_cast<Element*>(t.data) + s.batch * t.batch_stride + s.begin * t.token_stride + head * t.head_stride;
}

}  // namespace flash_kda
