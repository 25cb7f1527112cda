// The SM90 kernel: TMA, warps that prepare chunks, and warpgroups that carry the state in wgmma accumulators, all in
// one CTA, without intermediates in device memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>

#include "common/launch.h"
#include "sm90/prepare.h"
#include "sm90/recurrence.h"

namespace flash_kda::sm90 {

// Roles run through the CTA's work items at their own pace: only the ring's barriers hold them together, so that the
// next item is being loaded and prepared while this one's last chunks are worked off.
template <class Config, class Params, class Schedule>
__device__ __forceinline__ void run_list(Params const& p, TensorMaps const& maps, SharedStorage<Config>& shared,
                                         Schedule const& schedule, int warp, int lane) {
  static_assert(Config::kRegistersSuffice, "setmaxnreg would wait for ever");
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
    // By the last warp, whose first chunk has to wait for the scan anyway.
    static_assert(Config::kScanStages == 0 || Config::is_for_scan(Config::kPrepareWarps - 1));
    if constexpr (Config::kScanStages > 0) {
      if (warp == Config::kPrepareWarps - 1) load_transitions(p, shared, schedule.slot(), schedule.head());
    }
    prepare(p, maps, shared, ListJobs<Config, Schedule>(schedule, warp), warp, lane,
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

template <class Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  if (threadIdx.x != 0) return;
  for (int s = 0; s < Config::kStages; ++s) {
    shared.loaded[s].init(1);
    shared.full[s].init(kWarp);
    shared.empty[s].init(Config::kClusterSize * Config::kRecurrenceWarps);
  }
  if constexpr (Config::kScanStages > 0) init_barriers(shared.own.scan, Config::kRecurrenceWarps);
  cutlass::arch::fence_barrier_init();
}

template <class Config, class Params>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(__grid_constant__ Params const p, __grid_constant__ TensorMaps const maps) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(memory);
  // Uniform in a warp, and known to be: roles branch on it.
  int const warp = __shfl_sync(0xffffffff, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;

  if (threadIdx.x == kWarp) prefetch_maps(maps);
  init_barriers(shared);
  if constexpr (Config::kSharing == Sharing::kWhole) {
    make_plan<Config>(p, shared.own.plan);  // ends with a block barrier
    run_list(p, maps, shared, Schedule<Params>{p, shared.own.plan}, warp, lane);
  } else if constexpr (Config::kSharing == Sharing::kSegment) {
    __syncthreads();  // barriers are there
    run_list(p, maps, shared, OneItem<Params>{p}, warp, lane);
  } else {
    cute::cluster_sync();  // barriers are there
    run_split(p, maps, shared, warp, lane);
    cute::cluster_sync();  // nobody writes to this CTA any more, or arrives here
  }
}

// A launch with attributes: clusters, and kernels that may start before the one in front of them has ended.
class LaunchConfig {
 public:
  LaunchConfig(int64_t ctas, int threads, int bytes, cudaStream_t stream) {
    config_.gridDim = unsigned(ctas);
    config_.blockDim = unsigned(threads);
    config_.dynamicSmemBytes = bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
  }
  LaunchConfig(LaunchConfig const&) = delete;
  LaunchConfig& operator=(LaunchConfig const&) = delete;

  LaunchConfig& in_clusters_of(int ctas) {
    if (ctas == 1) return *this;
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(ctas), 1, 1};
    return *this;
  }
  // Once all of that one's CTAs have started; cudaGridDependencySynchronize waits for its end.
  LaunchConfig& early() {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  operator cudaLaunchConfig_t const*() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

// Instantiated in a translation unit for each configuration and form of parameters, so that they build in parallel.
// `is_early` only behind a kernel of the same call: it reads the call's inputs before that one has ended.
template <class Config, class Params>
cudaError_t launch_fwd(Params const& p, TensorMaps const& maps, Launch const& launch, bool is_early = false) {
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Config, Params>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  int64_t const pairs = count_sequences(p) * p.num_heads;
  int64_t const ctas = Config::kSharing == Sharing::kWhole ? std::min(pairs, int64_t(launch.multiprocessors))
                                                           : pairs * Config::kClusterSize;
  LaunchConfig config(ctas, Config::kThreads, bytes, launch.stream);
  config.in_clusters_of(Config::kClusterSize);
  if (is_early) config.early();
  return cudaLaunchKernelEx(config, fwd_kernel<Config, Params>, p, maps);
}

// How many clusters run at once.
template <class Config>
cudaError_t count_clusters(int& clusters, Launch const& launch) {
  int const bytes = sizeof(SharedStorage<Config>);
  cudaError_t const status = allow_shared_memory<fwd_kernel<Config, FwdParams>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  LaunchConfig config(launch.multiprocessors / Config::kClusterSize * Config::kClusterSize, Config::kThreads, bytes,
                      nullptr);
  config.in_clusters_of(Config::kClusterSize);
  return cudaOccupancyMaxActiveClusters(&clusters, fwd_kernel<Config, FwdParams>, config);
}

}  // namespace flash_kda::sm90
