// From group to group: the states after a sequence's segments, of which R and P are known, one after the other.
//   S = S_before_the_group P + R
// Value rows do not mix: a warpgroup carries 64 of them, S as the register operand of wgmma. S and P both go as two
// bf16 parts, their sum is fp32: what is left out, the product of the low parts and what two parts cannot hold, is
// below 2^-15 of the product.
#pragma once

#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cute/arch/copy_sm80.hpp>

#include "sm90/recurrence.h"

namespace flash_kda::sm90 {

// Only the states after whole groups hang on each other. Of a cluster's two CTAs the first goes from group to group,
// and the second makes the states inside of groups, from what the first leaves in memory.
constexpr int kCombineCtas = 2;
static_assert(kGroupSegments == 2);
constexpr int kCombineThreads = 128;
constexpr int kCombineRows = 64;
constexpr int kCombineStages = 3;

struct CombineStorage {
  // Transitions on their way, a stage each, by cp.async of all threads: what a thread has copied is there when its
  // group of copies is, and everybody's behind a block barrier. A stage is filled again behind the barrier after its
  // last use.
  Transition transition[kCombineStages];
  // In the second CTA: how often a warp of the first has stored its rows of a group's last state. Four times n says
  // that all four warps have stored n times: some warp has then counted for the n-th time, which it does behind a block
  // barrier that every warp passes after it has stored n times; but for the last step, whose n makes the largest sum
  // that there is. A count, since the first CTA does not wait for the second.
  int stored;
};

using Spread = cuda::atomic_ref<int, cuda::thread_scope_device>;
// Blocks of eight rows follow each other, and those of eight channels within.
constexpr int kBlockBytes = Transition::kBlock * int(sizeof(bf16));
using TransitionMNMajor = Descriptor<leading(kHeadDim / 8 * kBlockBytes), kBlockBytes / 16>;

// A state as the register operand, in two parts.
struct StateOperand {
  using Tensor = decltype(cute::make_tensor<bf16>(Operand<kHeadDim / 16>{}));
  Tensor hi, lo;

  __device__ void set(StateRows const& state) {
    uint32_t* const hi_bits = reinterpret_cast<uint32_t*>(cute::raw_pointer_cast(hi.data()));
    uint32_t* const lo_bits = reinterpret_cast<uint32_t*>(cute::raw_pointer_cast(lo.data()));
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      PairParts const parts = PairParts::of(state[i / 2][i % 2 * 2], state[i / 2][i % 2 * 2 + 1]);
      hi_bits[i] = parts.hi, lo_bits[i] = parts.lo;
    }
  }
};

// A cluster makes 64 value rows of the states after a sequence's segments from its second group on, of one head.
template <class Params>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(__grid_constant__ Params const p) {
  using namespace cute;
  cudaTriggerProgrammaticLaunchCompletion();
  extern __shared__ __align__(1024) char memory[];
  CombineStorage& shared = *reinterpret_cast<CombineStorage*>(memory);
  int const thread = threadIdx.x, warp = __shfl_sync(0xffffffff, thread / kWarp, 0), lane = thread % kWarp;
  bool const is_first = block_rank_in_cluster() == 0;
  int cluster = blockIdx.x / kCombineCtas;
  int const row = cluster % (kHeadDim / kCombineRows) * kCombineRows + 16 * warp;  // of the warp's sixteen
  cluster /= kHeadDim / kCombineRows;
  int const head = cluster % p.num_heads, sequence_index = cluster / p.num_heads;

  int const tokens = segment_tokens(p);
  int first_slot = 0, segments = 0;
#pragma unroll 1
  for (int n = 0; n <= sequence_index; ++n) {
    first_slot += segments;
    segments = count_segments(tokens, find_sequence(static_cast<typename Params::Base const&>(p), n));
  }
  // From segment 2 or 3 on every other one but the sequence's last.
  int const first = is_first ? kGroupSegments + 1 : kGroupSegments, steps = max(0, segments - first) / kGroupSegments;
  auto const after = [&](int segment) -> SegmentState& { return state_before(p, first_slot + segment + 1, head); };
  auto const segment_of_step = [&](int step) { return first + step * kGroupSegments; };

  if (segments <= kGroupSegments + 1) {  // both CTAs alike
    cudaGridDependencySynchronize();     // what waits for this kernel waits for the one in front of it, too
    return;
  }

  if (thread == 0) shared.stored = 0;
  cluster_sync();
  int* const stored = cooperative_groups::this_cluster().map_shared_rank(&shared.stored, 1);
  cudaGridDependencySynchronize();  // R and P are there
  auto const fetch = [&](int step) {
    if (step < steps) {
      auto const* const from = reinterpret_cast<uint128_t const*>(&after(segment_of_step(step)).transition);
      auto* const to = reinterpret_cast<uint128_t*>(&shared.transition[step % kCombineStages]);
#pragma unroll 8
      for (int i = thread; i < int(sizeof(Transition) / sizeof(uint128_t)); i += kCombineThreads) {
        SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(from[i], to[i]);
      }
    }
    cp_async_fence();  // a group a step, if an empty one
  };

  TiledMMA product = make_tiled_mma(UpdateAtom{});
  product.accumulate_ = GMMA::ScaleOut::One;
  Tensor sum = make_tensor<float>(Accumulator<kHeadDim / 8>{});
  StateRows& sum_rows = reinterpret_cast<StateRows&>(sum(0));
  StateRows next;
  StateOperand state;
  // All on their way before any is waited for, the first step's first.
  fetch(0);
  StateRows start;
  after(kGroupSegments - 1).load(start, row, 1.f, lane);
  if (steps > 0) after(first).load(next, row, 1.f, lane);
#pragma unroll
  for (int step = 1; step < kCombineStages - 1; ++step) fetch(step);
  state.set(start);

  auto const count_stored = [&] {
    if (!is_first) return;
    __syncwarp();
    if (lane == 0) Spread(*stored).fetch_add(1, cuda::memory_order_release);
  };

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int const segment = segment_of_step(step), s = step % kCombineStages;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) sum(i) = next[i / 4][i % 4];  // R
    if (!is_first && step > 0) {
      while (Spread(shared.stored).load(cuda::memory_order_acquire) < step * (kCombineThreads / kWarp)) {
      }
      after(segment - 1).load(next, row, 1.f, lane);
      state.set(next);
    }
    if (step + 1 < steps) after(segment_of_step(step + 1)).load(next, row, 1.f, lane);

    cp_async_wait<kCombineStages - 2>();
    cutlass::arch::fence_view_async_shared();  // wgmma reads what was copied
    __syncthreads();                           // this transition is there, and the one before has been read
    fetch(step + kCombineStages - 1);
    uint32_t const hi = (cast_smem_ptr_to_uint(&shared.transition[s]) & 0x3ffff) / 16;
    constexpr int kLow = offsetof(Transition, lo);
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    auto const add = [&](StateOperand::Tensor& a, int offset) {
#pragma unroll
      for (int b = 0; b < kHeadDim / 16; ++b) {
        gemm(product, a(_, _, b), TransitionMNMajor::of(hi, offset + 2 * b * (kHeadDim / 8) * kBlockBytes), sum);
      }
    };
    add(state.lo, 0);
    add(state.hi, kLow);
    add(state.hi, 0);
    warpgroup_commit_batch();
    if (step > 0) count_stored();  // while the products run: a release waits for the stores
    warpgroup_wait<0>();
    warpgroup_fence_operand(sum);

    after(segment).store(sum_rows, row, 1.f, lane);
    if (is_first) state.set(sum_rows);
  }
  if (steps > 0) count_stored();
  cluster_sync();  // nobody counts in this CTA any more
}

}  // namespace flash_kda::sm90
