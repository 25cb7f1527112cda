#include "api/schedule.h"

#include <array>
#include <atomic>
#include <charconv>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

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

// The parameters that kernels for segments know: a softplus gate is one of the general ones to them.
template <class Params>
using SegmentedParams =
    Segmented<std::conditional_t<std::is_base_of_v<GeneralParams, Params>, GeneralParams, FwdParams>>;

template <class Params>
cudaError_t launch_sm90(Params const& p, SegmentPlan const& plan, Workspace const& workspace, Launch const& launch) {
  sm90::TensorMaps maps{};
  cudaError_t status = sm90::make_tensor_maps(maps, p);
  if (status == cudaErrorInvalidValue) return kNotDescribed;
  if (status != cudaSuccess) return status;
  if (plan.tokens > 0) {
    SegmentedParams<Params> const segmented = {p, {workspace.data, plan.tokens, int(plan.slots)}};
    return sm90::fwd_segments(segmented, maps, launch);
  }
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
cudaError_t launch_sm90(Params const&, SegmentPlan const&, Workspace const&, Launch const&) {
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

void require_sm90(Schedule schedule, bool has_sm90) {
  if (has_sm90 || (schedule.kind != Schedule::kSm90 && schedule.kind != Schedule::kSegments)) return;
  std::string const name = schedule.kind == Schedule::kSm90 ? "sm90" : "segments";
  throw std::runtime_error(
      "flash_kda: schedule " + name +
      (kHasSm90 ? " needs a device of compute capability 9.0" : " needs a build with FLASH_KDA_CUDA_ARCHS naming 90a"));
}

// Plans of more segments than this are not made: slots are ints, and grids have limits.
constexpr int64_t kMostSlotHeads = int64_t(1) << 28;

// best_plan, remembered: a call asks twice, engines ask for the same shapes over and over, and where one pair can be
// cut into many segments it takes as long as a launch.
SegmentPlan known_best_plan(CallShape const& shape, int multiprocessors) {
  struct Known {
    CallShape shape{};
    int multiprocessors = 0;
    SegmentPlan plan;
  };
  thread_local std::array<Known, 64> known;
  uint64_t const mix = uint64_t(shape.tokens) * 31 + uint64_t(shape.sequences) * 7 + uint64_t(shape.heads);
  Known& entry = known[(mix * 0x9E3779B97F4A7C15u) >> 58];
  if (entry.shape != shape || entry.multiprocessors != multiprocessors) {
    entry = {shape, multiprocessors, best_plan(shape, multiprocessors)};
  }
  return entry.plan;
}

SegmentPlan plan_segments(CallShape const& shape, Schedule schedule, Device const& d) {
  bool const is_forced = schedule.kind == Schedule::kSegments;
  if (!(is_forced || schedule.kind == Schedule::kAuto) || !kHasSm90 || d.capability != 90) return {};
  if (shape.tokens == 0 || shape.sequences == 0 || shape.heads == 0) return {};
  if (is_forced) {
    SegmentPlan plan = schedule.segment_tokens > 0 ? plan_of_tokens(shape, schedule.segment_tokens)
                                                   : known_best_plan(shape, d.multiprocessors);
    if (plan.tokens == 0) plan = plan_of_tokens(shape, kShortestSegment);  // of a chunk at most, on average
    if (plan.slots * shape.heads > kMostSlotHeads) {
      throw std::runtime_error("flash_kda: segments of " + std::to_string(plan.tokens) + " tokens are too many here");
    }
    return plan;
  }
  // Segments go over every token twice: nothing to win where pairs fill half of the device.
  if (2 * shape.sequences * shape.heads > d.multiprocessors) return {};
  SegmentPlan const plan = known_best_plan(shape, d.multiprocessors);
  return plan.tokens > 0 && plan.time < 0.95 * time_of_pairs(shape, d.multiprocessors) ? plan : SegmentPlan{};
}

int64_t bytes_of(SegmentPlan const& plan, CallShape const& shape) {
  return plan.slots * shape.heads * kSegmentStateBytes;
}

template <class Params>
cudaError_t launch(Params const& p, Schedule schedule, int device, cudaStream_t stream, Workspace const& workspace) {
  Device d;
  cudaError_t const status = find_device(d, device);
  if (status != cudaSuccess) return status;
  bool const has_sm90 = kHasSm90 && d.capability == 90;
  require_sm90(schedule, has_sm90);
  Launch const launch = {device, d.multiprocessors, stream};
  bool const is_free = schedule.kind == Schedule::kAuto || schedule.kind == Schedule::kPairs;
  if (is_free && is_decoding(p)) return launch_recurrent(p, launch);
  if (schedule.kind != Schedule::kPortable && has_sm90 && can_sm90(p)) {
    CallShape const shape = {p.num_tokens, p.num_sequences, p.num_heads, p.cu_seqlens != nullptr};
    // Without a workspace, kAuto has been found to take pairs (find_workspace).
    bool const has_none = schedule.kind == Schedule::kAuto && workspace.data == nullptr;
    SegmentPlan plan = has_none ? SegmentPlan{} : plan_segments(shape, schedule, d);
    if (plan.tokens > 0 && (workspace.data == nullptr || workspace.bytes < bytes_of(plan, shape))) {
      if (schedule.kind == Schedule::kSegments) return cudaErrorInvalidValue;
      plan = {};
    }
    cudaError_t const status = launch_sm90(p, plan, workspace, launch);
    if (status != kNotDescribed) return status;
  }
  return portable::fwd(p, launch);
}

// Of segments:TOKENS, written as flash_kda/interface.py takes it; -1: not a number that fits.
int tokens_of(std::string_view digits) {
  constexpr size_t kMostDigits = 9;
  if (digits.empty() || digits.size() > kMostDigits || digits[0] == '0') return -1;
  int tokens = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), tokens);
  bool const is_number = error == std::errc() && end == digits.data() + digits.size();
  return is_number && tokens > 0 && tokens % kShortestSegment == 0 ? tokens : -1;
}

}  // namespace

std::optional<Schedule> find_schedule(std::string_view name) {
  static constexpr std::pair<std::string_view, Schedule::Kind> kKinds[] = {{"auto", Schedule::kAuto},
                                                                           {"pairs", Schedule::kPairs},
                                                                           {"portable", Schedule::kPortable},
                                                                           {"sm90", Schedule::kSm90},
                                                                           {"segments", Schedule::kSegments}};
  for (auto const& [known, kind] : kKinds) {
    if (name == known) return Schedule{kind};
  }
  constexpr std::string_view kPrefix = "segments:";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int const tokens = tokens_of(name.substr(kPrefix.size()));
  return tokens > 0 ? std::optional(Schedule{Schedule::kSegments, tokens}) : std::nullopt;
}

Schedule schedule_of_name(std::string const& name) {
  if (auto const schedule = find_schedule(name)) return *schedule;
  throw std::invalid_argument(
      "flash_kda: schedule: expected auto, pairs, portable, sm90, segments, or segments:TOKENS with a multiple of 16, "
      "got " +
      name);
}

cudaError_t find_workspace(int64_t& bytes, CallShape const& shape, Schedule schedule, int device) {
  Device d;
  cudaError_t const status = find_device(d, device);
  if (status == cudaSuccess) bytes = bytes_of(plan_segments(shape, schedule, d), shape);
  return status;
}

cudaError_t launch_fwd(FwdParams const& p, Schedule schedule, int device, cudaStream_t stream, Workspace workspace) {
  return launch(p, schedule, device, stream, workspace);
}

cudaError_t launch_fwd(GeneralParams const& p, Schedule schedule, int device, cudaStream_t stream,
                       Workspace workspace) {
  if (is_softplus(p)) return launch(SoftplusParams{p}, schedule, device, stream, workspace);
  return launch(p, schedule, device, stream, workspace);
}

}  // namespace flash_kda
