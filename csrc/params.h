// What crosses from the host to the kernels: plain addresses, strides and sizes. No torch, no CUTLASS.
#pragma once

#include <cstdint>
#include <type_traits>

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

enum class GateKind : int {
  kSigmoid,   // lower_bound sigmoid(exp(A_log) (g + dt_bias))
  kSoftplus,  // -exp(A_log) softplus(g + dt_bias)
  kLog        // g is the natural log of the decay
};
enum class BetaKind : int { kSigmoid, kTwiceSigmoid, kActivated };

// States on the way through a sequence. Sequence n owns rows [offsets[n], offsets[n + 1]) of `data`.
struct Checkpoints {
  void* data;              // [rows, HV, 128 (V), 128 (K)], or null: none wanted
  int64_t const* offsets;  // [N + 1], on the device
  int64_t rows;
  int interval;   // in tokens, a multiple of 64
  bool at_start;  // the state before each interval, else the one after each whole interval
  bool is_fp32;   // else bf16
};

// What only some calls need. Its type tells the kernels apart at compile time: those that take plain FwdParams hold no
// code for it. Here num_heads counts the heads of v, g, beta, out and the states; A_log and dt_bias may be null.
struct GeneralParams : FwdParams {
  void const* state_indices;  // [N]: the row of the state pools of each sequence, or null: row n
  int64_t state_rows;         // P, of both pools
  int64_t initial_pitch;      // elements from one row of a pool to the next
  int64_t final_pitch;
  Checkpoints checkpoints;
  int group;  // value heads a head of q and k
  GateKind gate;
  BetaKind beta_kind;
  bool state_indices_are_int32;  // else int64
  bool cu_seqlens_are_int32;     // FwdParams::cu_seqlens then points to int32
  bool g_is_fp32;                // else bf16, as beta
  bool beta_is_fp32;
  bool normalise;  // q and k
};

// A call of which the kernels know at compile time that the gate is kSoftplus, g bf16, and no checkpoints are wanted.
struct SoftplusParams : GeneralParams {};

// How a call's sequences are cut into segments that are worked on at once (docs/segment-scan.md).
struct Segments {
  void* workspace;  // SegmentState [slots, H] (common/segment.h)
  int tokens;       // of a segment, a multiple of 16; a sequence's last one may be shorter
  int slots;        // segments of all sequences, at most: lengths are the device's to know
};

// The same call, cut: kernels that take it count segments where others count sequences.
template <class Params>
struct Segmented : Params {
  using Base = Params;
  Segments segments;
};

// Whether decays may be too strong for a chunk's factors.
template <class Params>
constexpr bool kIsUnbounded = std::is_base_of_v<GeneralParams, Params>;

template <class Params>
constexpr bool kIsSegmented = false;
template <class Params>
constexpr bool kIsSegmented<Segmented<Params>> = true;

}  // namespace flash_kda
