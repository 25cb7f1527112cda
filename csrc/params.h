// What crosses from the host to the kernels: plain addresses, strides and sizes. No torch, no CUTLASS.
#pragma once

#include <cstdint>

namespace flash_kda {

constexpr int kHeadDim = 128;  // K = V = 128: key and value channels of a head

// A [batch, token, head(, channel)] tensor whose channels are contiguous. Strides count elements.
struct TensorView {
  void* data;
  int64_t batch_stride;
  int64_t token_stride;
  int64_t head_stride;
};

struct FwdParams {
  TensorView q, k, v, g;  // bf16, [B, T, H, 128], rows 16-byte aligned
  TensorView out;         // bf16, [B, T, H, 128], rows 16-byte aligned
  TensorView beta;        // bf16 logits, [B, T, H], any strides

  float const* A_log;         // [H]
  float const* dt_bias;       // [H, 128]
  void const* initial_state;  // [N, H, 128 (V), 128 (K)] or null: start from zero
  void* final_state;          // the same, or null: not wanted
  int64_t const* cu_seqlens;  // [N + 1] on the device, or null: every batch row is a sequence of num_tokens
  bool state_is_fp32;         // fp32 states, else bf16

  int64_t num_tokens;     // T: tokens of a batch row, or of the whole packed batch
  int64_t num_sequences;  // N
  int num_heads;          // H

  float scale;        // of the query
  float lower_bound;  // of the log decay, in [-5, 0)
};

}  // namespace flash_kda
