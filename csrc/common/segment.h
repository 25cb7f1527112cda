// Segments: which tokens each is, and what the passes over them hand to each other.
#pragma once

#include "common/sequence.h"
#include "common/stage.h"

namespace flash_kda {

// A segment of a sequence. Slots number the segments of all sequences, in order; every sequence has at least one, so
// that its state is handed on.
struct Segment {
  Sequence tokens;
  Sequence sequence;   // all of it
  int sequence_index;  // -1: there are fewer segments than slots
  int index;           // in its sequence
  int count;           // of its sequence

  __device__ bool is_first() const { return index == 0; }
  __device__ bool is_last() const { return index + 1 == count; }
  __device__ int offset() const { return tokens.begin - sequence.begin; }  // in tokens of its sequence
};

// Longer than any sequence.
constexpr int kUncut = 0x7fffffff;

// How many segments of that many tokens a sequence has.
__device__ __forceinline__ int count_segments(int tokens, Sequence const& sequence) {
  return sequence.length == 0 ? 1 : (sequence.length - 1) / tokens + 1;
}

// Tokens of a segment. Sequences that overlap, as entries of cu_seqlens out of order make them, may have more segments
// than there are slots: they are not cut, then.
template <class Base>
__device__ __forceinline__ int segment_tokens(Segmented<Base> const& p) {
  int const tokens = p.segments.tokens;
  if (p.cu_seqlens == nullptr || p.num_sequences == 1) return tokens;
  int64_t left = p.segments.slots;
#pragma unroll 1
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    left -= count_segments(tokens, find_sequence(static_cast<Base const&>(p), n));
  }
  return left >= 0 ? tokens : kUncut;
}

__device__ __forceinline__ Segment segment_of(int tokens, Sequence const& sequence, int sequence_index, int index) {
  int const offset = index * tokens;
  return {{sequence.batch, sequence.begin + offset, min(tokens, sequence.length - offset)},
          sequence,
          sequence_index,
          index,
          count_segments(tokens, sequence)};
}

// The segment in a slot; an empty one past the last.
template <class Base>
__device__ __forceinline__ Segment find_segment(Segmented<Base> const& p, int slot) {
  int const tokens = segment_tokens(p);
#pragma unroll 1
  for (int n = 0; n < p.num_sequences; ++n) {
    Sequence const sequence = find_sequence(static_cast<Base const&>(p), n);
    int const count = count_segments(tokens, sequence);
    if (slot < count) return segment_of(tokens, sequence, n, slot);
    slot -= count;
  }
  return {{0, 0, 0}, {0, 0, 0}, -1, 0, 1};
}

// Kernels that walk segments as others walk sequences find them here.
template <class Base>
__device__ __forceinline__ Sequence find_sequence(Segmented<Base> const& p, int64_t slot) {
  return find_segment(p, int(slot)).tokens;
}

// How many of them there are.
template <class Params>
__host__ __device__ int64_t count_sequences(Params const& p) {
  if constexpr (kIsSegmented<Params>) {
    return p.segments.slots;
  } else {
    return p.num_sequences;
  }
}

// Sixteen rows of one head's state, all 128 channels, in a warp's accumulators: tile j holds channels 8 j .. 8 j + 7.
using StateRows = float[kHeadDim / 8][4];

// P [K, K] in two bf16 parts, as 8 x 8 blocks of 128 bytes, [row / 8][channel / 8]: an accumulator's pairs fill one in
// the order of lanes, and wgmma takes them as an MN-major operand without swizzle.
struct alignas(128) Transition {
  static constexpr int kBlock = 64;
  bf16 hi[kHeadDim * kHeadDim], lo[kHeadDim * kHeadDim];

  // Sixteen rows from `row` on.
  __device__ void store(StateRows const& rows, int row, float factor, int lane) {
    int const first = row / 8 * (kHeadDim / 8) * kBlock + 2 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        int const at = first + (half * (kHeadDim / 8) + j) * kBlock;
        float const x = rows[j][2 * half] * factor, y = rows[j][2 * half + 1] * factor;
        PairParts const parts = PairParts::of(x, y);
        *reinterpret_cast<uint32_t*>(&hi[at]) = parts.hi;
        *reinterpret_cast<uint32_t*>(&lo[at]) = parts.lo;
      }
    }
  }
};

// What transitions tell of a head's state before a segment, in fp32: of a sequence's first, where there are others, a
// copy of the initial state, whose memory may be the final state's; of the others R, what the segments of the group
// (groups_of) in front of it, up to it, leave of a zero state, and P, through which they hand on the state before the
// group,
//   S = S_before_the_group P + R
// Nobody stores that S. Behind a sequence's first group, which starts from the real state, R is S, and P is not stored.
struct SegmentState {
  float4 state[kHeadDim / 16][kHeadDim / 8][kWarp];  // [V, K] as accumulators: rows / 16, tile, lane
  Transition transition;

  // Sixteen value rows from `row` on.
  __device__ void load(StateRows& rows, int row, float factor, int lane) const {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      float4 const x = state[row / 16][j][lane];
      rows[j][0] = x.x * factor, rows[j][1] = x.y * factor, rows[j][2] = x.z * factor, rows[j][3] = x.w * factor;
    }
  }
  __device__ void store(StateRows const& rows, int row, float factor, int lane) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      state[row / 16][j][lane] = {rows[j][0] * factor, rows[j][1] * factor, rows[j][2] * factor, rows[j][3] * factor};
    }
  }
};

// The host reserves as much, aligned to 256 bytes.
static_assert(sizeof(SegmentState) == 2 * 64 * 1024 && alignof(SegmentState) <= 256);

template <class Base>
__device__ __forceinline__ SegmentState& state_before(Segmented<Base> const& p, int slot, int head) {
  return static_cast<SegmentState*>(p.segments.workspace)[int64_t(slot) * p.num_heads + head];
}

// Segments of a sequence go in groups of two: R and P after each are relative to the state before the group, so that
// the way to a segment's state goes from group to group. After the last segment of a sequence nobody needs them.
constexpr int kGroupSegments = 2;
__host__ __device__ constexpr int groups_of(int segments) { return segments / kGroupSegments; }

}  // namespace flash_kda
