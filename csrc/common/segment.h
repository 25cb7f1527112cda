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

// The segments of a sequence.
__device__ __forceinline__ int count_segments(Segments const& s, Sequence const& sequence) {
  return max(1, (sequence.length + s.tokens - 1) / s.tokens);
}

__device__ __forceinline__ Segment segment_of(Segments const& s, Sequence const& sequence, int sequence_index,
                                              int index) {
  int const offset = index * s.tokens;
  return {{sequence.batch, sequence.begin + offset, min(s.tokens, sequence.length - offset)},
          sequence,
          sequence_index,
          index,
          count_segments(s, sequence)};
}

// How many places sequences take before the next one's: places are segments, or what `count` makes of a sequence.
template <class Base, class Count>
__device__ __forceinline__ bool find_place(Segmented<Base> const& p, int& place, int& sequence_index,
                                           Sequence& sequence, Count const& count) {
  Base const& base = p;
#pragma unroll 1
  for (sequence_index = 0; sequence_index < p.num_sequences; ++sequence_index) {
    sequence = find_sequence(base, sequence_index);
    int const places = count(sequence);
    if (place < places) return true;
    place -= places;
  }
  return false;
}

// The segment in a slot; an empty one past the last.
template <class Base>
__device__ __forceinline__ Segment find_segment(Segmented<Base> const& p, int slot) {
  int index = slot, n;
  Sequence sequence;
  auto const count = [&](Sequence const& s) { return count_segments(p.segments, s); };
  if (find_place(p, index, n, sequence, count)) return segment_of(p.segments, sequence, n, index);
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
        uint32_t const high = pack_bf16(x, y);
        float2 const kept = unpack_bf16(high);
        *reinterpret_cast<uint32_t*>(&hi[at]) = high;
        *reinterpret_cast<uint32_t*>(&lo[at]) = pack_bf16(x - kept.x, y - kept.y);
      }
    }
  }
};

// What is known of a head's state after a segment, in fp32: first R, what the segments of its group (sm90/config.h) up
// to it leave of a zero state, and then the state itself; and P, through which they hand on the state before the group,
//   S_after = S_before P + R
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
__device__ __forceinline__ SegmentState& state_after(Segmented<Base> const& p, int slot, int head) {
  return static_cast<SegmentState*>(p.segments.workspace)[int64_t(slot) * p.num_heads + head];
}

}  // namespace flash_kda
