#include "api/schedule.h"

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "portable/portable.h"
#include "recurrent/recurrent.h"
#ifdef FLASH_KDA_HAS_SM90
#include "sm90/sm90.h"
#endif

namespace flash_kda {
namespace {

struct Device {
  int capability;  // 10 major + minor
  int multiprocessors;
};

cudaError_t query(Device& d, int device) {
  int major = 0, minor = 0;
  cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  d.capability = 10 * major + minor;
  return status;
}

// Asked until it succeeds once: a call has microseconds.
cudaError_t find_device(Device& d, int device) {
  static std::mutex mutex;
  static std::array<std::optional<Device>, kMostDevices> known;
  if (device < 0 || device >= kMostDevices) {
    throw std::runtime_error("flash_kda: device " + std::to_string(device) + ": expected a number below " +
                             std::to_string(kMostDevices));
  }
  std::lock_guard const lock(mutex);
  if (!known[device]) {
    cudaError_t const status = query(d, device);
    if (status != cudaSuccess) return status;
    known[device] = d;
  }
  d = *known[device];
  return cudaSuccess;
}

// What launch_sm90 says where TMA cannot serve the call; no launch fails with it.
constexpr cudaError_t kNotDescribed = cudaErrorNotSupported;

#ifdef FLASH_KDA_HAS_SM90
constexpr bool kHasSm90 = true;

template <class Params>
bool can_sm90(Params const& p) {
  return p.num_tokens > 0 && sm90::can_describe(p);
}

// How many clusters of two CTAs run at once. Asked until it succeeds once.
cudaError_t count_clusters(int& clusters, Launch const& launch) {
  static std::array<std::atomic<int>, kMostDevices> known;
  clusters = known[launch.device].load(std::memory_order_relaxed);
  if (clusters > 0) return cudaSuccess;
  cudaError_t const status = sm90::clusters_split(clusters, launch);
  if (status == cudaSuccess) known[launch.device].store(clusters, std::memory_order_relaxed);
  return status;
}

template <class Params>
cudaError_t launch_sm90(Params const& p, Launch const& launch) {
  sm90::TensorMaps maps{};
  cudaError_t status = sm90::make_tensor_maps(maps, p);
  if (status == cudaErrorInvalidValue) return kNotDescribed;
  if (status != cudaSuccess) return status;
  // Two CTAs a pair, where all of them run at once.
  int clusters;
  status = count_clusters(clusters, launch);
  if (status != cudaSuccess) return status;
  return p.num_sequences * p.num_heads <= clusters ? sm90::fwd_split(p, maps, launch)
                                                   : sm90::fwd_whole(p, maps, launch);
}
#else
constexpr bool kHasSm90 = false;

template <class Params>
bool can_sm90(Params const&) {
  return false;
}
template <class Params>
cudaError_t launch_sm90(Params const&, Launch const&) {
  return cudaErrorNotSupported;
}
#endif

// Decoding: few tokens for each state, where moving the states takes all the time. Packed lengths are the device's to
// know, so that their mean decides: a long sequence among many short ones would keep one CTA busy for long.
bool is_decoding(FwdParams const&) { return false; }
bool is_decoding(GeneralParams const& p) {
  if (p.state_indices == nullptr) return false;
  return p.cu_seqlens == nullptr ? p.num_tokens <= 16 : p.num_tokens <= 4 * p.num_sequences;
}

cudaError_t launch_recurrent(FwdParams const&, Launch const&) { return cudaErrorNotSupported; }
cudaError_t launch_recurrent(GeneralParams const& p, Launch const& launch) { return recurrent::fwd(p, launch); }

// Of the calls that SoftplusParams describe.
bool is_softplus(GeneralParams const& p) {
  return p.gate == GateKind::kSoftplus && !p.g_is_fp32 && p.checkpoints.data == nullptr;
}

template <class Params>
cudaError_t launch(Params const& p, Schedule schedule, int device, cudaStream_t stream) {
  Device d;
  cudaError_t const status = find_device(d, device);
  if (status != cudaSuccess) return status;
  bool const has_sm90 = kHasSm90 && d.capability == 90;
  if (schedule == Schedule::kSm90 && !has_sm90) {
    throw std::runtime_error(kHasSm90 ? "flash_kda: schedule sm90 needs a device of compute capability 9.0"
                                      : "flash_kda: schedule sm90 needs a build with FLASH_KDA_CUDA_ARCHS naming 90a");
  }
  Launch const launch = {device, d.multiprocessors, stream};
  if (schedule == Schedule::kAuto && is_decoding(p)) return launch_recurrent(p, launch);
  if (schedule != Schedule::kPortable && has_sm90 && can_sm90(p)) {
    cudaError_t const status = launch_sm90(p, launch);
    if (status != kNotDescribed) return status;
  }
  return portable::fwd(p, launch);
}

}  // namespace

Schedule schedule_of_name(std::string const& name) {
  if (name == "auto") return Schedule::kAuto;
  if (name == "portable") return Schedule::kPortable;
  if (name == "sm90") return Schedule::kSm90;
  throw std::invalid_argument("flash_kda: schedule: expected auto, portable or sm90, got " + name);
}

cudaError_t launch_fwd(FwdParams const& p, Schedule schedule, int device, cudaStream_t stream) {
  return launch(p, schedule, device, stream);
}

cudaError_t launch_fwd(GeneralParams const& p, Schedule schedule, int device, cudaStream_t stream) {
  if (is_softplus(p)) return launch(SoftplusParams{p}, schedule, device, stream);
  return launch(p, schedule, device, stream);
}

}  // namespace flash_kda
