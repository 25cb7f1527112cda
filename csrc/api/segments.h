// Whether and how a call's sequences are cut into segments: arithmetic on the host, of sizes alone.
#pragma once

#include <cstdint>

namespace flash_kda {

struct CallShape {
  int64_t tokens;     // T
  int64_t sequences;  // N
  int64_t heads;      // of v
  bool is_packed;     // sequences share the T tokens, else each has as many
  bool operator==(CallShape const&) const = default;
};

struct SegmentPlan {
  int tokens = 0;     // of a segment; 0: sequences are not cut
  int64_t slots = 0;  // segments of all sequences, at most
  double time = 0;    // expected, in microseconds on an H200
};

constexpr int64_t kSegmentStateBytes = 2 * 64 * 1024;               // common/segment.h
constexpr int64_t kMostWorkspaceBytes = int64_t(64) * 1024 * 1024;  // of a plan that is not forced

constexpr int kShortestSegment = 16;

// Segments of that many tokens, a multiple of kShortestSegment.
SegmentPlan plan_of_tokens(CallShape const& shape, int tokens);

// The plan with the least expected time, of those that cut a sequence of average length at least once.
SegmentPlan best_plan(CallShape const& shape, int multiprocessors);

// Expected time of whole or split pairs, in microseconds on an H200.
double time_of_pairs(CallShape const& shape, int multiprocessors);

}  // namespace flash_kda
