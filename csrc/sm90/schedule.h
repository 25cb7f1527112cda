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

// Work items run over parts of the value rows, then heads, then sequences from the longest to the shortest. A round
// gives every CTA one item, the longest to the CTA with the fewest tokens so far, as far as rounds are planned; later
// ones go back and forth over the CTAs. Everyone plans for all, so that nobody has to ask.
template <class Config, class Params>
struct Schedule {
  static constexpr int kParts = kHeadDim / Config::kValueRows;

  Params const& p;
  Plan const& plan;

  __device__ int64_t items() const { return p.num_sequences * p.num_heads * kParts; }
  __device__ int64_t sequence_of(int64_t item) const {
    int64_t const rank = item / kParts / p.num_heads;
    return p.num_sequences > kMostRanked ? rank : plan.order[rank];
  }

  // The CTA's item of a round, or false past its last.
  __device__ bool find(WorkItem& item, int round) const {
    int64_t const first = int64_t(round) * gridDim.x;
    if (first >= items()) return false;
    int const cta = round < kMostPlannedRounds ? plan.place[round]
                    : round % 2                ? int(gridDim.x) - 1 - int(blockIdx.x)
                                               : int(blockIdx.x);
    int64_t const index = first + cta;
    if (index >= items()) return false;
    item.first_value = int(index % kParts) * Config::kValueRows;
    item.head = int(index / kParts % p.num_heads);
    item.sequence_index = sequence_of(index);
    item.sequence = find_sequence(p, item.sequence_index);
    return true;
  }
};

// Fills the plan. By the whole block, which may read the plan on return.
template <class Config, class Params>
__device__ __forceinline__ void make_plan(Params const& p, Plan& plan) {
  static_assert(Config::kThreads >= kMostRanked && Config::kThreads >= kMostPlannedCtas);
  int const thread = threadIdx.x, ctas = int(gridDim.x);
  bool const is_ranked = p.num_sequences <= kMostRanked;
  auto const chunks_of = [&](int64_t n) { return int((find_sequence(p, n).length + kChunk - 1) / kChunk); };

  // Sequences by length, ties by index.
  bool const has_sequence = is_ranked && thread < p.num_sequences;
  int const mine = has_sequence ? chunks_of(thread) : 0;
  if (has_sequence) plan.chunks[thread] = mine;
  __syncthreads();
  if (has_sequence) {
    int rank = 0;
#pragma unroll 4
    for (int m = 0; m < p.num_sequences; ++m) {
      int const other = plan.chunks[m];
      rank += other > mine || (other == mine && m < thread);
    }
    plan.order[rank] = int16_t(thread);
    plan.length[rank] = mine;
  }
  __syncthreads();

  // Without an order, or among equals, places go by index.
  bool const is_planned = is_ranked && ctas <= kMostPlannedCtas && plan.length[0] != plan.length[p.num_sequences - 1];
  if (thread < kMostPlannedRounds) plan.place[thread] = int16_t(blockIdx.x);
  if (thread < kMostPlannedCtas) plan.chunks[thread] = thread < ctas ? 0 : 0x7fffffff;
  __syncthreads();
  if (!is_planned) return;

  // Thread c follows CTA c: its place in a round is its rank by chunks, ties by index.
  int64_t const items = p.num_sequences * p.num_heads * Schedule<Config, Params>::kParts;
  int const rounds = int(min((items + ctas - 1) / ctas, int64_t(kMostPlannedRounds)));
  for (int round = 0; round < rounds; ++round) {
    int place = 0;
    if (thread < ctas) {
      int const own = plan.chunks[thread];
#pragma unroll 4
      for (int c = 0; c < kMostPlannedCtas; c += 4) {
        int4 const x = *reinterpret_cast<int4 const*>(&plan.chunks[c]);
        place += x.x < own || (x.x == own && c < thread);
        place += x.y < own || (x.y == own && c + 1 < thread);
        place += x.z < own || (x.z == own && c + 2 < thread);
        place += x.w < own || (x.w == own && c + 3 < thread);
      }
      if (thread == int(blockIdx.x)) plan.place[round] = int16_t(place);
    }
    __syncthreads();  // every thread has read the chunks
    int64_t const item = int64_t(round) * ctas + place;
    if (thread < ctas && item < items) {
      plan.chunks[thread] += plan.length[item / Schedule<Config, Params>::kParts / p.num_heads];
    }
    __syncthreads();
  }
}

// The place of a chunk in the ring, from its number in the CTA's whole list.
template <class Config>
struct RingPlace {
  uint32_t stage, use;
  __device__ explicit RingPlace(uint32_t chunk) : stage(chunk % Config::kStages), use(chunk / Config::kStages) {}
};

}  // namespace flash_kda::sm90
