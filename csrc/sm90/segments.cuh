// Sequences cut into segments that are worked on at once, in two kernels (docs/segment-scan.md):
//   1. transitions: what every group of segments does to the state before it;
//   2. forward: the kernel for whole pairs, a segment a CTA, which first makes the state before it (scan.h).
#pragma once

#include "sm90/kernel.cuh"
#include "sm90/transition.h"

namespace flash_kda::sm90 {

using Stacked = Config<Sharing::kStacked>;

// A cluster a group and head.
template <class Params>
__global__ void __launch_bounds__(Stacked::kThreads, 1)
    transition_kernel(__grid_constant__ Params const p, __grid_constant__ TensorMaps const maps) {
  cudaTriggerProgrammaticLaunchCompletion();
  extern __shared__ __align__(1024) char memory[];
  SharedStorage<Stacked>& shared = *reinterpret_cast<SharedStorage<Stacked>*>(memory);
  int warp = __shfl_sync(0xffffffff, threadIdx.x / kWarp, 0);
  int const lane = threadIdx.x % kWarp, rank = cute::block_rank_in_cluster();
  int const cluster = blockIdx.x / Stacked::kClusterSize, head = cluster % p.num_heads;

  SegmentGroup const group = find_group(p, cluster / p.num_heads);
  if (group.count == 0) return;  // both CTAs alike
  WorkItem const item = {group.sequence(), group.slot, head, rank * kHeadDim};

  if (threadIdx.x == kWarp) prefetch_maps(maps);
  init_barriers(shared);
  cute::cluster_sync();  // barriers are there
  static_assert(Stacked::kRegistersSuffice, "setmaxnreg would wait for ever");
  if (warp < Stacked::kRecurrenceWarps) {
    cutlass::arch::warpgroup_reg_alloc<Stacked::kRecurrenceRegisters>();
    transit(p, shared, item, group, warp, lane, [&](int stage) {
      __syncwarp();
      if (lane < Stacked::kClusterSize) shared.empty[stage].arrive_at(lane);
    });
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Stacked::kPrepareRegisters>();
    warp -= Stacked::kRecurrenceWarps;
    prepare(p, maps, shared, SplitJobs<Stacked>(item, rank, warp), warp, lane, [&](int stage) {
      shared.full[stage].arrive();
      share_factors(shared, stage, 1 - rank);
    });
  }
  cute::cluster_sync();  // nobody writes to this CTA any more, or arrives here
}

template <class Params>
cudaError_t launch_segments(Params const& p, TensorMaps const& maps, Launch const& launch) {
  int const bytes = sizeof(SharedStorage<Stacked>);
  cudaError_t status = allow_shared_memory<transition_kernel<Params>>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  int64_t const groups = groups_of(p.segments.slots) * int64_t(p.num_heads);
  if (groups > 0) {
    LaunchConfig config(groups * Stacked::kClusterSize, Stacked::kThreads, bytes, launch.stream);
    config.in_clusters_of(Stacked::kClusterSize);
    status = cudaLaunchKernelEx(config, transition_kernel<Params>, p, maps);
    if (status != cudaSuccess) return status;
  }
  return launch_fwd<Config<Sharing::kSegment>>(p, maps, launch, groups > 0);
}

}  // namespace flash_kda::sm90
