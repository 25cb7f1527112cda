#include "portable/kernel.cuh"
#include "portable/portable.h"

namespace flash_kda::portable {

cudaError_t fwd_bf16_state(FwdParams const& p, cudaStream_t stream) { return launch<bf16>(p, stream); }

}  // namespace flash_kda::portable
