// Which kernel serves a call.
#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <string>
#include <string_view>

#include "api/segments.h"
#include "params.h"

namespace flash_kda {

// - kAuto: the SM90 kernels where they can serve the call, for pairs or for segments, whichever the cost model
//   (segments.h) says is faster; and for decoding from a state pool a kernel of its own.
// - kPairs: the same, but never segments, so that a sequence's bits do not depend on what else is in the batch.
// - kPortable: the portable kernel.
// - kSm90: the SM90 kernels for pairs. kSegments: those for segments.
// kSm90 and kSegments throw std::runtime_error on any other device, or where the build does not hold those kernels.
// Inputs that TMA cannot describe, and batches without tokens, are the portable kernel's in any case: it gives the same
// bits as pairs.
struct Schedule {
  enum Kind { kAuto, kPairs, kPortable, kSm90, kSegments };
  Kind kind;
  int segment_tokens = 0;  // kSegments: 0 leaves it to the cost model
};

// Of a value of FLASH_KDA_SCHEDULE; nothing for an unknown one.
std::optional<Schedule> find_schedule(std::string_view name);

// Throws std::invalid_argument for an unknown name.
Schedule schedule_of_name(std::string const& name);

// Device memory that launch_fwd needs besides the call's own, for as long as its kernels run. 0: none.
cudaError_t find_workspace(int64_t& bytes, CallShape const& shape, Schedule schedule, int device);

// Bytes aligned to 256. Without enough of them kAuto takes pairs, and kSegments fails with cudaErrorInvalidValue.
struct Workspace {
  void* data;
  int64_t bytes;
};

// Launches on the current device, which is `device`.
cudaError_t launch_fwd(FwdParams const& p, Schedule schedule, int device, cudaStream_t stream, Workspace workspace);
cudaError_t launch_fwd(GeneralParams const& p, Schedule schedule, int device, cudaStream_t stream, Workspace workspace);

}  // namespace flash_kda
