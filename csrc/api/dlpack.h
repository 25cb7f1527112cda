// DLPack's C exchange API (version 1.3), as far as it is used here: a table of functions by which PyTorch 2.10 and
// newer lets others read its tensors without its headers, so that one build still serves every PyTorch. A binary
// interface: the order and the types of the fields are DLPack's, their names are not. tests/test_call.py holds it
// against the header that PyTorch ships.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_kda::dlpack {

constexpr uint32_t kMajor = 1;
// Of the capsule that holds the table.
constexpr char const* kCapsuleName = "dlpack_exchange_api";

struct Device {
  int32_t type;
  int32_t index;
  bool operator==(Device const&) const = default;
};
constexpr int32_t kCpu = 1, kCuda = 2;  // types

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(DataType const&) const = default;
};
constexpr DataType kInt32{0, 32, 1}, kInt64{0, 64, 1}, kUint8{1, 8, 1}, kFp32{2, 32, 1}, kBf16{4, 16, 1};

// Shape and strides (in elements) are the tensor's own: they live as long as it does, and nobody frees them.
struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t const* shape;
  int64_t const* strides;
  uint64_t byte_offset;
};

struct OwnedTensor {
  uint32_t major, minor;
  void* owner;
  void (*release)(OwnedTensor*);
  uint64_t flags;
  Tensor tensor;
};

// Functions return 0, or else leave a Python error (`allocate`: call on_error).
struct Table {
  uint32_t major, minor;
  Table const* previous;  // of an older major version; null: none
  int (*allocate)(Tensor* like, OwnedTensor** result, void* context, void (*on_error)(void*, char const*, char const*));
  int (*own)(void* object, OwnedTensor** result);
  int (*wrap)(OwnedTensor* tensor, void** object);
  int (*view)(void* object, Tensor* result);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

static_assert(sizeof(Tensor) == 48 && sizeof(OwnedTensor) == 80 && sizeof(Table) == 56);

}  // namespace flash_kda::dlpack
