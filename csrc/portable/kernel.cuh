// The portable kernel, for every arch from SM90 up: mma.sync, ldmatrix, cp.async and mbarriers only.
#pragma once

#include <cuda_runtime.h>
#include "common/launch.h"

#include "portable/prepare.h"
#include "portable/recurrence.h"

namespace flash_kda::portable {

// One CTA for each (sequence, head) pair, heads fastest: neighbouring CTAs read neighbouring rows.
template <class Params>
__global__ void __launch_bounds__(kThreads, 1) fwd_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  int const sequence_index = blockIdx.x / p.num_heads;
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
    prepare(p, shared, sequence, sequence_index, head, warp - kRecurrenceWarps, lane);
  }
}

// Instantiated in a translation unit for each form of parameters, so that they build in parallel.
template <class Params>
cudaError_t launch_fwd(Params const& p, Launch const& launch) {
  int const bytes = sizeof(SharedStorage);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Params>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  fwd_kernel<Params><<<unsigned(p.num_sequences * p.num_heads), kThreads, bytes, launch.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda::portable
