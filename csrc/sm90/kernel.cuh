// The SM90 kernel: TMA, warps that prepare chunks, and warpgroups that carry the state in wgmma accumulators, all in
// one CTA, without intermediates in device memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/launch.h"
#include "sm90/prepare.h"
#include "sm90/recurrence.h"

namespace flash_kda::sm90 {

// Roles run through the CTA's work items at their own pace: only the ring's barriers hold them together, so that the
// next item is being loaded and prepared while this one's last chunks are worked off.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(__grid_constant__ FwdParams const p, __grid_constant__ TensorMaps const maps) {
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

  Schedule<Config> const schedule{p, shared.plan};
  if (warp < Config::kRecurrenceWarps) {
    cutlass::arch::warpgroup_reg_alloc<Config::kRecurrenceRegisters>();
    WorkItem item;
    RingPlace<Config> place(0);
    for (int round = 0; schedule.find(item, round); ++round) recur(p, shared, item, place, warp, lane);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::kPrepareRegisters>();
    prepare(p, maps, shared, schedule, warp - Config::kRecurrenceWarps, lane);
  }
}

// Instantiated in a translation unit for each configuration, so that they build in parallel.
template <class Config>
cudaError_t launch_fwd(FwdParams const& p, TensorMaps const& maps, Launch const& launch) {
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Config>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  int64_t const items = p.num_sequences * p.num_heads * (kHeadDim / Config::kValueRows);
  unsigned const grid = unsigned(items < launch.multiprocessors ? items : launch.multiprocessors);
  fwd_kernel<Config><<<grid, Config::kThreads, bytes, launch.stream>>>(p, maps);
  return cudaGetLastError();
}

}  // namespace flash_kda::sm90
