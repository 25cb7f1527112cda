#include "portable/kernel.cuh"
#include "portable/portable.h"

namespace flash_kda::portable {

cudaError_t fwd(GeneralParams const& p, cudaStream_t stream) { return launch(p, stream); }

}  // namespace flash_kda::portable
