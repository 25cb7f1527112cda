#include "sm90/kernel.cuh"
#include "sm90/sm90.h"

namespace flash_kda::sm90 {

cudaError_t fwd_whole(SoftplusParams const& p, TensorMaps const& maps, Launch const& launch) {
  return launch_fwd<Config<Sharing::kWhole>>(p, maps, launch);
}

}  // namespace flash_kda::sm90
