#include "sm90/kernel.cuh"
#include "sm90/sm90.h"

namespace flash_kda::sm90 {

cudaError_t fwd_split(GeneralParams const& p, TensorMaps const& maps, int multiprocessors, cudaStream_t stream) {
  return launch<Config<64>>(p, maps, multiprocessors, stream);
}

}  // namespace flash_kda::sm90
