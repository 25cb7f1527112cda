// The scan over a sequence's segments: a CTA makes the state before its own from the transitions in front of it,
//   S = S_before_the_group P + R
// from group to group, and a last step into its group if the segment is that one's second. Every CTA goes all the way
// for itself, while the first chunks are prepared: nobody waits for another one's result.
// Value rows do not mix: a warpgroup carries 64 of them, S as the register operand of wgmma. S and P both go as two
// bf16 parts, their sum is fp32: what is left out, the product of the low parts and what two parts cannot hold, is
// below 2^-15 of the product.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/state_io.h"
#include "sm90/schedule.h"
#include "sm90/wgmma.h"

namespace flash_kda::sm90 {

// The way to the state before a segment: from a slot whose state is there as it is, through the transitions of others,
// to the segment's own.
struct ScanPath {
  int slot;  // so far
  int last;

  template <class Params>
  __device__ static ScanPath of(Params const& p, int slot) {
    int const index = find_segment(p, slot).index;
    // The first group started from the real state, so that R of its two segments is the state after them.
    return {index <= kGroupSegments ? slot : slot - index + kGroupSegments, slot};
  }
  __device__ bool is_done() const { return slot == last; }
  // Past a group, and in the end perhaps past a group's first segment.
  __device__ int advance() { return slot = min(slot + kGroupSegments, last); }
};
static_assert(kGroupSegments == 2);

// Blocks of eight rows follow each other, and those of eight channels within.
constexpr int kBlockBytes = Transition::kBlock * int(sizeof(bf16));
using TransitionMNMajor = Descriptor<leading(kHeadDim / 8 * kBlockBytes), kBlockBytes / 16>;

__device__ __forceinline__ void init_barriers(ScanStorage& scan, int recurrence_warps) {
  for (int i = 0; i < kPieces; ++i) scan.full[i].init(1), scan.empty[i].init(recurrence_warps);
  scan.done.init(recurrence_warps);
}

// Copies the transitions of a segment's path, piece by piece. By a whole warp, so that everything is uniform; one lane
// acts.
template <class Config, class Params>
__device__ __forceinline__ void load_transitions(Params const& p, SharedStorage<Config>& shared, int slot, int head) {
  ScanPath path = ScanPath::of(p, slot);
  if (path.is_done()) return;
  cudaGridDependencySynchronize();  // the transitions are there
  ScanStorage& scan = shared.own.scan;
#pragma unroll 1
  for (int step = 0; !path.is_done(); ++step) {
    Transition const& transition = state_before(p, path.advance(), head).transition;
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      if (step > 0) scan.empty[i].wait((step - 1) % 2);
      if (!cute::elect_one_sync()) continue;
      Barrier& full = scan.full[i];
      Piece& piece = shared.piece(i);
      full.arrive_and_expect_bytes(sizeof(Piece));
      auto const copy = [&](bf16 const* from, bf16* to) {
        cute::SM90_BULK_COPY_G2S::copy(from + i * kPieceRows * kHeadDim, reinterpret_cast<uint64_t*>(&full), to,
                                       sizeof(Piece) / 2);
      };
      copy(transition.hi, piece.hi);
      copy(transition.lo, piece.lo);
    }
  }
}

// A state as the register operand, in two parts.
struct StateOperand {
  using Tensor = decltype(cute::make_tensor<bf16>(Operand<kHeadDim / 16>{}));
  Tensor hi, lo;

  __device__ void set(StateRows const& state) {
    uint32_t* const hi_bits = reinterpret_cast<uint32_t*>(cute::raw_pointer_cast(hi.data()));
    uint32_t* const lo_bits = reinterpret_cast<uint32_t*>(cute::raw_pointer_cast(lo.data()));
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      PairParts const parts = PairParts::of(state[i / 2][i % 2 * 2], state[i / 2][i % 2 * 2 + 1]);
      hi_bits[i] = parts.hi, lo_bits[i] = parts.lo;
    }
  }
};

// The state before a segment, 2^-c of it, in a warpgroup's accumulators; `row` is the first of the warp's sixteen.
template <class Config, class Params, class State>
__device__ __forceinline__ void scan(Params const& p, SharedStorage<Config>& shared, State& state, WorkItem const& item,
                                     int row, int lane) {
  using namespace cute;
  ScanStorage& scan = shared.own.scan;
  StateRows& rows = reinterpret_cast<StateRows&>(state(0));
  ScanPath path = ScanPath::of(p, item.sequence_index);
  cudaGridDependencySynchronize();  // R is there
  if (path.is_done()) {
    load_initial_state(rows, p, item.sequence_index, item.head, row, item.length() == 0 ? 1.f : kShiftDown, lane);
  } else {
    TiledMMA product = make_tiled_mma(UpdateAtom{});
    product.accumulate_ = GMMA::ScaleOut::One;
    StateOperand operand;
    state_before(p, path.slot, item.head).load(rows, row, 1.f, lane);
#pragma unroll 1
    for (int step = 0; !path.is_done(); ++step) {
      operand.set(rows);
      state_before(p, path.advance(), item.head).load(rows, row, 1.f, opaque(lane));  // R
      warpgroup_fence_operand(state);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        scan.full[i].wait(step % 2);
        warpgroup_arrive();
        uint32_t const address = (cast_smem_ptr_to_uint(&shared.piece(i)) & 0x3ffff) / 16;
#pragma unroll
        for (int b = 0; b < kPieceRows / 16; ++b) {
          int const block = i * (kPieceRows / 16) + b, offset = 2 * b * (kHeadDim / 8) * kBlockBytes;
          auto const hi = TransitionMNMajor::of(address, offset);
          auto const lo = TransitionMNMajor::of(address, offset + int(offsetof(Piece, lo)));
          gemm(product, operand.lo(_, _, block), hi, state);
          gemm(product, operand.hi(_, _, block), lo, state);
          gemm(product, operand.hi(_, _, block), hi, state);
        }
        warpgroup_commit_batch();
        if (i > 0) {
          warpgroup_wait<1>();
          if (elect_one_sync()) scan.empty[i - 1].arrive();
        }
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(state);
      if (elect_one_sync()) scan.empty[kPieces - 1].arrive();
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) state(i) *= kShiftDown;
  }
  if (lane == 0) scan.done.arrive();
}

}  // namespace flash_kda::sm90
