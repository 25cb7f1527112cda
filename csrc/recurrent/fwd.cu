#include "recurrent/kernel.cuh"
#include "recurrent/recurrent.h"

namespace flash_kda::recurrent {

cudaError_t fwd(GeneralParams const& p, Launch const& launch) {
  fwd_kernel<<<dim3(unsigned(p.num_sequences * p.num_heads), kParts), kThreads, 0, launch.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda::recurrent
