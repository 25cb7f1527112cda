#include "sm90/segments.cuh"
#include "sm90/sm90.h"

namespace flash_kda::sm90 {

cudaError_t fwd_segments(Segmented<FwdParams> const& p, TensorMaps const& maps, Launch const& launch) {
  return launch_segments(p, maps, launch);
}

}  // namespace flash_kda::sm90
