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

// False where TMA cannot describe a tensor (a stride of zero, say): the portable kernel serves it.
bool make_tensor_maps(TensorMaps& maps, FwdParams const& p);
// The same. There is no map of an fp32 g, which does not go through the stages.
bool make_tensor_maps(TensorMaps& maps, GeneralParams const& p);

}  // namespace flash_kda::sm90
