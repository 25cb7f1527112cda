// The prepare role: a warp has a chunk's rows loaded and turns them into its factors.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/prepare.h"
#include "sm90/load.h"

namespace flash_kda::sm90 {

// Clears the rows that TMA brought from beyond the sequence's end, in every input: a NaN there must not meet a zero.
// Those of g repeat the last one before the end.
__device__ __forceinline__ void clear_rows(Stage& stage, int valid, int lane) {
  int const channel = kLaneChannels * lane;
  uint2 const zero = make_uint2(0, 0);
  uint2 const last = *reinterpret_cast<uint2 const*>(stage.rows.at(kGateRow + valid - 1, channel));
#pragma unroll 1
  for (int row = valid; row < kChunk; ++row) {
    *reinterpret_cast<uint2*>(stage.rows.at(kKeyRow + row, channel)) = zero;
    *reinterpret_cast<uint2*>(stage.rows.at(kQueryRow + row, channel)) = zero;
    *reinterpret_cast<uint2*>(stage.rows.at(kGateRow + row, channel)) = last;
    *reinterpret_cast<uint2*>(stage.v.at(row, channel)) = zero;
  }
  __syncwarp();
}

// Warp w of the prepare warps has every kPrepareWarps-th chunk of the CTA's list. While it works on one, it has its
// next one loaded: from half-way on, when the stage for it has most likely been worked off.
template <class Config>
__device__ __forceinline__ void prepare(FwdParams const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                        Schedule<Config> const& schedule, int warp, int lane) {
  Scratch& scratch = shared.scratch[warp];
  Walk<Config> walk(schedule, warp);
  RingPlace<Config> place(warp);
  LaneGate gate;
  bf16 const* logits;
  bf16 logit;
  int gate_round = -1;
  // The warp's next chunk. An item's first chunk also brings its state nearer.
  auto const start = [&] {
    if (place.use > 0) shared.empty[place.stage].wait((place.use - 1) % 2);
    load(maps, shared, walk.item, walk.token, place.stage);
    if (walk.token == 0) prefetch_state<Config>(p, walk.item, lane);
    if (walk.round != gate_round) {
      gate = LaneGate::of_head(p, walk.item.head, lane);
      logits = first_row<bf16 const>(p.beta, walk.item.sequence, walk.item.head);
      gate_round = walk.round;
    }
    logit = load_logit(logits, p.beta.token_stride, walk.token, walk.valid(), lane);
  };

  if (!walk.is_done) start();
#pragma unroll 1
  while (!walk.is_done) {
    int const stage_index = place.stage, valid = walk.valid();
    Stage& stage = shared.stage[stage_index];
    shared.loaded[stage_index].wait(place.use % 2);
    if (valid < kChunk) clear_rows(stage, valid, lane);
    make_factors(stage, scratch, gate, p.scale, logit, valid, lane);
    walk.advance(Config::kPrepareWarps);
    place.advance(Config::kPrepareWarps);
    if (!walk.is_done) start();
    make_matrices(stage, scratch, shared.key_norms[stage_index], lane);
    cutlass::arch::fence_view_async_shared();  // wgmma reads the factors, and TMA will overwrite them
    shared.full[stage_index].arrive();
  }
}

}  // namespace flash_kda::sm90
