// Sizes, roles and shared memory of the SM90 kernel: persistent CTAs that walk one (sequence, head) pair after the
// other in chunks of 16 tokens.
#pragma once

#include "common/barrier.h"
#include "common/prepare.h"

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

// How (sequence, head) pairs are dealt out.
enum class Sharing {
  kWhole,  // a pair a CTA, and as many pairs, one after the other, as there are
  kSplit,  // a pair a cluster of two CTAs: 64 value rows each, and each prepares every other chunk for both
  // The transition of a group of segments a cluster of two CTAs, which share chunks likewise: R's value rows in one,
  // and in the other P's rows, which start from the identity and have no V.
  kStacked,
  kSegment  // a segment a CTA, which first finds the state before it
};

template <Sharing kSharing_>
struct Config {
  static constexpr Sharing kSharing = kSharing_;
  static constexpr bool kIsSplit = kSharing == Sharing::kSplit;
  static constexpr Pass kPass = kSharing == Sharing::kStacked ? Pass::kTransition : Pass::kForward;
  static constexpr int kClusterSize = kIsSplit || kPass == Pass::kTransition ? 2 : 1;
  static constexpr int kValueRows = kIsSplit ? 64 : kHeadDim;  // of a CTA, or P's rows

  // Warpgroups in this order: recurrence (64 value rows each), then prepare.
  static constexpr int kRecurrenceWarpgroups = kValueRows / 64;
  static constexpr int kRecurrenceWarps = 4 * kRecurrenceWarpgroups;
  static constexpr int kPrepareWarps = kIsSplit ? 4 : 8;
  static constexpr int kThreads = kWarp * (kRecurrenceWarps + kPrepareWarps);
  static constexpr int kStages = kIsSplit ? 13 : kSharing == Sharing::kStacked ? 16 : 12;
  // A barrier's parity tells one phase from the next, no more. Whoever waits for the stage of chunk c has waited for
  // that of the chunk it filled before, kClusterSize kPrepareWarps chunks earlier: that much less than kStages makes
  // sure that chunk c - 2 kStages was worked off.
  static_assert(kClusterSize * kPrepareWarps <= kStages);

  // The last stages hold transitions first.
  static constexpr int kScanStages = kSharing == Sharing::kSegment ? 5 : 0;
  __host__ __device__ static constexpr bool is_for_scan(int stage) { return stage >= kStages - kScanStages; }

  // Registers a thread, where roles trade them (not in kSplit): what the launch bounds give everyone, and what
  // setmaxnreg makes of it.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kRecurrenceRegisters = kSharing == Sharing::kSegment ? 160 : 152;
  static constexpr int kPrepareRegisters = kSharing == Sharing::kSegment ? 96 : 104;
  static constexpr bool kRegistersSuffice =
      kRecurrenceRegisters * kRecurrenceWarps + kPrepareRegisters * kPrepareWarps <=
      kLaunchRegisters * (kRecurrenceWarps + kPrepareWarps);

  // What TMA brings: k, q and g of a chunk, as many bytes each, and the panels of V that hold the CTA's value rows.
  static constexpr int kPanelBytes = kChunk * kPanel * int(sizeof(bf16));
  static constexpr int kRowsBytes = kPanelBytes * (kHeadDim / kPanel);
  static constexpr int kValueBytes = kPanelBytes * (kValueRows / kPanel);
};

// Sixteen tokens of a recurrence warp's sixteen value rows, on their way out.
struct alignas(128) OutTile {
  bf16 data[kChunk * 16];
  // 16-byte halves of a token's 32 bytes, swizzled so that eight tokens' halves touch every bank once.
  __device__ bf16* at(int token, int value) { return &data[token * 16 + (value ^ (token / 4 % 2 * 8))]; }
};

// What outputs need beside the ring.
template <class Config, Pass = Config::kPass>
struct ForwardStorage {
  KeyNorms key_norms[Config::kStages];
  OutTile out[Config::kRecurrenceWarps];
};
template <class Config>
struct ForwardStorage<Config, Pass::kTransition> {};

// A quarter of a transition: 32 of its rows, hi and then lo.
constexpr int kPieces = 4, kPieceRows = kHeadDim / kPieces;
struct alignas(128) Piece {
  bf16 hi[kPieceRows * kHeadDim], lo[kPieceRows * kHeadDim];
};

// How transitions come to the recurrence warps that find a segment's state (scan.h), one after the other, each piece to
// a place of its own in the ring's last stages, which nobody prepares a chunk in before `done`.
// - full: the arrival of the lane that starts the copies and announces their bytes, and the bytes.
// - empty: one arrival of each recurrence warp that is through with the piece. Whoever brings that of transition i
//   waits for that of i - 1, parity (i - 1) % 2.
// - done: one arrival of each recurrence warp that has its state; there is one phase.
struct ScanStorage {
  Barrier full[kPieces];
  Barrier empty[kPieces];
  Barrier done;
};

// What one way of sharing needs, and no other.
template <Sharing>
struct SharingStorage {};
template <>
struct SharingStorage<Sharing::kWhole> {
  Plan plan;
};
template <>
struct SharingStorage<Sharing::kSegment> {
  ScanStorage scan;
};

template <class Config>
struct SharedStorage {
  Stage<Config::kPass> stage[Config::kStages];
  Tile<kChunk, Config::kValueRows> v[Config::kStages];
  Scratch scratch[Config::kPrepareWarps];
  // Stage s, with its V and its key norms, goes round three owners, use after use; use number i is phase i of all three
  // barriers. A stage is "prepared here" if a warp of this CTA does it, else by another CTA of the cluster.
  // - loaded (of stages prepared here): one arrival, of a prepare warp's lane, which announces the bytes, and the bytes
  //   hand it from TMA to that prepare warp.
  // - full: 32 arrivals hand it to the recurrence warps. Prepared here, they are those of the prepare warp's lanes when
  //   it is done. Else they are those of the warp that starts TMA for V, one of which announces the bytes of V and of
  //   the factors, which the other CTA copies in. It may copy before they are announced: the phase cannot end then.
  // - empty: one arrival of each recurrence warp hands it back, here and in the CTA that prepared it; where pairs are
  //   split, in both CTAs. Whoever fills the stage for use i waits for use i - 1, parity (i - 1) % 2; for i = 0 it does
  //   not wait, or, for a stage that holds transitions first, for the scan's `done`. That a stage was worked off over
  //   there tells that the copy there was done, too.
  Barrier loaded[Config::kStages];
  Barrier full[Config::kStages];
  Barrier empty[Config::kStages];
  ForwardStorage<Config> forward;
  SharingStorage<Config::kSharing> own;

  // Where piece i of a transition goes.
  __device__ Piece& piece(int i) {
    constexpr int kFirst = Config::kStages - Config::kScanStages;
    static_assert(Config::kScanStages * sizeof(stage[0]) >= kPieces * sizeof(Piece));
    return reinterpret_cast<Piece*>(&stage[kFirst])[i];
  }
  // n of a stage's chunk: a transition needs it no longer than the warp that prepares it.
  __device__ KeyNorms& key_norms(int stage, int prepare_warp) {
    if constexpr (Config::kPass == Pass::kForward) {
      return forward.key_norms[stage];
    } else {
      return scratch[prepare_warp].key_norms;
    }
  }
};
static_assert(sizeof(SharedStorage<Config<Sharing::kWhole>>) <= 227 * 1024);
static_assert(sizeof(SharedStorage<Config<Sharing::kSplit>>) <= 227 * 1024);
static_assert(sizeof(SharedStorage<Config<Sharing::kStacked>>) <= 227 * 1024);
static_assert(sizeof(SharedStorage<Config<Sharing::kSegment>>) <= 227 * 1024);

}  // namespace flash_kda::sm90
