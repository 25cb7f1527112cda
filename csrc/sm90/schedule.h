// Which CTA does what, and in which order. Every role knows from the start, so that nobody has to ask.
#pragma once

#include "common/segment.h"
#include "sm90/config.h"

namespace flash_kda::sm90 {

// A (sequence, head) pair, or a part of its value rows. Where sequences are cut, segments stand for sequences.
struct WorkItem {
  Sequence sequence;
  int sequence_index;
  int head;
  int first_row;  // of [V; P]: value rows, and from kHeadDim on those of P

  // Pairs run over heads, then sequences; `sequence_index` comes in any order.
  template <class Params>
  __device__ static WorkItem of(Params const& p, int sequence_index, int head, int first_row) {
    return {find_sequence(p, sequence_index), sequence_index, head, first_row};
  }

  __device__ bool has_values() const { return first_row < kHeadDim; }
  __device__ int length() const { return sequence.length; }
  __device__ int chunks() const { return (length() + kChunk - 1) / kChunk; }
};

// Sharing::kWhole: pairs run over heads, then over sequences from the longest to the shortest. A round gives every CTA
// one, the longest to the CTA with the fewest tokens so far, as far as rounds are planned; later ones go back and forth
// over the CTAs. Everyone plans for all.
template <class Params>
struct Schedule {
  Params const& p;
  Plan const& plan;

  __device__ int64_t items() const { return count_sequences(p) * p.num_heads; }

  // The CTA's item of a round, or false past its last.
  __device__ bool find(WorkItem& item, int round) const {
    int64_t const first = int64_t(round) * gridDim.x;
    if (first >= items()) return false;
    int const cta = round < kMostPlannedRounds ? plan.place[round]
                    : round % 2                ? int(gridDim.x) - 1 - int(blockIdx.x)
                                               : int(blockIdx.x);
    int64_t const index = first + cta;
    if (index >= items()) return false;
    int64_t const rank = index / p.num_heads;
    item = WorkItem::of(p, count_sequences(p) > kMostRanked ? rank : plan.order[rank], int(index % p.num_heads), 0);
    return true;
  }
};

// Fills the plan. By the whole block, which may read the plan on return.
template <class Config, class Params>
__device__ __forceinline__ void make_plan(Params const& p, Plan& plan) {
  static_assert(Config::kThreads >= kMostRanked && Config::kThreads >= kMostPlannedCtas);
  int const thread = threadIdx.x, ctas = int(gridDim.x);
  int64_t const sequences = count_sequences(p);
  bool const is_ranked = sequences <= kMostRanked;
  auto const chunks_of = [&](int64_t n) { return int((find_sequence(p, n).length + kChunk - 1) / kChunk); };

  bool const has_sequence = is_ranked && thread < sequences;
  // With an item a CTA at most there is nothing to plan.
  if (sequences * p.num_heads <= ctas) {
    if (has_sequence) plan.order[thread] = int16_t(thread);
    if (thread < kMostPlannedRounds) plan.place[thread] = int16_t(blockIdx.x);
    __syncthreads();
    return;
  }

  // Sequences by length, ties by index.
  int const mine = has_sequence ? chunks_of(thread) : 0;
  if (has_sequence) plan.chunks[thread] = mine;
  __syncthreads();
  if (has_sequence) {
    int rank = 0;
#pragma unroll 4
    for (int m = 0; m < sequences; ++m) {
      int const other = plan.chunks[m];
      rank += other > mine || (other == mine && m < thread);
    }
    plan.order[rank] = int16_t(thread);
    plan.length[rank] = mine;
  }
  __syncthreads();

  // Without an order, or among equals, places go by index.
  bool const is_planned = is_ranked && ctas <= kMostPlannedCtas && plan.length[0] != plan.length[sequences - 1];
  if (thread < kMostPlannedRounds) plan.place[thread] = int16_t(blockIdx.x);
  if (thread < kMostPlannedCtas) plan.chunks[thread] = thread < ctas ? 0 : 0x7fffffff;
  __syncthreads();
  if (!is_planned) return;

  // Thread c follows CTA c: its place in a round is its rank by chunks, ties by index.
  int64_t const items = sequences * p.num_heads;
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
      plan.chunks[thread] += plan.length[item / p.num_heads];
    }
    __syncthreads();
  }
}

// Sharing::kSegment: a segment and head.
template <class Params>
struct OneItem {
  Params const& p;

  __device__ int slot() const { return blockIdx.x / p.num_heads; }
  __device__ int head() const { return blockIdx.x % p.num_heads; }
  __device__ bool find(WorkItem& item, int round) const {
    if (round > 0) return false;
    item = WorkItem::of(p, slot(), head(), 0);
    return true;
  }
};

// The place of a chunk in the ring: its stage, and how often that was used before.
template <class Config>
struct RingPlace {
  int stage;
  uint32_t use;
  __device__ explicit RingPlace(int chunk) : stage(chunk % Config::kStages), use(chunk / Config::kStages) {}
  __device__ void advance(int chunks) {  // up to kStages
    stage += chunks;
    if (stage >= Config::kStages) stage -= Config::kStages, ++use;
  }
};

// What a prepare warp has to do, one job after the other. A job is a chunk to load and to turn into factors, and
// perhaps another one, prepared in another CTA, of which only V has to be loaded here. Every kind of jobs has
//   is_done              past the last job
//   item, token, place   the chunk: its item, its first token counted from the item's, and where it goes
//   loads()              how often TMA for such a chunk has filled this stage before
//   has_chunk()          false if there is no such chunk, but the other one
//   has_other(), other_token(), other_place()
//   gate_number          another number means another head or sequence
//   advance()

// Of a CTA that shares with no other: every kPrepareWarps-th chunk of its list.
template <class Config, class Schedule>
struct ListJobs {
  Schedule const& schedule;
  WorkItem item;
  RingPlace<Config> place;
  int token, gate_number = 0;
  bool is_done;

  __device__ ListJobs(Schedule const& schedule, int warp) : schedule(schedule), place(warp), token(warp * kChunk) {
    is_done = !schedule.find(item, 0);
    settle();
  }
  __device__ void advance() {
    token += Config::kPrepareWarps * kChunk;
    place.advance(Config::kPrepareWarps);
    settle();
  }
  __device__ uint32_t loads() const { return place.use; }
  __device__ bool has_chunk() const { return true; }
  __device__ bool has_other() const { return false; }
  __device__ int other_token() const { return 0; }
  __device__ RingPlace<Config> other_place() const { return place; }

 private:
  // Into the item that the chunk belongs to.
  __device__ void settle() {
    while (!is_done && token >= item.length()) {
      token -= item.chunks() * kChunk;
      is_done = !schedule.find(item, ++gate_number);
    }
  }
};

// In a cluster: of every two chunks this CTA's is prepared, and the other CTA's has its V loaded.
template <class Config>
struct SplitJobs {
  WorkItem const& item;
  int rank, first;  // the CTA's in the cluster; the first of the two chunks
  RingPlace<Config> place;
  int token;
  bool is_done;
  static constexpr int gate_number = 0;

  __device__ SplitJobs(WorkItem const& item, int rank, int warp) : item(item), rank(rank), first(2 * warp), place(0) {
    settle();
  }
  __device__ void advance() {
    first += 2 * Config::kPrepareWarps;
    settle();
  }
  // With an odd number of stages, every stage has a chunk of this CTA's at every other use; with an even one, half of
  // the stages have nothing else.
  __device__ uint32_t loads() const { return Config::kStages % 2 == 1 ? place.use / 2 : place.use; }
  __device__ bool has_chunk() const { return token < item.length(); }
  __device__ bool has_other() const { return other_token() < item.length(); }
  __device__ int other_token() const { return (first + 1 - rank) * kChunk; }
  __device__ RingPlace<Config> other_place() const { return RingPlace<Config>(first + 1 - rank); }

 private:
  __device__ void settle() {
    place = RingPlace<Config>(first + rank);
    token = (first + rank) * kChunk;
    is_done = first * kChunk >= item.length();
  }
};

}  // namespace flash_kda::sm90
