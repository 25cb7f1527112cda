#include "portable/portable.h"

#include "portable/kernel.cuh"

namespace flash_kda::portable {

cudaError_t fwd(FwdParams const& p, Launch const& launch) {
  int const bytes = sizeof(SharedStorage);
  cudaError_t const status = allow_shared_memory<fwd_kernel>(bytes, launch.device);
  if (status != cudaSuccess) return status;
  fwd_kernel<<<unsigned(p.num_sequences * p.num_heads), kThreads, bytes, launch.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda::portable
