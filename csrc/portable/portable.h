// What the host needs of the portable kernel.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_kda::portable {

// One for each type of state, in translation units of their own.
cudaError_t fwd_fp32_state(FwdParams const& p, cudaStream_t stream);
cudaError_t fwd_bf16_state(FwdParams const& p, cudaStream_t stream);

inline cudaError_t fwd(FwdParams const& p, cudaStream_t stream) {
  return p.state_is_fp32 ? fwd_fp32_state(p, stream) : fwd_bf16_state(p, stream);
}

}  // namespace flash_kda::portable
