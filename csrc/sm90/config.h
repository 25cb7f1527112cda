// Sizes, roles and shared memory of the SM90 kernel: persistent CTAs that walk one (sequence, head) pair after the
// other in chunks of 16 tokens.
#pragma once

#include "common/barrier.h"
#include "common/stage.h"

namespace flash_kda::sm90 {

// Limits of the plan that CTAs make of their work (schedule.h). Beyond them sequences keep their order and rounds
// alternate: with so many items, the ends of the CTAs' lists lie close together anyway.
constexpr int kMostRanked = 128;
constexpr int kMostPlannedRounds = 12;
constexpr int kMostPlannedCtas = 192;
struct Plan {
  alignas(16) int chunks[kMostPlannedCtas];  // of each CTA, in the rounds planned so far
  int length[kMostRanked];                   // chunks of the sequences, the longest first
  int16_t order[kMostRanked];                // which sequences those are
  int16_t place[kMostPlannedRounds];         // this CTA's among the items of each round
};
static_assert(kMostPlannedCtas % 4 == 0);

// kValueRows: value rows of a pair that a CTA carries. 128 is a whole pair; 64 gives a pair to two CTAs, which prepare
// the same factors, where pairs are too few to fill the GPU.
template <int kValueRows_>
struct Config {
  static constexpr int kValueRows = kValueRows_;

  // Warpgroups in this order: recurrence (64 value rows each), then prepare. Chunk c is loaded and prepared by warp
  // c % kPrepareWarps in stage c % kStages.
  static constexpr int kRecurrenceWarpgroups = kValueRows / 64;
  static constexpr int kPrepareWarpgroups = 2;
  static constexpr int kRecurrenceWarps = 4 * kRecurrenceWarpgroups;
  static constexpr int kPrepareWarps = 4 * kPrepareWarpgroups;
  static constexpr int kThreads = 128 * (kRecurrenceWarpgroups + kPrepareWarpgroups);
  static constexpr int kStages = 12;
  static_assert(kPrepareWarps < kStages, "a warp starts loading its next chunk before it has finished this one");

  // Registers a thread: what the launch bounds give everyone, and what setmaxnreg makes of it.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kRecurrenceRegisters = kValueRows == 128 ? 152 : 216;
  static constexpr int kPrepareRegisters = kValueRows == 128 ? 104 : 144;
  static_assert(kRecurrenceRegisters * kRecurrenceWarpgroups + kPrepareRegisters * kPrepareWarpgroups <=
                    kLaunchRegisters * (kRecurrenceWarpgroups + kPrepareWarpgroups),
                "setmaxnreg would wait for ever");

  // Where the recurrence fetches the decay: before it solves for U, or when U is there. Early hides the latency, late
  // needs fewer registers and leaves shared memory to others; measured, the sooner is better where one warpgroup is
  // alone.
  static constexpr bool kDecayEarly = kValueRows == 64;

  // What TMA brings a stage: k, q and g, and the panels of V that hold the CTA's value rows.
  static constexpr int kPanelBytes = kChunk * kPanel * int(sizeof(bf16));
  static constexpr int kStageBytes = kPanelBytes * (3 * 2 + kValueRows / kPanel);
};
static_assert(Config<64>::kValueRows % kPanel == 0);

// Sixteen tokens of a recurrence warp's sixteen value rows, on their way out.
struct alignas(128) OutTile {
  bf16 data[kChunk * 16];
  // 16-byte halves of a token's 32 bytes, swizzled so that eight tokens' halves touch every bank once.
  __device__ bf16* at(int token, int value) { return &data[token * 16 + (value ^ (token / 4 % 2 * 8))]; }
};

template <class Config>
struct SharedStorage {
  Stage stage[Config::kStages];
  KeyNorms key_norms[Config::kStages];
  Scratch scratch[Config::kPrepareWarps];
  OutTile out[Config::kRecurrenceWarps];
  // Stage s, and what belongs to it, goes round three owners, use after use; use number i is phase i of all three
  // barriers.
  // - loaded: one arrival (of a prepare warp's lane, which announces the bytes) and the bytes hand it from TMA to that
  //   prepare warp.
  // - full: the prepare warp's 32 lanes hand it to the recurrence warps.
  // - empty: one arrival of each recurrence warp hands it back to the prepare warp of use i, which waits for use i - 1,
  //   parity (i - 1) % 2, before it starts TMA; for i = 0 it does not wait.
  Barrier loaded[Config::kStages];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
  Plan plan;
};
static_assert(sizeof(SharedStorage<Config<128>>) <= 227 * 1024);
static_assert(sizeof(SharedStorage<Config<64>>) <= 227 * 1024);

}  // namespace flash_kda::sm90
