#include "portable/kernel.cuh"
#include "portable/portable.h"

namespace flash_kda::portable {

cudaError_t fwd(SoftplusParams const& p, Launch const& launch) { return launch_fwd(p, launch); }

}  // namespace flash_kda::portable
