// What the host needs of the SM90 kernel.
#pragma once

#include "common/launch.h"
#include "params.h"
#include "sm90/tensor_maps.h"

namespace flash_kda::sm90 {

// One for each way of sharing (config.h).
cudaError_t fwd_whole(FwdParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_split(FwdParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_whole(GeneralParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_split(GeneralParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_whole(SoftplusParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_split(SoftplusParams const& p, TensorMaps const& maps, Launch const& launch);

// Pairs cut into segments.
cudaError_t fwd_segments(Segmented<FwdParams> const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_segments(Segmented<GeneralParams> const& p, TensorMaps const& maps, Launch const& launch);

// How many clusters of fwd_split run at once.
cudaError_t clusters_split(int& clusters, Launch const& launch);

}  // namespace flash_kda::sm90
