// What the host needs of the portable kernel.
#pragma once

#include "common/launch.h"
#include "params.h"

namespace flash_kda::portable {

cudaError_t fwd(FwdParams const& p, Launch const& launch);
cudaError_t fwd(GeneralParams const& p, Launch const& launch);
cudaError_t fwd(SoftplusParams const& p, Launch const& launch);

}  // namespace flash_kda::portable
