// What the host needs of the SM90 kernel.
#pragma once

#include <cuda_runtime.h>

#include "params.h"
#include "sm90/tensor_maps.h"

namespace flash_kda::sm90 {

// Whole pairs, a CTA each; and pairs split by value rows, two CTAs each.
cudaError_t fwd_whole(FwdParams const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream);
cudaError_t fwd_split(FwdParams const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream);
cudaError_t fwd_whole(GeneralParams const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream);
cudaError_t fwd_split(GeneralParams const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream);

}  // namespace flash_kda::sm90
