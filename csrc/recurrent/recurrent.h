// What the host needs of the kernel for short sequences.
#pragma once

#include "common/launch.h"
#include "params.h"

namespace flash_kda::recurrent {

cudaError_t fwd(GeneralParams const& p, Launch const& launch);

}  // namespace flash_kda::recurrent
