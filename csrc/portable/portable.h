// What the host needs of the portable kernel.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_kda::portable {

cudaError_t fwd(FwdParams const& p, cudaStream_t stream);
cudaError_t fwd(GeneralParams const& p, cudaStream_t stream);

}  // namespace flash_kda::portable
