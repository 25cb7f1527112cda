// What the host needs of the kernel for short sequences.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_kda::recurrent {

cudaError_t fwd(GeneralParams const& p, cudaStream_t stream);

}  // namespace flash_kda::recurrent
