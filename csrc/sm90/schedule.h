// Which CTA does what: every CTA walks a list of work items that it knows from the start, and all its roles walk the
// same.
#pragma once

#include "common/sequence.h"
#include "sm90/config.h"

namespace flash_kda::sm90 {

// A part of a (sequence, head) pair's value rows.
struct WorkItem {
  Sequence sequence;
  int64_t sequence_index;
  int head;
  int first_value;

  __device__ int length() const { return int(sequence.length); }
  __device__ int chunks() const { return (length() + kChunk - 1) / kChunk; }
};

// Orders the sequences by length, ties by index. To be called by the whole block, which synchronises before it reads
// `order`.
template <class Config>
__device__ __forceinline__ void order_sequences(FwdParams const& p, SharedStorage<Config>& shared) {
  static_assert(Config::kThreads >= kMostRanked);
  int const n = threadIdx.x;
  if (p.num_sequences > kMostRanked || n >= p.num_sequences) return;
  int64_t const length = find_sequence(p, n).length;
  int rank = 0;
  for (int m = 0; m < p.num_sequences; ++m) {
    int64_t const other = find_sequence(p, m).length;
    rank += other > length || (other == length && m < n);
  }
  shared.order[rank] = int16_t(n);
}

// The CTA's item of a round, or false past the last. Items run over parts, then heads, then sequences from the longest
// to the shortest; rounds go back and forth over the CTAs, so that who got a long one gets a short one next.
template <class Config>
__device__ __forceinline__ bool item_of_round(WorkItem& item, FwdParams const& p, SharedStorage<Config> const& shared,
                                              int round) {
  constexpr int kParts = kHeadDim / Config::kValueRows;
  int const cta = round % 2 ? int(gridDim.x) - 1 - int(blockIdx.x) : int(blockIdx.x);
  int64_t const index = int64_t(round) * gridDim.x + cta;
  if (index >= p.num_sequences * p.num_heads * kParts) return false;
  int const rank = int(index / kParts / p.num_heads);
  item.first_value = int(index % kParts) * Config::kValueRows;
  item.head = int(index / kParts % p.num_heads);
  item.sequence_index = p.num_sequences > kMostRanked ? rank : shared.order[rank];
  item.sequence = find_sequence(p, item.sequence_index);
  return true;
}

// The place of a chunk in the ring, from its number in the CTA's whole list.
template <class Config>
struct RingPlace {
  uint32_t stage, use;
  __device__ explicit RingPlace(uint32_t chunk) : stage(chunk % Config::kStages), use(chunk / Config::kStages) {}
};

}  // namespace flash_kda::sm90
