#include "sm90/kernel.cuh"
#include "sm90/sm90.h"

namespace flash_kda::sm90 {

cudaError_t fwd_split(SoftplusParams const& p, TensorMaps const& maps, Launch const& launch) {
  return launch_fwd<Config<Sharing::kSplit>>(p, maps, launch);
}

}  // namespace flash_kda::sm90
