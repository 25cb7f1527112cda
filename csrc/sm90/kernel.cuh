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
template <class Config, class Params>
__device__ __forceinline__ void run_whole(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                          int warp, int lane) {
  static_assert(Config::kRegistersSuffice, "setmaxnreg would wait for ever");
  make_plan<Config>(p, shared.plan);  // ends with a block barrier
  Schedule<Params> const schedule{p, shared.plan};
  if (warp < Config::kRecurrenceWarps) {
    cutlass::arch::warpgroup_reg_alloc<Config::kRecurrenceRegisters>();
    WorkItem item;
    RingPlace<Config> place(0);
    for (int round = 0; schedule.find(item, round); ++round) {
      recur(p, shared, item, place, warp, lane, [&](int stage) {
        __syncwarp();
        if (lane == 0) shared.empty[stage].arrive();
      });
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::kPrepareRegisters>();
    warp -= Config::kRecurrenceWarps;
    prepare(p, maps, shared, ListJobs<Config, Params>(schedule, warp), warp, lane,
            [&](int stage) { shared.full[stage].arrive(); });
  }
}

// One pair a cluster of two. Registers are plenty for either role.
template <class Config, class Params>
__device__ __forceinline__ void run_split(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                          int warp, int lane) {
  int const rank = cute::block_rank_in_cluster(), pair = blockIdx.x / Config::kClusterSize;
  WorkItem const item = WorkItem::of(p, pair / p.num_heads, pair % p.num_heads, rank * Config::kValueRows);
  if (warp < Config::kRecurrenceWarps) {
    RingPlace<Config> place(0);
    recur(p, shared, item, place, warp, lane, [&](int stage) {
      __syncwarp();
      if (lane < Config::kClusterSize) shared.empty[stage].arrive_at(lane);
    });
  } else {
    warp -= Config::kRecurrenceWarps;
    prepare(p, maps, shared, SplitJobs<Config>(item, rank, warp), warp, lane, [&](int stage) {
      shared.full[stage].arrive();
      share_factors(shared, stage, 1 - rank);
    });
  }
}

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
      shared.empty[s].init(Config::kIsSplit ? Config::kClusterSize * Config::kRecurrenceWarps
                                            : Config::kRecurrenceWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Config::kClusterSize == 1) {
    run_whole(p, maps, shared, warp, lane);
  } else {
    cute::cluster_sync();  // barriers are there
    run_split(p, maps, shared, warp, lane);
    cute::cluster_sync();  // nobody writes to this CTA any more, or arrives here
  }
}

// Instantiated in a translation unit for each configuration and form of parameters, so that they build in parallel.
template <class Config, class Params>
cudaError_t launch_fwd(Params const& p, TensorMaps const& maps, Launch const& launch) {
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Config, Params>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  int64_t const pairs = p.num_sequences * p.num_heads;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kClusterSize, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = Config::kClusterSize == 1 ? unsigned(pairs < launch.multiprocessors ? pairs : launch.multiprocessors)
                                             : unsigned(pairs * Config::kClusterSize);
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = Config::kClusterSize == 1 ? 0 : 1;
  return cudaLaunchKernelEx(&config, fwd_kernel<Config, Params>, p, maps);
}

// How many clusters run at once.
template <class Config>
cudaError_t count_clusters(int& clusters, Launch const& launch) {
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Config, FwdParams>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Config::kClusterSize, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(launch.multiprocessors / Config::kClusterSize * Config::kClusterSize);
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&clusters, fwd_kernel<Config, FwdParams>, &config);
}

}  // namespace flash_kda::sm90
