// CUTLASS's mbarrier with the compiler fence that its inline assembly leaves out: without it, ordinary shared-memory
// accesses may be moved across a wait or an arrival.
#pragma once

#include <cutlass/arch/barrier.h>

namespace flash_kda {

struct Barrier : cutlass::arch::ClusterTransactionBarrier {
  // Returns once the phase with this parity has completed; what its arrivers wrote before arriving is then visible.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    cutlass::arch::ClusterBarrier::wait(parity);
    asm volatile("" ::: "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterBarrier::arrive();
  }
  // One arrival that also makes the phase wait for as many bytes of TMA.
  __device__ __forceinline__ void arrive_and_expect_bytes(uint32_t bytes) const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(bytes);
  }
};

}  // namespace flash_kda
