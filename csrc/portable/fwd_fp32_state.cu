#include "portable/kernel.cuh"
#include "portable/portable.h"

namespace flash_kda::portable {

cudaError_t fwd_fp32_state(FwdParams const& p, cudaStream_t stream) { return launch<float>(p, stream); }

}  // namespace flash_kda::portable
