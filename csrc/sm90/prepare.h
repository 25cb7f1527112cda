// The prepare role: a warp has a chunk's rows loaded and turns them into its factors.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/general.h"
#include "sm90/load.h"

namespace flash_kda::sm90 {

// Clears the rows that TMA brought from beyond the sequence's end: a NaN there must not meet a zero. Those of g repeat
// the last one before the end.
template <Pass kPass>
__device__ __forceinline__ void clear_rows(Stage<kPass>& stage, int valid, int lane) {
  int const channel = kLaneChannels * lane;
  uint2 const zero = make_uint2(0, 0);
  uint2 const last = *reinterpret_cast<uint2 const*>(stage.rows.at(stage.kGateRow + valid - 1, channel));
#pragma unroll 1
  for (int row = valid; row < kChunk; ++row) {
    *reinterpret_cast<uint2*>(stage.rows.at(stage.kKeyRow + row, channel)) = zero;
    if constexpr (kPass == Pass::kForward) {
      *reinterpret_cast<uint2*>(stage.rows.at(stage.kQueryRow + row, channel)) = zero;
    }
    *reinterpret_cast<uint2*>(stage.rows.at(stage.kGateRow + row, channel)) = last;
  }
  __syncwarp();
}

// While a warp works on a chunk it has its next one loaded: from half-way on if the stage for it is free by then, else
// when it is through with this one. (Where a warp has the same stage for all its chunks, as in kStacked, always then:
// the other warps' chunks hide the load.) hand_over(stage) is called when a stage's factors are there, and visible to
// the async proxy.
template <class Config, class Params, class Jobs, class HandOver>
__device__ __forceinline__ void prepare(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                        Jobs jobs, int warp, int lane, HandOver const& hand_over) {
  Scratch& scratch = shared.scratch[warp];
  typename Forms<Params>::Gate gate;
  typename Forms<Params>::Beta beta;
  typename Forms<Params>::Beta::Logit logit;
  int gate_number = -1;
  auto const is_free = [&](RingPlace<Config> const& place) {
    if constexpr (Config::kScanStages > 0) {
      if (place.use == 0 && Config::is_for_scan(place.stage)) return shared.own.scan.done.is_complete(0);
    }
    return place.use == 0 || shared.empty[place.stage].is_complete((place.use - 1) % 2);
  };
  auto const wait_until_free = [&](RingPlace<Config> const& place) {
    if constexpr (Config::kScanStages > 0) {
      if (place.use == 0 && Config::is_for_scan(place.stage)) shared.own.scan.done.wait(0);
    }
    if (place.use > 0) shared.empty[place.stage].wait((place.use - 1) % 2);
  };
  auto const can_start = [&] {
    return (!jobs.has_chunk() || is_free(jobs.place)) && (!jobs.has_other() || is_free(jobs.other_place()));
  };
  auto const valid_rows = [&] { return min(jobs.item.length() - jobs.token, kChunk); };
  auto const start = [&] {
    if (jobs.has_other()) {
      RingPlace<Config> const other = jobs.other_place();
      wait_until_free(other);
      load_values_only(maps, shared, jobs.item, jobs.other_token(), other.stage);
    }
    if (jobs.has_chunk()) {
      wait_until_free(jobs.place);
      load(p, maps, shared, jobs.item, jobs.token, jobs.place.stage);
      // An item's first chunk also brings its state nearer.
      if (jobs.token == 0) prefetch_state<Config>(p, jobs.item, lane);
      if (jobs.gate_number != gate_number) {
        gate = Forms<Params>::Gate::of(p, jobs.item.sequence, jobs.item.head, lane);
        beta = Forms<Params>::Beta::of(p, jobs.item.sequence, jobs.item.head);
        gate_number = jobs.gate_number;
      }
      gate.prefetch(p, jobs.token, jobs.item.length());
      logit = beta.load(p, jobs.token, valid_rows(), lane);
    }
  };

  if (!jobs.is_done) start();
#pragma unroll 1
  while (!jobs.is_done) {
    bool const has_chunk = jobs.has_chunk();
    int const s = jobs.place.stage;
    ChunkOrigin const origin = {jobs.item.sequence_index, jobs.item.head, jobs.token, valid_rows()};
    auto& stage = shared.stage[s];
    if (has_chunk) {
      shared.loaded[s].wait(jobs.loads() % 2);
      if (origin.valid < kChunk) clear_rows(stage, origin.valid, lane);
      make_factors(p, stage, scratch, gate, beta, logit, origin.head, origin.token, origin.valid, lane);
    }
    jobs.advance();
    bool const is_early = !jobs.is_done && can_start();
    if (is_early) start();
    if (has_chunk) {
      make_matrices(p, stage, scratch, shared.key_norms(s, warp), origin, lane);
      cutlass::arch::fence_view_async_shared();  // wgmma or a copy reads the factors, and TMA will overwrite them
      hand_over(s);
    }
    if (!jobs.is_done && !is_early) start();
  }
}

}  // namespace flash_kda::sm90
