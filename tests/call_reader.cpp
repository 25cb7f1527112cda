// csrc/api/call.cpp for tests: what a call is read as, without kernels or a GPU; and DLPack's binary interface against
// the header that PyTorch ships.
#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "api/call.h"

namespace flash_kda {
namespace {

#define SAME_FIELD(ours, field, theirs, name) \
  static_assert(offsetof(ours, field) == offsetof(theirs, name) && sizeof(ours::field) == sizeof(theirs::name))

SAME_FIELD(dlpack::Tensor, data, DLTensor, data);
SAME_FIELD(dlpack::Tensor, device, DLTensor, device);
SAME_FIELD(dlpack::Tensor, rank, DLTensor, ndim);
SAME_FIELD(dlpack::Tensor, dtype, DLTensor, dtype);
SAME_FIELD(dlpack::Tensor, shape, DLTensor, shape);
SAME_FIELD(dlpack::Tensor, strides, DLTensor, strides);
SAME_FIELD(dlpack::Tensor, byte_offset, DLTensor, byte_offset);
SAME_FIELD(dlpack::Device, type, DLDevice, device_type);
SAME_FIELD(dlpack::Device, index, DLDevice, device_id);
SAME_FIELD(dlpack::DataType, code, DLDataType, code);
SAME_FIELD(dlpack::DataType, bits, DLDataType, bits);
SAME_FIELD(dlpack::DataType, lanes, DLDataType, lanes);
SAME_FIELD(dlpack::OwnedTensor, major, DLManagedTensorVersioned, version.major);
SAME_FIELD(dlpack::OwnedTensor, minor, DLManagedTensorVersioned, version.minor);
SAME_FIELD(dlpack::OwnedTensor, owner, DLManagedTensorVersioned, manager_ctx);
SAME_FIELD(dlpack::OwnedTensor, release, DLManagedTensorVersioned, deleter);
SAME_FIELD(dlpack::OwnedTensor, flags, DLManagedTensorVersioned, flags);
SAME_FIELD(dlpack::OwnedTensor, tensor, DLManagedTensorVersioned, dl_tensor);
SAME_FIELD(dlpack::Table, major, DLPackExchangeAPI, header.version.major);
SAME_FIELD(dlpack::Table, minor, DLPackExchangeAPI, header.version.minor);
SAME_FIELD(dlpack::Table, previous, DLPackExchangeAPI, header.prev_api);
SAME_FIELD(dlpack::Table, allocate, DLPackExchangeAPI, managed_tensor_allocator);
SAME_FIELD(dlpack::Table, own, DLPackExchangeAPI, managed_tensor_from_py_object_no_sync);
SAME_FIELD(dlpack::Table, wrap, DLPackExchangeAPI, managed_tensor_to_py_object_no_sync);
SAME_FIELD(dlpack::Table, view, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
SAME_FIELD(dlpack::Table, current_stream, DLPackExchangeAPI, current_work_stream);
static_assert(dlpack::kMajor == DLPACK_MAJOR_VERSION && dlpack::kCpu == kDLCPU && dlpack::kCuda == kDLCUDA);
static_assert(dlpack::kInt64.code == kDLInt && dlpack::kUint8.code == kDLUInt && dlpack::kFp32.code == kDLFloat &&
              dlpack::kBf16.code == kDLBfloat);

template <class T>
uint64_t number(T* address) {
  return reinterpret_cast<uint64_t>(address);
}

char const* name_of(GateKind gate) {
  return gate == GateKind::kLog ? "log" : gate == GateKind::kSoftplus ? "softplus" : "sigmoid";
}

char const* name_of(BetaKind beta) {
  return beta == BetaKind::kActivated ? "activated" : beta == BetaKind::kTwiceSigmoid ? "twice sigmoid" : "sigmoid";
}

// In the form of flash_kda.interface.numbers_of; None for a call that is not read.
pybind11::object read(pybind11::capsule table, pybind11::object tensor, pybind11::object parameter,
                      pybind11::object is_grad_enabled, pybind11::tuple arguments) {
  Torch const torch = {find_table(table.ptr()), tensor.ptr(), parameter.ptr(), is_grad_enabled.ptr()};
  std::vector<PyObject*> objects;
  for (auto const& x : arguments) objects.push_back(x.ptr());
  Call call;
  bool const is_read = read_call(call, torch, objects.data(), Py_ssize_t(objects.size()));
  if (PyErr_Occurred()) throw pybind11::error_already_set();
  if (!is_read) return pybind11::none();

  GeneralParams const& p = call.params;
  pybind11::list numbers;
  auto const add = [&](auto const&... values) { (numbers.append(values), ...); };
  if (!call.is_plain) {
    Checkpoints const& c = p.checkpoints;
    add(number(p.state_indices), p.state_indices_are_int32, p.state_rows, p.initial_pitch, p.final_pitch);
    add(number(c.data), number(c.offsets), c.rows, c.interval, c.at_start, c.is_fp32);
    add(p.group, name_of(p.gate), name_of(p.beta_kind), p.cu_seqlens_are_int32, p.g_is_fp32, p.beta_is_fp32,
        p.normalise);
  }
  for (TensorView const& x : {p.q, p.k, p.v, p.g, p.out, p.beta}) {
    add(number(x.data), x.batch_stride, x.token_stride, x.head_stride);
  }
  add(number(p.A_log), number(p.dt_bias), number(p.initial_state), number(p.final_state), number(p.cu_seqlens));
  add(p.num_tokens, p.num_heads, p.num_sequences, p.scale, p.lower_bound, p.state_is_fp32);
  return pybind11::make_tuple(pybind11::tuple(numbers), call.is_plain);
}

}  // namespace
}  // namespace flash_kda

PYBIND11_MODULE(call_reader, m) {
  m.def("read", &flash_kda::read);
  m.def("is_table", [](pybind11::object x) { return flash_kda::find_table(x.ptr()) != nullptr; });
}
