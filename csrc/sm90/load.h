// TMA: a chunk's rows on their way into a stage.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/state_io.h"
#include "sm90/cluster.h"
#include "sm90/schedule.h"
#include "sm90/tensor_maps.h"

namespace flash_kda::sm90 {

__device__ __forceinline__ void copy_panel(CUtensorMap const& map, Barrier& barrier, bf16* to, int channel, int head,
                                           int token, int batch) {
  cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                               static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, channel, head, token,
                               batch);
}

// Brings the maps nearer, which the first copies would wait for. By one thread.
__device__ __forceinline__ void prefetch_maps(TensorMaps const& maps) {
  for (CUtensorMap const* map : {&maps.k, &maps.g, &maps.q, &maps.v}) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
  }
}

// Starts the copies of V. By one lane.
template <class Config>
__device__ __forceinline__ void load_values(TensorMaps const& maps, SharedStorage<Config>& shared, Barrier& barrier,
                                            WorkItem const& item, int token, int stage) {
  int const batch = item.sequence.batch, first = item.sequence.begin + token;
#pragma unroll
  for (int c = 0; c < Config::kValueRows; c += kPanel) {
    copy_panel(maps.v, barrier, shared.v[stage].at(0, c), item.first_row + c, item.head, first, batch);
  }
}

// Fills a stage, which has to be empty, with the chunk at `token` of an item. By a whole warp, so that everything is
// uniform; one lane acts.
template <class Config, class Params>
__device__ __forceinline__ void load(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                     WorkItem const& item, int token, int stage_index) {
  if (!cute::elect_one_sync()) return;
  constexpr bool kWithQuery = Config::kPass == Pass::kForward;
  int const batch = item.sequence.batch, first = item.sequence.begin + token;
  auto& stage = shared.stage[stage_index];
  Barrier& loaded = shared.loaded[stage_index];
  int const query_head = key_head(p, item.head);
  bool const has_g = g_is_staged(p), has_values = item.has_values();
  loaded.arrive_and_expect_bytes(Config::kRowsBytes * (1 + kWithQuery + has_g) + has_values * Config::kValueBytes);
  // A box that reaches past the sequence brings rows of the next one, or zeros past the tensor: prepare clears those of
  // k, q and g, and the recurrence leaves out those of V.
#pragma unroll
  for (int c = 0; c < kHeadDim; c += kPanel) {
    copy_panel(maps.k, loaded, stage.rows.at(stage.kKeyRow, c), c, query_head, first, batch);
    if constexpr (kWithQuery)
      copy_panel(maps.q, loaded, stage.rows.at(stage.kQueryRow, c), c, query_head, first, batch);
    if (has_g) copy_panel(maps.g, loaded, stage.rows.at(stage.kGateRow, c), c, item.head, first, batch);
  }
  if (has_values) load_values(maps, shared, loaded, item, token, stage_index);
}

// Announces a stage whose factors another CTA prepares, and loads its V. By a whole warp.
template <class Config>
__device__ __forceinline__ void load_values_only(TensorMaps const& maps, SharedStorage<Config>& shared,
                                                 WorkItem const& item, int token, int stage) {
  Barrier& full = shared.full[stage];
  if (cute::elect_one_sync()) {
    bool const has_values = item.has_values();
    full.arrive_and_expect_bytes(has_values * Config::kValueBytes + kSharedBytes<Config::kPass>);
    if (has_values) load_values(maps, shared, full, item, token, stage);
  } else {
    full.arrive();
  }
}

// Brings an item's initial state into L2, before the recurrence asks for it; a segment's mostly is there. By a whole
// warp.
template <class Config, class Params>
__device__ __forceinline__ void prefetch_state(Params const& p, WorkItem const& item, int lane) {
  if constexpr (!kIsSegmented<Params>) {
    StateAddress const state = initial_state_of(p, item.sequence_index, item.head, item.first_row);
    if (state.rows == nullptr) return;
    constexpr int kLine = 128;
    int const bytes = Config::kValueRows * kHeadDim * int(state.is_fp32 ? sizeof(float) : sizeof(bf16));
#pragma unroll 1
    for (int i = lane * kLine; i < bytes; i += kWarp * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<char const*>(state.rows) + i));
    }
  }
}

}  // namespace flash_kda::sm90
