// The portable kernel, for every arch from SM90 up: mma.sync, ldmatrix, cp.async and mbarriers only.
#pragma once

#include "portable/prepare.h"
#include "portable/recurrence.h"

namespace flash_kda::portable {

// One CTA for each (sequence, head) pair, heads fastest: neighbouring CTAs read neighbouring rows.
__global__ void __launch_bounds__(kThreads, 1) fwd_kernel(__grid_constant__ FwdParams const p) {
  extern __shared__ __align__(128) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  int64_t const sequence_index = blockIdx.x / p.num_heads;
  int const head = blockIdx.x % p.num_heads;
  int const warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(kWarp);
      shared.empty[s].init(kRecurrenceWarps * kWarp);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  Sequence const sequence = find_sequence(p, sequence_index);
  if (warp < kRecurrenceWarps) {
    recur(p, shared, sequence, sequence_index, head, warp, lane);
  } else {
    prepare(p, shared, sequence, head, warp - kRecurrenceWarps, lane);
  }
}

}  // namespace flash_kda::portable
