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
  // Whether wait() would return at once: the same for all lanes of a warp.
  __device__ __forceinline__ bool is_complete(uint32_t parity) const {
    bool const is_complete = __all_sync(0xffffffff, cutlass::arch::ClusterBarrier::test_wait(parity));
    asm volatile("" ::: "memory");
    return is_complete;
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterBarrier::arrive();
  }
  // At the same barrier of another CTA of the cluster, or of this one.
  __device__ __forceinline__ void arrive_at(uint32_t cta) const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterBarrier::arrive(cta);
  }
  // One arrival that also makes the phase wait for as many bytes of TMA.
  __device__ __forceinline__ void arrive_and_expect_bytes(uint32_t bytes) const {
    asm volatile("" ::: "memory");
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(bytes);
  }
};

}  // namespace flash_kda
