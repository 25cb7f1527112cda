// Sizes, roles and shared memory of the portable kernel: one CTA walks one (sequence, head) pair in chunks of 16
// tokens.
#pragma once

#include "common/barrier.h"
#include "common/stage.h"

namespace flash_kda::portable {

// Recurrence warps hold 32 value rows of the state each, two 16-row tiles that share every factor they load. Prepare
// warp w builds the factors of chunks w, w + 4, ... in stage w, which it alone fills. Eight warps leave each thread all
// the registers that it can name; both roles need over 200.
constexpr int kRowTiles = 2;
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kRecurrenceWarps = kHeadDim / kWarpRows;
constexpr int kPrepareWarps = 4;
constexpr int kStages = kPrepareWarps;
constexpr int kThreads = (kRecurrenceWarps + kPrepareWarps) * kWarp;

struct SharedStorage {
  ForwardStage stage[kStages];
  KeyNorms key_norms[kStages];
  Tile<kChunk> v[kStages];  // V, then O
  Scratch scratch[kPrepareWarps];
  // Stage s goes round and round between two owners. `full` completes when its prepare warp's 32 lanes have arrived,
  // and hands the stage to the recurrence warps; `empty` completes when every lane of the recurrence warps has, and
  // hands it back. Use number i of a stage is phase i of both barriers: the consumers wait for parity i % 2 of `full`,
  // the producer for parity (i - 1) % 2 of `empty`, and not at all for i = 0.
  Barrier full[kStages];
  Barrier empty[kStages];
};

// The least that a block may have on every supported arch (SM120).
static_assert(sizeof(SharedStorage) <= 99 * 1024);

}  // namespace flash_kda::portable
