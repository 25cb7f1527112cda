#include "api/segments.h"

#include <algorithm>

namespace flash_kda {
namespace {

constexpr int kChunk = kShortestSegment;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of a sequence of average length.
int64_t mean_tokens(CallShape const& s) { return s.is_packed ? ceil_div(s.tokens, s.sequences) : s.tokens; }

// What the kernels take, in microseconds, fitted to an H200 (docs/segment-scan.md): a chunk of a segment's transition
// and of its forward pass, where every SM has one; a step of the scan; starts and ends, and what these take longer
// where all SMs start at once.
constexpr double kTransitionChunk = 0.59, kForwardChunk = 0.9, kScanStep = 2.4;
constexpr double kTransitionStart = 9, kForwardStart = 5, kCrowd = 7;
// What it costs that not every cluster, or every segment, finds its SMs at once.
constexpr double kTransitionRound = 12, kForwardRound = 8;
// A chunk of a pair that two CTAs share, and of one that has an SM to itself; start and end.
constexpr double kSplitChunk = 0.63, kWholeChunk = 0.88, kPairStart = 5;

}  // namespace

SegmentPlan plan_of_tokens(CallShape const& s, int tokens) {
  SegmentPlan plan;
  plan.tokens = tokens;
  // A sequence has ceil(length / tokens) segments, and at least one.
  plan.slots = !s.is_packed       ? s.sequences * std::max<int64_t>(1, ceil_div(s.tokens, tokens))
               : s.sequences == 1 ? std::max<int64_t>(1, ceil_div(s.tokens, tokens))
                                  : s.tokens / tokens + s.sequences;
  return plan;
}

SegmentPlan best_plan(CallShape const& s, int multiprocessors) {
  SegmentPlan best;
  int64_t const mean = mean_tokens(s), pairs = s.sequences * s.heads;
  int64_t const most = std::min<int64_t>(ceil_div(mean, kChunk), std::max<int64_t>(2, 2 * multiprocessors / pairs));
  for (int64_t wanted = 2; wanted <= most; ++wanted) {
    int const tokens = int(ceil_div(ceil_div(mean, wanted), kChunk) * kChunk);
    SegmentPlan plan = plan_of_tokens(s, tokens);
    // The first always stands: a sequence of more than one chunk can be cut, whatever it takes.
    if (wanted > 2 && plan.slots * s.heads * kSegmentStateBytes > kMostWorkspaceBytes) break;
    int64_t const segments = ceil_div(mean, tokens), chunks = tokens / kChunk;
    // Groups of two segments, a cluster of two CTAs each; every segment but the last of a sequence.
    int64_t const groups = segments / 2, rounds = ceil_div(2 * groups * pairs, multiprocessors);
    int64_t const forward_rounds = ceil_div(plan.slots * s.heads, multiprocessors);
    plan.time = kTransitionStart + (rounds - 1) * kTransitionRound;
    plan.time += rounds * std::min<int64_t>(2, segments - 1) * chunks * kTransitionChunk;
    if (groups > 1) plan.time += (groups - 1) * kScanStep;  // to the last segment
    plan.time += kForwardStart + (forward_rounds - 1) * kForwardRound + forward_rounds * chunks * kForwardChunk;
    plan.time += kCrowd * std::min(1., double(plan.slots * s.heads) / multiprocessors);
    if (best.tokens == 0 || plan.time < best.time) best = plan;
  }
  return best;
}

double time_of_pairs(CallShape const& s, int multiprocessors) {
  int64_t const pairs = s.sequences * s.heads, chunks = ceil_div(mean_tokens(s), kChunk);
  if (2 * pairs <= multiprocessors) return kPairStart + chunks * kSplitChunk;
  return kPairStart + ceil_div(pairs, multiprocessors) * chunks * kWholeChunk;
}

}  // namespace flash_kda
