#include "api/call.h"

#include <array>
#include <cfloat>
#include <cmath>
#include <initializer_list>
#include <optional>

namespace flash_kda {
namespace {

// The limits of flash_kda/validation.py.
constexpr double kLeastLowerBound = -5;
constexpr uint64_t kAlignment = 16;
constexpr int64_t kMostTokens = (int64_t(1) << 31) - 256, kMostPairs = (int64_t(1) << 31) - 1;
constexpr int64_t kMostHeads = (1 << 24) - 1, kCheckpointUnit = 64;

// The arguments of flash_kda.fwd, in order.
enum Name {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kScale,
  kOut,
  kALog,
  kDtBias,
  kLowerBound,
  kInitialState,
  kFinalState,
  kCuSeqlens,
  kStateIndices,
  kCheckpoints,
  kCheckpointInterval,
  kCheckpointOffsets,
  kCheckpointAt,
  kGate,
  kNormalise,
  kBetaSigmoid,
  kNegEigval,
  kEnd
};
static_assert(kStateIndices == kPositionalArguments && kEnd == kArguments);

constexpr Name kRequired[] = {kQ, kK, kV, kG, kBeta, kOut};
constexpr Name kOptional[] = {kALog,      kDtBias,       kInitialState, kFinalState,
                              kCuSeqlens, kStateIndices, kCheckpoints,  kCheckpointOffsets};

// A tensor, or nothing: an address range that meets no other.
struct Argument : dlpack::Tensor {
  Argument() : dlpack::Tensor{} {}

  explicit operator bool() const { return start != 0; }
  bool is(dlpack::DataType type) const { return dtype == type; }
  int64_t bytes() const { return dtype.bits / 8; }
  template <class T>
  T* address() const {
    return reinterpret_cast<T*>(start);
  }

  bool has_shape(std::initializer_list<int64_t> expected) const {
    if (rank != int32_t(expected.size())) return false;
    int i = 0;
    for (int64_t const size : expected) {
      if (shape[i++] != size) return false;
    }
    return true;
  }

  // From dimension `first` on.
  bool is_contiguous(int first = 0) const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= first; --i) {
      if (shape[i] > 1 && strides[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }

  bool meets(Argument const& other) const { return start < other.end && other.start < end; }

  uint64_t start = 0, end = 0;  // addresses of the first byte, and behind the last
};

// Contiguous channels, rows that start on 16-byte boundaries.
bool has_rows(Argument const& x) {
  int64_t const unit = kAlignment / x.bytes();
  for (int i = 0; i < 3; ++i) {
    if (x.shape[i] > 1 && x.strides[i] % unit != 0) return false;
  }
  return x.strides[3] == 1 && x.start % kAlignment == 0;
}

// Each dimension steps over those inside it, in the order [B, T, H] or [B, H, T].
bool has_rows_apart(Argument const& x) {
  auto const is_nested = [&](std::initializer_list<int> inside_out) {
    int64_t extent = kHeadDim;
    for (int const i : inside_out) {
      if (x.shape[i] == 1) continue;
      if (x.strides[i] < extent) return false;
      extent += x.strides[i] * (x.shape[i] - 1);
    }
    return true;
  };
  return is_nested({2, 1, 0}) || is_nested({1, 2, 0});
}

// Contiguous rows that may lie apart.
bool is_pool(Argument const& x) {
  int64_t const row = x.shape[1] * x.shape[2] * x.shape[3], unit = kAlignment / x.bytes();
  bool const is_apart = x.shape[0] == 1 || (x.strides[0] >= row && x.strides[0] % unit == 0);
  return is_apart && x.is_contiguous(1) && x.start % kAlignment == 0;
}

int64_t pitch_of(Argument const& pool) { return pool && pool.shape[0] > 1 ? pool.strides[0] : 0; }

TensorView view_of(Argument const& x) { return {x.address<void>(), x.strides[0], x.strides[1], x.strides[2]}; }

std::optional<double> number_of(PyObject* x) {
  if (PyFloat_CheckExact(x)) return PyFloat_AS_DOUBLE(x);
  if (!PyLong_CheckExact(x)) return std::nullopt;
  double const value = PyLong_AsDouble(x);
  if (value != -1.0 || !PyErr_Occurred()) return value;
  PyErr_Clear();
  return std::nullopt;
}

std::optional<bool> bool_of(PyObject* x) {
  if (x == Py_True) return true;
  if (x == Py_False) return false;
  return std::nullopt;
}

// Whether x is `yes`; nothing, if it is not `no` either.
std::optional<bool> choice_of(PyObject* x, char const* yes, char const* no) {
  if (!PyUnicode_CheckExact(x)) return std::nullopt;
  if (PyUnicode_CompareWithASCIIString(x, yes) == 0) return true;
  if (PyUnicode_CompareWithASCIIString(x, no) == 0) return false;
  return std::nullopt;
}

// Whether what a call of Python's gave is False; takes the reference.
bool is_false(PyObject* result) {
  bool const answer = result == Py_False;
  if (result == nullptr) PyErr_Clear();
  Py_XDECREF(result);
  return answer;
}

bool needs_no_gradient(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return is_false(PyObject_GetAttr(tensor, name));
}

// That it is not lazily negated.
bool holds_its_values(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  return is_false(PyObject_CallMethodNoArgs(tensor, name));
}

class Reader {
 public:
  Reader(Torch const& torch, PyObject* const* arguments, Py_ssize_t count)
      : torch_(torch), arguments_(arguments), count_(count) {}

  bool read(Call& call) {
    if (count_ != kPositionalArguments && count_ != kArguments) return false;
    GeneralParams& p = call.params = {};
    if (!read_tensors() || !read_shapes(p) || !read_states(p) || !read_numbers(p) || !read_options(p)) return false;
    if (!are_apart()) return false;
    p.q = view_of(x_[kQ]);
    p.k = view_of(x_[kK]);
    p.v = view_of(x_[kV]);
    p.g = view_of(x_[kG]);
    p.out = view_of(x_[kOut]);
    p.beta = view_of(x_[kBeta]);
    p.A_log = x_[kALog].address<float const>();
    p.dt_bias = x_[kDtBias].address<float const>();
    p.cu_seqlens = x_[kCuSeqlens].address<int64_t const>();
    p.cu_seqlens_are_int32 = x_[kCuSeqlens].is(dlpack::kInt32);
    p.g_is_fp32 = x_[kG].is(dlpack::kFp32);
    p.beta_is_fp32 = x_[kBeta].is(dlpack::kFp32);
    call.device = x_[kQ].device;
    call.is_plain = count_ == kPositionalArguments && p.group == 1 && !p.g_is_fp32 && !p.beta_is_fp32 &&
                    p.A_log != nullptr && p.dt_bias != nullptr && p.gate == GateKind::kSigmoid &&
                    !p.cu_seqlens_are_int32 && x_[kInitialState].is_contiguous() && x_[kFinalState].is_contiguous();
    return true;
  }

 private:
  PyObject* object(Name name) const { return name < count_ ? arguments_[name] : Py_None; }

  // With elements, of a type that holds nothing but them.
  bool read_tensor(Name name) {
    Argument& x = x_[name];
    PyObject* const tensor = arguments_[name];
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != torch_.tensor && type != torch_.parameter) return false;
    // Fails for what has no memory of its own: sparse and nested tensors, what torch.func wraps.
    if (torch_.table->view(tensor, &x) != 0) {
      PyErr_Clear();
      return false;
    }
    if (x.data == nullptr || x.shape == nullptr || x.strides == nullptr || x.dtype.lanes != 1) return false;
    x.start = reinterpret_cast<uint64_t>(x.data) + x.byte_offset;
    int64_t last = 0;
    for (int i = 0; i < x.rank; ++i) {
      if (x.shape[i] == 0 || x.strides[i] < 0) return false;
      last += (x.shape[i] - 1) * x.strides[i];
    }
    x.end = x.start + (last + 1) * x.bytes();
    return x.device == x_[kQ].device && (!is_grad_enabled_ || needs_no_gradient(tensor));
  }

  bool read_tensors() {
    is_grad_enabled_ = !is_false(PyObject_CallNoArgs(torch_.is_grad_enabled));
    for (Name const name : kRequired) {
      if (!read_tensor(name)) return false;
    }
    for (Name const name : kOptional) {
      if (object(name) != Py_None && !read_tensor(name)) return false;
    }
    int32_t const device = x_[kQ].device.type;
    return device == dlpack::kCpu || device == dlpack::kCuda;
  }

  bool has_shape_and_type(Name name, std::initializer_list<int64_t> shape, dlpack::DataType type,
                          dlpack::DataType other) const {
    return (x_[name].is(type) || x_[name].is(other)) && x_[name].has_shape(shape);
  }

  // The same, and contiguous; or not there.
  bool is_vector(Name name, int64_t size, dlpack::DataType type, dlpack::DataType other) const {
    return !x_[name] || (has_shape_and_type(name, {size}, type, other) && x_[name].is_contiguous());
  }

  bool read_shapes(GeneralParams& p) const {
    using namespace dlpack;
    Argument const &q = x_[kQ], &v = x_[kV], &cu_seqlens = x_[kCuSeqlens], &dt_bias = x_[kDtBias];
    if (q.rank != 4 || v.rank != 4) return false;
    int64_t const B = q.shape[0], T = q.shape[1], H = q.shape[2], HV = v.shape[2];
    if (cu_seqlens && (B != 1 || cu_seqlens.rank != 1)) return false;
    int64_t const N = cu_seqlens ? cu_seqlens.shape[0] - 1 : B;
    if (T > kMostTokens || HV % H != 0 || HV > kMostHeads || N == 0 || N > kMostPairs / HV) return false;
    for (Name const name : {kQ, kK}) {
      if (!has_shape_and_type(name, {B, T, H, kHeadDim}, kBf16, kBf16)) return false;
    }
    for (Name const name : {kV, kG, kOut}) {
      if (!has_shape_and_type(name, {B, T, HV, kHeadDim}, kBf16, name == kG ? kFp32 : kBf16)) return false;
    }
    for (Name const name : {kQ, kK, kV, kG, kOut}) {
      if (!has_rows(x_[name])) return false;
    }
    if (!has_rows_apart(x_[kOut]) || !has_shape_and_type(kBeta, {B, T, HV}, kBf16, kFp32)) return false;
    if (!is_vector(kALog, HV, kFp32, kFp32)) return false;
    // Lazily negated is the imaginary part of a conjugate: every other fp32 number. No other tensor can have such
    // strides.
    if (x_[kBeta].is(kFp32) && !holds_its_values(arguments_[kBeta])) return false;
    if (x_[kALog] && HV == 1 && !holds_its_values(arguments_[kALog])) return false;
    if (dt_bias && dt_bias.rank == 2) {
      if (!has_shape_and_type(kDtBias, {HV, kHeadDim}, kFp32, kFp32) || !dt_bias.is_contiguous()) return false;
    } else if (!is_vector(kDtBias, HV * kHeadDim, kFp32, kFp32)) {
      return false;
    }
    p.num_tokens = T;
    p.num_heads = int(HV);
    p.num_sequences = N;
    p.group = int(HV / H);
    return is_vector(kCuSeqlens, N + 1, kInt64, kInt32) && is_vector(kStateIndices, N, kInt64, kInt32) &&
           is_vector(kCheckpointOffsets, N + 1, kInt64, kInt64);
  }

  bool is_state(Name name, int64_t rows, int64_t heads) const {
    return has_shape_and_type(name, {rows, heads, kHeadDim, kHeadDim}, dlpack::kBf16, dlpack::kFp32) &&
           is_pool(x_[name]);
  }

  // Of the states; whether there may be indices.
  bool read_states(GeneralParams& p) const {
    Argument const &initial = x_[kInitialState], &last = x_[kFinalState], &indices = x_[kStateIndices];
    Argument const& state = initial ? initial : last;
    if (!state) return !indices;
    if (state.rank != 4) return false;
    int64_t const rows = indices ? state.shape[0] : p.num_sequences;
    for (Name const name : {kInitialState, kFinalState}) {
      if (x_[name] && (!x_[name].is(state.dtype) || !is_state(name, rows, p.num_heads))) return false;
    }
    p.initial_state = initial.address<void const>();
    p.final_state = last.address<void>();
    p.state_is_fp32 = state.is(dlpack::kFp32);
    p.state_indices = indices.address<void const>();
    p.state_indices_are_int32 = indices.is(dlpack::kInt32);
    p.state_rows = state.shape[0];
    p.initial_pitch = pitch_of(initial);
    p.final_pitch = pitch_of(last);
    return true;
  }

  bool read_numbers(GeneralParams& p) const {
    auto const scale = number_of(object(kScale));
    if (!scale || !(std::abs(*scale) <= FLT_MAX)) return false;
    p.scale = float(*scale);
    p.gate = GateKind::kSoftplus;
    p.lower_bound = -1;
    if (object(kLowerBound) == Py_None) return true;
    auto const bound = number_of(object(kLowerBound));
    if (!bound || !(kLeastLowerBound <= *bound && *bound < 0)) return false;
    p.gate = GateKind::kSigmoid;
    p.lower_bound = float(*bound);
    return true;
  }

  bool read_options(GeneralParams& p) const {
    p.normalise = true;
    p.beta_kind = BetaKind::kSigmoid;
    if (count_ == kPositionalArguments) return true;
    auto const is_log = choice_of(object(kGate), "log", "raw"),
               at_start = choice_of(object(kCheckpointAt), "start", "end");
    auto const normalise = bool_of(object(kNormalise)), sigmoid = bool_of(object(kBetaSigmoid)),
               twice = bool_of(object(kNegEigval));
    if (!is_log || !at_start || !normalise || !sigmoid || !twice || (*twice && !*sigmoid)) return false;
    if (*is_log) {
      if (x_[kALog] || x_[kDtBias] || p.gate != GateKind::kSoftplus) return false;
      p.gate = GateKind::kLog;
    }
    p.normalise = *normalise;
    if (!*sigmoid) p.beta_kind = BetaKind::kActivated;
    if (*twice) p.beta_kind = BetaKind::kTwiceSigmoid;
    p.checkpoints.at_start = *at_start;
    return read_checkpoints(p);
  }

  bool read_checkpoints(GeneralParams& p) const {
    Argument const &checkpoints = x_[kCheckpoints], &offsets = x_[kCheckpointOffsets];
    PyObject* const interval = object(kCheckpointInterval);
    if (!checkpoints) return interval == Py_None && !offsets;
    if (!offsets || !PyLong_CheckExact(interval) || checkpoints.rank != 4) return false;
    int overflow = 0;
    int64_t const tokens = PyLong_AsLongLongAndOverflow(interval, &overflow);
    if (overflow != 0 || tokens <= 0 || tokens % kCheckpointUnit != 0 || tokens > kMostTokens) return false;
    int64_t const rows = checkpoints.shape[0];
    if (!is_state(kCheckpoints, rows, p.num_heads) || !checkpoints.is_contiguous()) return false;
    p.checkpoints.data = checkpoints.address<void>();
    p.checkpoints.offsets = offsets.address<int64_t const>();
    p.checkpoints.rows = rows;
    p.checkpoints.interval = int(tokens);
    p.checkpoints.is_fp32 = checkpoints.is(dlpack::kFp32);
    return true;
  }

  // Whether no output meets another tensor.
  bool are_apart() const {
    auto const is_apart = [&](Name output, Name name) {
      if (name == output || !x_[output].meets(x_[name])) return true;
      // Updated in place. Shapes and dtypes are the same.
      bool const are_states = output == kFinalState && name == kInitialState;
      return are_states && x_[output].start == x_[name].start && x_[output].end == x_[name].end;
    };
    for (Name const output : {kOut, kFinalState, kCheckpoints}) {
      for (Name const name : kRequired) {
        if (!is_apart(output, name)) return false;
      }
      for (Name const name : kOptional) {
        if (!is_apart(output, name)) return false;
      }
    }
    return true;
  }

  Torch const& torch_;
  PyObject* const* arguments_;
  Py_ssize_t count_;
  bool is_grad_enabled_ = true;
  std::array<Argument, kEnd> x_;
};

}  // namespace

dlpack::Table const* find_table(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, dlpack::kCapsuleName)) return nullptr;
  auto const* table = static_cast<dlpack::Table const*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  while (table != nullptr && table->major != dlpack::kMajor) table = table->previous;
  bool const has_all =
      table != nullptr && table->allocate != nullptr && table->view != nullptr && table->current_stream != nullptr;
  return has_all ? table : nullptr;
}

bool read_call(Call& call, Torch const& torch, PyObject* const* arguments, Py_ssize_t count) {
  return Reader(torch, arguments, count).read(call);
}

}  // namespace flash_kda
