// The load role: one lane keeps TMA ahead of everyone else.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/state_io.h"
#include "sm90/schedule.h"
#include "sm90/tensor_maps.h"

namespace flash_kda::sm90 {

__device__ __forceinline__ void copy_panel(CUtensorMap const& map, Barrier& barrier, bf16* to, int channel, int head,
                                           int token, int batch) {
  cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                               static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, channel, head, token,
                               batch);
}

// All chunks of an item, by one lane. `chunk` counts the chunks of the CTA's list.
template <class Config, class Params>
__device__ __forceinline__ void load(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                     WorkItem const& item, uint32_t& chunk) {
  int const query_head = key_head(p, item.head);
  int const bytes = Config::kStageBytes - (g_is_staged(p) ? 0 : 2 * Config::kPanelBytes);
  int const batch = int(item.sequence.batch), begin = int(item.sequence.begin), length = item.length();
#pragma unroll 1
  for (int token = 0; token < length; token += kChunk, ++chunk) {
    RingPlace<Config> const place(chunk);
    Stage& stage = shared.stage[place.stage];
    Barrier& loaded = shared.loaded[place.stage];
    if (place.use > 0) shared.empty[place.stage].wait((place.use - 1) % 2);
    loaded.arrive_and_expect_bytes(bytes);
    // A box that reaches past the sequence brings rows of the next one, or zeros past the tensor: prepare clears them.
#pragma unroll
    for (int c = 0; c < kHeadDim; c += kPanel) {
      copy_panel(maps.k, loaded, stage.kq.at(0, c), c, query_head, begin + token, batch);
      copy_panel(maps.q, loaded, stage.kq.at(kChunk, c), c, query_head, begin + token, batch);
      if (g_is_staged(p)) copy_panel(maps.g, loaded, stage.g.at(0, c), c, item.head, begin + token, batch);
    }
#pragma unroll
    for (int c = 0; c < Config::kValueRows; c += kPanel) {
      copy_panel(maps.v, loaded, stage.v.at(0, c), item.first_value + c, item.head, begin + token, batch);
    }
  }
}

// Brings an item's initial state into L2, before the recurrence asks for it. By a whole warp.
template <class Config, class Params>
__device__ __forceinline__ void prefetch_state(Params const& p, WorkItem const& item, int lane) {
  if (p.initial_state == nullptr) return;
  int const element_bytes = p.state_is_fp32 ? 4 : 2;
  int64_t const row = state_row(p, item.sequence_index);
  if (row < 0) return;
  char const* const first = static_cast<char const*>(p.initial_state) +
                            (row * initial_pitch(p) + offset_in_row(item.head, item.first_value)) * element_bytes;
  constexpr int kLine = 128;
  int const bytes = Config::kValueRows * kHeadDim * element_bytes;
#pragma unroll 1
  for (int i = lane * kLine; i < bytes; i += kWarp * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + i));
  }
}

}  // namespace flash_kda::sm90
