// What a group of segments does to the state before it: R, which it leaves of a zero state, and P, which hands the
// state on. Both come from the recurrence without outputs, in the WY form, on stacked rows: R's are value rows with the
// real v, P's start from the identity and have no v. A sequence's first group starts from the real state instead, so
// that its R is the state, and its P is of no use.
#pragma once

#include "sm90/recurrence.h"

namespace flash_kda::sm90 {

// The segments of a sequence whose states after them one cluster finds.
struct SegmentGroup {
  Segment first;
  int slot;    // of the first
  int count;   // of segments, of which none is the sequence's last; 0: there are fewer groups
  int tokens;  // of each

  __device__ bool starts_sequence() const { return first.index == 0; }
  __device__ Sequence sequence() const { return {first.tokens.batch, first.tokens.begin, count * tokens}; }
};

// Groups are numbered as slots are.
template <class Base>
__device__ __forceinline__ SegmentGroup find_group(Segmented<Base> const& p, int group) {
  int const tokens = segment_tokens(p);
  int slot = 0;
#pragma unroll 1
  for (int n = 0; n < p.num_sequences; ++n) {
    Sequence const sequence = find_sequence(static_cast<Base const&>(p), n);
    int const segments = count_segments(tokens, sequence), groups = groups_of(segments);
    if (group < groups) {
      int const index = group * kGroupSegments;
      return {segment_of(tokens, sequence, n, index), slot + index, min(kGroupSegments, segments - 1 - index), tokens};
    }
    slot += segments;
    group -= groups;
  }
  return {{}, 0, 0, 0};
}

// All chunks of a group, by a warpgroup. release(stage) is called by every lane that has read a stage.
template <class Config, class Params, class Release>
__device__ __forceinline__ void transit(Params const& p, SharedStorage<Config>& shared, WorkItem const& item,
                                        SegmentGroup const& group, int warp, int lane, Release const& release) {
  using namespace cute;
  TiledMMA contract = make_tiled_mma(SquareAtom{});  // 16 tokens; W's rows are K-major, as A's are
  TiledMMA update = make_tiled_mma(UpdateAtom{});

  bool const has_values = item.has_values(), has_transition = !group.starts_sequence();
  int const row = 16 * warp;
  Tensor state = make_tensor<float>(Accumulator<kHeadDim / 8>{});
  StateRows& state_rows = reinterpret_cast<StateRows&>(state(0));
  if (has_values && has_transition) {
    load_state(state_rows, {nullptr, true}, 1.f, lane);
  } else if (has_values) {
    auto const& base = static_cast<typename Params::Base const&>(p);
    load_state(state_rows, initial_state_of(base, group.first.sequence_index, item.head, row), kShiftDown, lane);
    state_before(p, group.slot, item.head).store(state_rows, row, kShiftUp, lane);
  } else {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      int const r = row + lane / 4 + 8 * (i / 2 % 2), channel = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      state(i) = r == channel ? kShiftDown : 0.f;
    }
  }

  Tensor u = make_tensor<float>(Accumulator<2>{});
  Tensor s_operand = make_tensor<bf16>(Operand<kHeadDim / 16>{});
  Tensor v_operand = make_tensor<bf16>(Operand<1>{}), u_operand = make_tensor<bf16>(Operand<1>{});
  uint32_t* const s_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(s_operand.data()));
  uint32_t* const u_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(u_operand.data()));
  uint32_t (&v)[4] = *reinterpret_cast<uint32_t (*)[4]>(raw_pointer_cast(v_operand.data()));

  // Without the CTA's rank in its cluster, which stands above the address.
  uint32_t const first_address = (cast_smem_ptr_to_uint(&shared.stage[0]) & 0x3ffff) / 16;
  BlockPlace const place = BlockPlace::of_b(lane);
  RingPlace<Config> ring(0);

#pragma unroll 1
  for (int segment = 0; segment < group.count; ++segment) {
    // Every segment of a group is whole: chunks have no tails.
#pragma unroll 1
    for (int left = group.tokens; left > 0; left -= kChunk, ring.advance(1)) {
      int const s = ring.stage;
      TransitionStage& stage = shared.stage[s];
      uint32_t const address = first_address + s * uint32_t(sizeof(TransitionStage) / 16);

#pragma unroll
      for (int i = 0; i < kHeadDim / 4; ++i) s_bits[i] = pack_bf16(state(2 * i), state(2 * i + 1));
      shared.full[s].wait(ring.use % 2);
      bool const decay_first = kIsUnbounded<Params> && stage.decay.comes_first();
      load_matrices_transposed(v, shared.v[s].at(place.row, row + place.column));
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = has_values ? v[i] : 0;  // nothing was loaded for P's rows

      // U = A V + W S'^T, A in two bf16 parts.
      warpgroup_fence_operand(u);
      warpgroup_arrive();
      contract.accumulate_ = GMMA::ScaleOut::Zero;
      gemm(contract, v_operand(_, _, 0), SquareKMajor::of(address, offsetof(TransitionStage, a_lo)), u);
      contract.accumulate_ = GMMA::ScaleOut::One;
      gemm(contract, v_operand(_, _, 0), SquareKMajor::of(address, offsetof(TransitionStage, a_hi)), u);
#pragma unroll
      for (int b = 0; b < kHeadDim / 16; ++b) {
        gemm(contract, s_operand(_, _, b),
             RowsKMajor::of(address,
                            tile_offset<TransitionStage::kRows>(TransitionStage::kKeyRow, 16 * b) * int(sizeof(bf16))),
             u);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(u);
#pragma unroll
      for (int i = 0; i < 4; ++i) u_bits[i] = pack_bf16(u(2 * i), u(2 * i + 1));

      if (decay_first) {
        Decays decay;  // not the one below, which would be kept from here on
        fetch_decay(decay, stage.decay, lane);
        apply_decay(state, decay, true);
      }
      warpgroup_fence_operand(state);
      warpgroup_arrive();
      update.accumulate_ = GMMA::ScaleOut::One;
      gemm(update, u_operand(_, _, 0),
           RowsMNMajor<TransitionStage::kRows>::of(
               address, tile_offset<TransitionStage::kRows>(TransitionStage::kGateRow, 0) * int(sizeof(bf16))),
           state);
      warpgroup_commit_batch();
      Decays decay;
      fetch_decay(decay, stage.decay, lane);
      warpgroup_wait<0>();
      warpgroup_fence_operand(state);
      if (!decay_first) apply_decay(state, decay, false);
      release(s);
    }

    SegmentState& after = state_before(p, group.slot + segment + 1, item.head);
    if (has_values) {
      after.store(state_rows, row, kShiftUp, lane);
    } else if (has_transition) {
      after.transition.store(state_rows, row, kShiftUp, lane);
    }
  }
}

}  // namespace flash_kda::sm90
