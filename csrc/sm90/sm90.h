// What the host needs of the SM90 kernel.
#pragma once

#include "common/launch.h"
#include "params.h"
#include "sm90/tensor_maps.h"

namespace flash_kda::sm90 {

// Whole pairs, a CTA each; and pairs split by value rows, two CTAs each.
cudaError_t fwd_whole(FwdParams const& p, TensorMaps const& maps, Launch const& launch);
cudaError_t fwd_split(FwdParams const& p, TensorMaps const& maps, Launch const& launch);

}  // namespace flash_kda::sm90
