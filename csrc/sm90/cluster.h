// Between the CTAs of a cluster: factors that one prepares for another's ring.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/config.h"

namespace flash_kda::sm90 {

// Starts copying a piece of shared memory to the same place in another CTA, whose barrier counts the bytes. The source
// has to be visible to the async proxy, and may not change until the barrier's phase has ended. By one lane.
__device__ __forceinline__ void copy_to_cta(void const* piece, int bytes, Barrier& barrier, int cta) {
  uint32_t const from = cute::cast_smem_ptr_to_uint(piece);
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(from, cta)),
               "r"(from), "r"(bytes), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), cta))
               : "memory");
}

// What the CTAs of a cluster share of a stage: all of it, with the key norms that only an output needs.
template <Pass kPass>
constexpr int kSharedBytes = sizeof(Stage<kPass>) + (kPass == Pass::kForward ? sizeof(KeyNorms) : 0);

// A stage's factors to the same stage of another CTA. By a whole warp, after its proxy fence.
template <class Config>
__device__ __forceinline__ void share_factors(SharedStorage<Config>& shared, int stage, int cta) {
  __syncwarp();
  if (!cute::elect_one_sync()) return;
  Barrier& full = shared.full[stage];
  copy_to_cta(&shared.stage[stage], sizeof(shared.stage[stage]), full, cta);
  if constexpr (Config::kPass == Pass::kForward)
    copy_to_cta(&shared.forward.key_norms[stage], sizeof(KeyNorms), full, cta);
}

}  // namespace flash_kda::sm90
