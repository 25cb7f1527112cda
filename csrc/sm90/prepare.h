// The prepare role: a warp turns a loaded chunk into its factors.
#pragma once

#include "common/general.h"
#include "sm90/schedule.h"

namespace flash_kda::sm90 {

// Clears the rows that TMA brought from beyond the sequence's end, in every input: a NaN there must not meet a zero.
__device__ __forceinline__ void clear_rows(Stage& stage, int valid, int lane) {
  for (int row = valid; row < kChunk; ++row) {
    int const channel = kLaneChannels * lane;
    uint2 const zero = make_uint2(0, 0);
    *reinterpret_cast<uint2*>(stage.kq.at(row, channel)) = zero;
    *reinterpret_cast<uint2*>(stage.kq.at(kChunk + row, channel)) = zero;
    *reinterpret_cast<uint2*>(stage.g.at(row, channel)) = zero;
    *reinterpret_cast<uint2*>(stage.v.at(row, channel)) = zero;
  }
  __syncwarp();
}

// A warp's share of an item's chunks: those whose number in the CTA's list is `warp` modulo the number of prepare
// warps.
template <class Config, class Params>
__device__ __forceinline__ void prepare(Params const& p, SharedStorage<Config>& shared, WorkItem const& item,
                                        uint32_t first_chunk, int warp, int lane) {
  Scratch& scratch = shared.scratch[warp];
  auto const gate = Forms<Params>::Gate::of(p, item.sequence, item.head, lane);
  auto const beta = Forms<Params>::Beta::of(p, item.sequence, item.head);

  int const length = item.length();
  uint32_t const mine = (warp + Config::kPrepareWarps - first_chunk % Config::kPrepareWarps) % Config::kPrepareWarps;
  uint32_t chunk = first_chunk + mine;
#pragma unroll 1
  for (int token = mine * kChunk; token < length; token += Config::kPrepareWarps * kChunk) {
    RingPlace<Config> const place(chunk);
    Stage& stage = shared.stage[place.stage];
    int const valid = min(length - token, kChunk);
    auto const logit = beta.load(p, token, valid, lane);
    gate.prefetch(p, token + Config::kPrepareWarps * kChunk, length);

    shared.loaded[place.stage].wait(place.use % 2);
    if (valid < kChunk) clear_rows(stage, valid, lane);
    prepare_chunk(p, stage, scratch, gate, beta, logit, item.sequence_index, item.head, token, valid, lane);
    cutlass::arch::fence_view_async_shared();  // wgmma reads the factors, and TMA will overwrite them
    shared.full[place.stage].arrive();
    chunk += Config::kPrepareWarps;
  }
}

}  // namespace flash_kda::sm90
