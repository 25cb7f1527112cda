#include "api/schedule.h"

#include <array>
#include <mutex>
#include <stdexcept>

#include "portable/portable.h"
#include "recurrent/recurrent.h"
#ifdef FLASH_KDA_HAS_SM90
#include "sm90/sm90.h"
#endif

namespace flash_kda {
namespace {

struct Device {
  cudaError_t status;
  int capability;  // 10 major + minor
  int multiprocessors;
};

Device query(int device) {
  Device d{};
  int major = 0, minor = 0;
  d.status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (d.status == cudaSuccess) d.status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (d.status == cudaSuccess) {
    d.status = cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  d.capability = 10 * major + minor;
  return d;
}

// Asked once: a call has microseconds.
Device const& find_device(int device) {
  constexpr int kMostDevices = 64;
  static std::array<Device, kMostDevices> devices;
  static std::array<std::once_flag, kMostDevices> asked;
  if (device < 0 || device >= kMostDevices) throw std::runtime_error("flash_kda: device number out of range");
  std::call_once(asked[device], [device] { devices[device] = query(device); });
  return devices[device];
}

#ifdef FLASH_KDA_HAS_SM90
constexpr bool kHasSm90 = true;

// False where TMA cannot serve the call.
template <class Params>
bool launch_sm90(cudaError_t& status, Params const& p, int multiprocessors, cudaStream_t stream) {
  sm90::TensorMaps maps{};
  if (p.num_tokens == 0 || !sm90::make_tensor_maps(maps, p)) return false;
  // Two CTAs a pair, where that leaves no CTA without a multiprocessor of its own.
  bool const split = 2 * p.num_sequences * p.num_heads <= multiprocessors;
  status =
      split ? sm90::fwd_split(p, maps, multiprocessors, stream) : sm90::fwd_whole(p, maps, multiprocessors, stream);
  return true;
}
#else
constexpr bool kHasSm90 = false;

template <class Params>
bool launch_sm90(cudaError_t&, Params const&, int, cudaStream_t) {
  return false;
}
#endif

// Decoding: few tokens for each state, where moving the states takes all the time. Packed lengths are the device's to
// know, so that their mean decides: a long sequence among many short ones would keep one CTA busy for long.
bool is_decoding(FwdParams const&) { return false; }
bool is_decoding(GeneralParams const& p) {
  if (p.state_indices == nullptr) return false;
  return p.cu_seqlens == nullptr ? p.num_tokens <= 16 : p.num_tokens <= 4 * p.num_sequences;
}

cudaError_t launch_recurrent(FwdParams const&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_recurrent(GeneralParams const& p, cudaStream_t stream) { return recurrent::fwd(p, stream); }

template <class Params>
cudaError_t launch(Params const& p, Schedule schedule, int device, cudaStream_t stream) {
  Device const& d = find_device(device);
  if (d.status != cudaSuccess) return d.status;
  bool const can_sm90 = kHasSm90 && d.capability == 90;
  if (schedule == Schedule::kSm90 && !can_sm90) {
    throw std::runtime_error(kHasSm90 ? "flash_kda: schedule sm90 needs a device of compute capability 9.0"
                                      : "flash_kda: schedule sm90 needs a build with FLASH_KDA_CUDA_ARCHS naming 90a");
  }
  if (schedule == Schedule::kAuto && is_decoding(p)) return launch_recurrent(p, stream);
  cudaError_t status = cudaSuccess;
  if (schedule != Schedule::kPortable && can_sm90 && launch_sm90(status, p, d.multiprocessors, stream)) return status;
  return portable::fwd(p, stream);
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
  return launch(p, schedule, device, stream);
}

}  // namespace flash_kda
