// The SM90 kernel: TMA, warps that prepare chunks, and warpgroups that carry the state in wgmma accumulators, all in
// one CTA, without intermediates in device memory.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include "sm90/load.h"
#include "sm90/prepare.h"
#include "sm90/recurrence.h"

namespace flash_kda::sm90 {

// Roles run through the CTA's work items at their own pace: only the ring's barriers hold them together, so that the
// next item is being loaded and prepared while this one's last chunks are worked off.
template <class Config, class Params>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(__grid_constant__ Params const p, __grid_constant__ TensorMaps const maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(memory);
  // Uniform in a warp, and known to be: roles branch on it.
  int const warp = __shfl_sync(0xffffffff, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      shared.loaded[s].init(1);
      shared.full[s].init(kWarp);
      shared.empty[s].init(Config::kRecurrenceWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  make_plan<Config>(p, shared.plan);  // ends with a block barrier

  Schedule<Config, Params> const schedule{p, shared.plan};
  WorkItem item;
  uint32_t chunk = 0;
  if (warp < Config::kRecurrenceWarps) {
    cutlass::arch::warpgroup_reg_alloc<Config::kRecurrenceRegisters>();
    for (int round = 0; schedule.find(item, round); ++round) recur(p, shared, item, chunk, warp, lane);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::kPrepareRegisters>();
    if (warp < Config::kRecurrenceWarps + Config::kPrepareWarps) {
      for (int round = 0; schedule.find(item, round); ++round) {
        prepare(p, shared, item, chunk, warp - Config::kRecurrenceWarps, lane);
        chunk += item.chunks();
      }
    } else {
      for (int round = 0; schedule.find(item, round); ++round) {
        prefetch_state<Config>(p, item, lane);
        if (lane == 0) load(p, maps, shared, item, chunk);
        __syncwarp();
      }
    }
  }
}

// Instantiated in a translation unit for each configuration and form of parameters, so that they build in parallel.
template <class Config, class Params>
cudaError_t launch(Params const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream) {
  auto const kernel = fwd_kernel<Config, Params>;
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  int64_t const items = p.num_sequences * p.num_heads * (kHeadDim / Config::kValueRows);
  unsigned const grid = unsigned(items < multiprocessors ? items : multiprocessors);
  kernel<<<grid, Config::kThreads, bytes, stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace flash_kda::sm90
