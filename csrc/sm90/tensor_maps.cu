#include "sm90/tensor_maps.h"

#include "common/stage.h"

namespace flash_kda::sm90 {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder by way of the runtime: the library links no libcuda.
Encoder find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaError_t const status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Encoder>(function);
}

bool encode(CUtensorMap& map, TensorView const& t, int heads, FwdParams const& p) {
  static Encoder const encoder = find_encoder();
  if (encoder == nullptr) return false;
  int64_t const batches = p.cu_seqlens == nullptr ? p.num_sequences : 1;
  cuuint64_t const sizes[4] = {cuuint64_t(kHeadDim), cuuint64_t(heads), cuuint64_t(p.num_tokens), cuuint64_t(batches)};
  // The stride of a dimension of size one is never used, and may be anything in a tensor.
  auto const bytes = [](int64_t stride, int64_t size) {
    return cuuint64_t((size == 1 ? kHeadDim : stride) * int64_t(sizeof(bf16)));
  };
  cuuint64_t const strides[3] = {bytes(t.head_stride, heads), bytes(t.token_stride, p.num_tokens),
                                 bytes(t.batch_stride, batches)};
  cuuint32_t const box[4] = {kPanel, 1, kChunk, 1};
  cuuint32_t const steps[4] = {1, 1, 1, 1};
  for (cuuint64_t const stride : strides) {
    if (stride == 0) return false;
  }
  return encoder(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, t.data, sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool make_tensor_maps(TensorMaps& maps, FwdParams const& p) {
  return encode(maps.q, p.q, p.num_heads, p) && encode(maps.k, p.k, p.num_heads, p) &&
         encode(maps.v, p.v, p.num_heads, p) && encode(maps.g, p.g, p.num_heads, p);
}

bool make_tensor_maps(TensorMaps& maps, GeneralParams const& p) {
  int const key_heads = p.num_heads / p.group;
  return encode(maps.q, p.q, key_heads, p) && encode(maps.k, p.k, key_heads, p) &&
         encode(maps.v, p.v, p.num_heads, p) && (p.g_is_fp32 || encode(maps.g, p.g, p.num_heads, p));
}

}  // namespace flash_kda::sm90
