#include "portable/portable.h"

#include "portable/kernel.cuh"

namespace flash_kda::portable {

cudaError_t fwd(FwdParams const& p, cudaStream_t stream) {
  int const bytes = sizeof(SharedStorage);
  cudaError_t const status = cudaFuncSetAttribute(fwd_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  fwd_kernel<<<unsigned(p.num_sequences * p.num_heads), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda::portable
