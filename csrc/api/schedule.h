// Which kernel serves a call.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "params.h"

namespace flash_kda {

enum class Schedule { kAuto, kPortable, kSm90 };

// Throws std::invalid_argument for an unknown name.
Schedule schedule_of_name(std::string const& name);

// Launches on the current device, which is `device`. kAuto takes the SM90 kernel where it can, and for decoding from a
// state pool a kernel of its own; kSm90 throws
// std::runtime_error on any other device, or where the build does not hold that kernel. Inputs that TMA cannot
// describe, and batches without tokens, are the portable kernel's in either case: both kernels give the same bits.
cudaError_t launch_fwd(FwdParams const& p, Schedule schedule, int device, cudaStream_t stream);
cudaError_t launch_fwd(GeneralParams const& p, Schedule schedule, int device, cudaStream_t stream);

}  // namespace flash_kda
