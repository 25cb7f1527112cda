// Functions of the driver by way of the runtime: the library links no libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

namespace flash_kda {

// Null where the driver has no such function; it is asked again at the next call. `known` remembers the answer.
template <class Function>
Function find_driver_function(std::atomic<Function>& known, char const* name) {
  if (Function const function = known.load(std::memory_order_relaxed)) return function;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaError_t const status = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  known.store(reinterpret_cast<Function>(address), std::memory_order_relaxed);
  return reinterpret_cast<Function>(address);
}

}  // namespace flash_kda
