#include "sm90/tensor_maps.h"

#include <atomic>

#include "common/driver.h"
#include "common/stage.h"

namespace flash_kda::sm90 {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);

Encoder find_encoder() {
  static std::atomic<Encoder> known = nullptr;
  return find_driver_function(known, "cuTensorMapEncodeTiled");
}

// Sizes and strides, in bytes, of the dimensions outside the channels: head, token, batch.
struct Extents {
  cuuint64_t size[3];
  cuuint64_t stride[3];
};

Extents extents_of(TensorView const& t, int heads, FwdParams const& p) {
  int64_t const batches = p.cu_seqlens == nullptr ? p.num_sequences : 1;
  // The stride of a dimension of size one is never used, and may be anything in a tensor.
  auto const bytes = [](int64_t stride, int64_t size) {
    return cuuint64_t((size == 1 ? kHeadDim : stride) * int64_t(sizeof(bf16)));
  };
  return {{cuuint64_t(heads), cuuint64_t(p.num_tokens), cuuint64_t(batches)},
          {bytes(t.head_stride, heads), bytes(t.token_stride, p.num_tokens), bytes(t.batch_stride, batches)}};
}

// The limits of cuTensorMapEncodeTiled that validated inputs can still miss.
bool can_describe(TensorView const& t, int heads, FwdParams const& p) {
  constexpr cuuint64_t kMostSize = cuuint64_t(1) << 32, kMostStride = cuuint64_t(1) << 40;
  Extents const extents = extents_of(t, heads, p);
  for (int i = 0; i < 3; ++i) {
    if (extents.size[i] == 0 || extents.size[i] > kMostSize) return false;
    if (extents.stride[i] == 0 || extents.stride[i] >= kMostStride || extents.stride[i] % 16 != 0) return false;
  }
  return true;
}

cudaError_t encode(CUtensorMap& map, TensorView const& t, int heads, FwdParams const& p, Encoder encoder) {
  Extents const e = extents_of(t, heads, p);
  cuuint64_t const sizes[4] = {cuuint64_t(kHeadDim), e.size[0], e.size[1], e.size[2]};
  cuuint32_t const box[4] = {kPanel, 1, kChunk, 1};
  cuuint32_t const steps[4] = {1, 1, 1, 1};
  CUresult const result = encoder(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, t.data, sizes, e.stride, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return cudaSuccess;
  return result == CUDA_ERROR_INVALID_VALUE ? cudaErrorInvalidValue : cudaErrorUnknown;
}

int key_heads(FwdParams const& p) { return p.num_heads; }
int key_heads(GeneralParams const& p) { return p.num_heads / p.group; }

// An fp32 g does not go through the stages.
bool has_g(FwdParams const&) { return true; }
bool has_g(GeneralParams const& p) { return !p.g_is_fp32; }

}  // namespace

template <class Params>
bool can_describe(Params const& p) {
  return can_describe(p.q, key_heads(p), p) && can_describe(p.k, key_heads(p), p) &&
         can_describe(p.v, p.num_heads, p) && (!has_g(p) || can_describe(p.g, p.num_heads, p));
}

template <class Params>
cudaError_t make_tensor_maps(TensorMaps& maps, Params const& p) {
  Encoder const encoder = find_encoder();
  if (encoder == nullptr) return cudaErrorSymbolNotFound;
  cudaError_t status = encode(maps.q, p.q, key_heads(p), p, encoder);
  if (status == cudaSuccess) status = encode(maps.k, p.k, key_heads(p), p, encoder);
  if (status == cudaSuccess) status = encode(maps.v, p.v, p.num_heads, p, encoder);
  if (status == cudaSuccess && has_g(p)) status = encode(maps.g, p.g, p.num_heads, p, encoder);
  return status;
}

template bool can_describe(FwdParams const&);
template bool can_describe(GeneralParams const&);
template bool can_describe(SoftplusParams const&);
template cudaError_t make_tensor_maps(TensorMaps&, FwdParams const&);
template cudaError_t make_tensor_maps(TensorMaps&, GeneralParams const&);
template cudaError_t make_tensor_maps(TensorMaps&, SoftplusParams const&);

}  // namespace flash_kda::sm90
