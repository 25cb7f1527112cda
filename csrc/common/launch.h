// What every launch needs besides its parameters.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

namespace flash_kda {

constexpr int kMostDevices = 64;

// Where a kernel goes. The device is the current one, and its number is below kMostDevices.
struct Launch {
  int device;
  int multiprocessors;
  cudaStream_t stream;
};

// Lets kKernel have `bytes` of dynamic shared memory on the current device. The driver is asked once: a call has
// microseconds. A failure is not remembered.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes, int device) {
  static std::array<std::atomic<bool>, kMostDevices> is_allowed;
  if (is_allowed[device].load(std::memory_order_relaxed)) return cudaSuccess;
  cudaError_t const status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) is_allowed[device].store(true, std::memory_order_relaxed);
  return status;
}

}  // namespace flash_kda
