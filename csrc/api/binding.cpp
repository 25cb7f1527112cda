// flash_kda._C: tensors, or their addresses, sizes and strides, in, errors out. It knows PyTorch by DLPack's C exchange
// API alone (call.h), and without that by addresses, so that one build serves every PyTorch.
#include <cuda.h>
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "api/call.h"
#include "api/schedule.h"
#include "common/driver.h"
#include "params.h"

#ifndef FLASH_KDA_ARCHS
#error "define FLASH_KDA_ARCHS: the archs that the kernels are compiled for, as in \"90a,100a\""
#endif

namespace flash_kda {
namespace {

std::vector<std::string> archs() {
  std::vector<std::string> names;
  std::istringstream list(FLASH_KDA_ARCHS);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["archs"] = archs();
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  return info;
}

std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

void check(cudaError_t status, char const* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a failed launch leaves its error behind, and the next caller must not find it
  throw std::runtime_error(std::string("flash_kda: ") + action + " failed: " + describe(status));
}

[[noreturn]] void refuse_device(int device) {
  cudaGetLastError();
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  throw std::runtime_error(std::string("flash_kda: device ") + std::to_string(device) + " (" + properties.name +
                           ", compute capability " + std::to_string(properties.major) + "." +
                           std::to_string(properties.minor) +
                           ") cannot run this build, whose kernels are for " FLASH_KDA_ARCHS
                           "; rebuild with FLASH_KDA_CUDA_ARCHS naming this device's arch (90a, 100a, 103a or 120a)");
}

// Makes `device` current where it is not, and the caller's context current again. A thread that has not called CUDA yet
// has a device, but no context, and tensor maps are not encoded without one. A context that the caller has made current
// on the device stays, whichever it is. By the driver's functions alone: cudaSetDevice would put the primary context in
// its place, and would change which device the runtime takes for that of a thread without a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    auto const get_current = find_driver_function(known_get_, "cuCtxGetCurrent");
    if (get_current == nullptr || get_current(&previous_) != CUDA_SUCCESS) {
      throw std::runtime_error("flash_kda: the driver does not say which context is current");
    }
    int current = 0;
    if (previous_ != nullptr) check(cudaGetDevice(&current), "cudaGetDevice");
    if (previous_ != nullptr && current == device) return;
    auto const set_current = find_driver_function(known_set_, "cuCtxSetCurrent");
    auto const retain = find_driver_function(known_retain_, "cuDevicePrimaryCtxRetain");
    release_ = find_driver_function(known_release_, "cuDevicePrimaryCtxRelease");
    CUcontext primary = nullptr;
    // The runtime numbers devices as the driver does, and a device's number is its handle.
    if (set_current == nullptr || release_ == nullptr || retain == nullptr ||
        retain(&primary, device) != CUDA_SUCCESS) {
      throw std::runtime_error("flash_kda: device " + std::to_string(device) + " has no context to launch kernels in");
    }
    if (set_current(primary) != CUDA_SUCCESS) {
      release_(device);
      throw std::runtime_error("flash_kda: device " + std::to_string(device) + " cannot be made the current one");
    }
    set_current_ = set_current;
  }
  ~DeviceGuard() {
    if (set_current_ == nullptr) return;
    set_current_(previous_);
    release_(device_);  // the tensors' owner holds it, too
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  static inline std::atomic<decltype(&cuCtxGetCurrent)> known_get_ = nullptr;
  static inline std::atomic<decltype(&cuCtxSetCurrent)> known_set_ = nullptr;
  static inline std::atomic<decltype(&cuDevicePrimaryCtxRetain)> known_retain_ = nullptr;
  static inline std::atomic<decltype(&cuDevicePrimaryCtxRelease)> known_release_ = nullptr;
  int device_;
  CUcontext previous_ = nullptr;
  decltype(&cuCtxSetCurrent) set_current_ = nullptr;  // null: nothing was changed
  decltype(&cuDevicePrimaryCtxRelease) release_ = nullptr;
};

template <class T>
T* address(uint64_t a) {
  return reinterpret_cast<T*>(a);
}

TensorView view(uint64_t a, int64_t batch_stride, int64_t token_stride, int64_t head_stride) {
  return {address<void>(a), batch_stride, token_stride, head_stride};
}

template <class Kind>
Kind kind_of_name(std::string const& name, std::initializer_list<std::pair<char const*, Kind>> kinds) {
  for (auto const& [known, kind] : kinds) {
    if (name == known) return kind;
  }
  throw std::invalid_argument("flash_kda: unknown kind: " + name);
}

// The tensors and numbers of every call.
FwdParams params_of(uint64_t q, int64_t q_batch, int64_t q_token, int64_t q_head,              //
                    uint64_t k, int64_t k_batch, int64_t k_token, int64_t k_head,              //
                    uint64_t v, int64_t v_batch, int64_t v_token, int64_t v_head,              //
                    uint64_t g, int64_t g_batch, int64_t g_token, int64_t g_head,              //
                    uint64_t out, int64_t out_batch, int64_t out_token, int64_t out_head,      //
                    uint64_t beta, int64_t beta_batch, int64_t beta_token, int64_t beta_head,  //
                    uint64_t A_log, uint64_t dt_bias, uint64_t initial_state, uint64_t final_state, uint64_t cu_seqlens,
                    int64_t num_tokens, int64_t num_heads, int64_t num_sequences, double scale, double lower_bound,
                    bool state_is_fp32) {
  FwdParams p;
  p.q = view(q, q_batch, q_token, q_head);
  p.k = view(k, k_batch, k_token, k_head);
  p.v = view(v, v_batch, v_token, v_head);
  p.g = view(g, g_batch, g_token, g_head);
  p.out = view(out, out_batch, out_token, out_head);
  p.beta = view(beta, beta_batch, beta_token, beta_head);
  p.A_log = address<float const>(A_log);
  p.dt_bias = address<float const>(dt_bias);
  p.initial_state = address<void const>(initial_state);
  p.final_state = address<void>(final_state);
  p.cu_seqlens = address<int64_t const>(cu_seqlens);
  p.state_is_fp32 = state_is_fp32;
  p.num_tokens = num_tokens;
  p.num_sequences = num_sequences;
  p.num_heads = int(num_heads);
  p.scale = float(scale);
  p.lower_bound = float(lower_bound);
  return p;
}

template <class Params>
void launch(Params const& p, int device, cudaStream_t stream, Schedule schedule, Workspace const& workspace) {
  if (p.num_sequences == 0 || p.num_heads == 0) return;
  DeviceGuard const guard(device);
  cudaError_t const status = launch_fwd(p, schedule, device, stream, workspace);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) refuse_device(device);
  check(status, "the kernel launch");
}

// The caller (flash_kda.fwd) has validated everything; strides count elements.
void fwd(uint64_t q, int64_t q_batch, int64_t q_token, int64_t q_head,              //
         uint64_t k, int64_t k_batch, int64_t k_token, int64_t k_head,              //
         uint64_t v, int64_t v_batch, int64_t v_token, int64_t v_head,              //
         uint64_t g, int64_t g_batch, int64_t g_token, int64_t g_head,              //
         uint64_t out, int64_t out_batch, int64_t out_token, int64_t out_head,      //
         uint64_t beta, int64_t beta_batch, int64_t beta_token, int64_t beta_head,  //
         uint64_t A_log, uint64_t dt_bias, uint64_t initial_state, uint64_t final_state, uint64_t cu_seqlens,
         int64_t num_tokens, int64_t num_heads, int64_t num_sequences, double scale, double lower_bound,
         bool state_is_fp32, int device, uint64_t stream, std::string const& schedule, uint64_t workspace,
         int64_t workspace_size) {
  launch(params_of(q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, g, g_batch,
                   g_token, g_head, out, out_batch, out_token, out_head, beta, beta_batch, beta_token, beta_head, A_log,
                   dt_bias, initial_state, final_state, cu_seqlens, num_tokens, num_heads, num_sequences, scale,
                   lower_bound, state_is_fp32),
         device, address<CUstream_st>(stream), schedule_of_name(schedule), {address<void>(workspace), workspace_size});
}

// What flash_kda.fwd asks for beyond the plain call (GeneralParams), in front of that call's arguments. num_heads
// counts the heads of v; kinds are named.
void fwd_general(uint64_t state_indices, bool state_indices_are_int32, int64_t state_rows, int64_t initial_pitch,
                 int64_t final_pitch,  //
                 uint64_t checkpoints, uint64_t checkpoint_offsets, int64_t checkpoint_rows, int checkpoint_interval,
                 bool checkpoints_at_start, bool checkpoints_are_fp32,  //
                 int group, std::string const& gate, std::string const& beta_kind, bool cu_seqlens_are_int32,
                 bool g_is_fp32, bool beta_is_fp32, bool normalise,  //
                 uint64_t q, int64_t q_batch, int64_t q_token, int64_t q_head, uint64_t k, int64_t k_batch,
                 int64_t k_token, int64_t k_head, uint64_t v, int64_t v_batch, int64_t v_token, int64_t v_head,
                 uint64_t g, int64_t g_batch, int64_t g_token, int64_t g_head, uint64_t out, int64_t out_batch,
                 int64_t out_token, int64_t out_head, uint64_t beta, int64_t beta_batch, int64_t beta_token,
                 int64_t beta_head, uint64_t A_log, uint64_t dt_bias, uint64_t initial_state, uint64_t final_state,
                 uint64_t cu_seqlens, int64_t num_tokens, int64_t num_heads, int64_t num_sequences, double scale,
                 double lower_bound, bool state_is_fp32, int device, uint64_t stream, std::string const& schedule,
                 uint64_t workspace, int64_t workspace_size) {
  GeneralParams p;
  static_cast<FwdParams&>(p) = params_of(
      q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, g, g_batch, g_token,
      g_head, out, out_batch, out_token, out_head, beta, beta_batch, beta_token, beta_head, A_log, dt_bias,
      initial_state, final_state, cu_seqlens, num_tokens, num_heads, num_sequences, scale, lower_bound, state_is_fp32);
  p.state_indices = address<void const>(state_indices);
  p.state_rows = state_rows;
  p.initial_pitch = initial_pitch;
  p.final_pitch = final_pitch;
  p.checkpoints = {address<void>(checkpoints),
                   address<int64_t const>(checkpoint_offsets),
                   checkpoint_rows,
                   checkpoint_interval,
                   checkpoints_at_start,
                   checkpoints_are_fp32};
  p.group = group;
  p.gate = kind_of_name<GateKind>(
      gate, {{"sigmoid", GateKind::kSigmoid}, {"softplus", GateKind::kSoftplus}, {"log", GateKind::kLog}});
  p.beta_kind = kind_of_name<BetaKind>(beta_kind, {{"sigmoid", BetaKind::kSigmoid},
                                                   {"twice sigmoid", BetaKind::kTwiceSigmoid},
                                                   {"activated", BetaKind::kActivated}});
  p.state_indices_are_int32 = state_indices_are_int32;
  p.cu_seqlens_are_int32 = cu_seqlens_are_int32;
  p.g_is_fp32 = g_is_fp32;
  p.beta_is_fp32 = beta_is_fp32;
  p.normalise = normalise;
  launch(p, device, address<CUstream_st>(stream), schedule_of_name(schedule),
         {address<void>(workspace), workspace_size});
}

int64_t needed_workspace(CallShape const& shape, Schedule schedule, int device) {
  int64_t bytes = 0;
  check(find_workspace(bytes, shape, schedule, device), "asking for the device's properties");
  return bytes;
}

// Bytes that a call of this form needs for its schedule: num_heads counts the heads of v.
int64_t workspace_bytes(int64_t num_tokens, int64_t num_heads, int64_t num_sequences, bool is_packed, int device,
                        std::string const& schedule) {
  return needed_workspace({num_tokens, num_sequences, num_heads, is_packed}, schedule_of_name(schedule), device);
}

std::optional<Torch> known_torch;

// What fwd_tensors reads tensors with: a capsule of DLPack's table, the types of tensors, and torch.is_grad_enabled.
// False, if the table is of no known version; fwd_tensors then takes no call.
bool read_tensors_with(pybind11::object capsule, pybind11::object tensor, pybind11::object parameter,
                       pybind11::object is_grad_enabled) {
  dlpack::Table const* const table = find_table(capsule.ptr());
  if (table == nullptr) return false;
  // For as long as the process lives, as modules do that were imported.
  known_torch = {table, tensor.release().ptr(), parameter.release().ptr(), is_grad_enabled.release().ptr()};
  return true;
}

struct Release {
  void operator()(dlpack::OwnedTensor* tensor) const { tensor->release(tensor); }
};
using OwnedTensor = std::unique_ptr<dlpack::OwnedTensor, Release>;

// From PyTorch's allocator, for the current stream of the device; null, if that failed.
OwnedTensor allocate(int64_t bytes, dlpack::Device device) {
  int64_t const stride = 1;
  dlpack::Tensor like = {nullptr, device, 1, dlpack::kUint8, &bytes, &stride, 0};
  dlpack::OwnedTensor* result = nullptr;
  int const status = known_torch->table->allocate(&like, &result, nullptr, [](void*, char const*, char const*) {});
  return OwnedTensor(status == 0 ? result : nullptr);
}

// Whether the call was launched. False is no error: the caller then goes the slow way, which words the errors.
bool launch_tensors(PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  if (!known_torch || !read_call(call, *known_torch, arguments, count)) return false;
  if (call.device.type != dlpack::kCuda) return false;
  GeneralParams const& p = call.params;
  // os.environ hands changes on to the C library; nobody makes any while this thread holds the GIL.
  char const* const name = std::getenv("FLASH_KDA_SCHEDULE");
  std::optional<Schedule> const schedule = find_schedule(name == nullptr ? "auto" : name);
  if (!schedule) return false;
  void* stream = nullptr;
  if (known_torch->table->current_stream(dlpack::kCuda, call.device.index, &stream) != 0) {
    PyErr_Clear();
    return false;
  }
  CallShape const shape = {p.num_tokens, p.num_sequences, p.num_heads, p.cu_seqlens != nullptr};
  Workspace workspace = {nullptr, needed_workspace(shape, *schedule, call.device.index)};
  // Given back when the kernels have been launched: the allocator keeps the order of the stream.
  OwnedTensor memory;
  if (workspace.bytes > 0) {
    memory = allocate(workspace.bytes, call.device);
    if (!memory || memory->tensor.data == nullptr) return false;
    workspace.data = static_cast<char*>(memory->tensor.data) + memory->tensor.byte_offset;
  }
  auto const launch_as = [&](auto const& params) {
    launch(params, call.device.index, static_cast<cudaStream_t>(stream), *schedule, workspace);
  };
  call.is_plain ? launch_as(static_cast<FwdParams const&>(p)) : launch_as(p);
  return true;
}

// The arguments of flash_kda.fwd by position. A function of Python's own calling convention: pybind11 would take longer
// to hand over the arguments than all of the checks.
PyObject* fwd_tensors(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return PyBool_FromLong(launch_tensors(arguments, count));
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {{"fwd_tensors", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fwd_tensors)),
                          METH_FASTCALL, "Whether the call was launched; flash_kda.fwd's arguments by position"},
                         {}};

}  // namespace
}  // namespace flash_kda

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &flash_kda::build_info);
  m.def("workspace_bytes", &flash_kda::workspace_bytes);
  m.def("fwd", &flash_kda::fwd);
  m.def("fwd_general", &flash_kda::fwd_general);
  m.def("read_tensors_with", &flash_kda::read_tensors_with);
  if (PyModule_AddFunctions(m.ptr(), flash_kda::methods) != 0) throw pybind11::error_already_set();
}
