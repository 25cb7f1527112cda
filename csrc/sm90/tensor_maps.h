// TMA descriptors of the inputs.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "params.h"

namespace flash_kda::sm90 {

// Boxes of 16 tokens by 64 channels of one head, landing in shared memory with the 128-byte swizzle.
struct TensorMaps {
  CUtensorMap q, k, v, g;
};

// Whether TMA can describe the inputs; not a stride of zero, for one. What it cannot, the portable kernel serves.
template <class Params>
bool can_describe(Params const& p);

// Of inputs that it can describe, but for an fp32 g. Needs a current context. cudaErrorInvalidValue is a driver's word
// that TMA cannot describe them after all.
template <class Params>
cudaError_t make_tensor_maps(TensorMaps& maps, Params const& p);

}  // namespace flash_kda::sm90
