// Single operations whose rounding PyTorch cannot express, for tests/torch_ref.py: fused multiply-add, the approximate
// special functions, and the tensor core's accumulation order. Each is the bare instruction, one element or one tile at
// a time; what they are composed to is torch_ref.py's business. Plain functions on addresses: built in seconds, called
// by ctypes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;

struct Exp2Approx {
  __device__ float operator()(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};
struct RcpApprox {
  __device__ float operator()(float x) const {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};
struct RsqrtApprox {
  __device__ float operator()(float x) const {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};
struct ExpAccurate {
  __device__ float operator()(float x) const { return expf(x); }
};

int64_t blocks(int64_t n) { return (n + kThreads - 1) / kThreads; }

template <class Op>
__global__ void unary_kernel(float const* x, float* y, int64_t n) {
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i < n) y[i] = Op{}(x[i]);
}

template <class Op>
int unary(float const* x, float* y, int64_t n, cudaStream_t stream) {
  unary_kernel<Op><<<blocks(n), kThreads, 0, stream>>>(x, y, n);
  return cudaGetLastError();
}

__global__ void fma_kernel(float const* a, float const* b, float const* c, float* y, int64_t n) {
  int64_t const i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i < n) y[i] = __fmaf_rn(a[i], b[i], c[i]);
}

__device__ uint32_t pair(__nv_bfloat16 const* p) { return *reinterpret_cast<uint32_t const*>(p); }

// One warp makes one 16 x 8 tile of c + a b^T by mma.m16n8k16, depth in ascending steps of 16.
__global__ void mma_kernel(__nv_bfloat16 const* a, __nv_bfloat16 const* b, float const* c, float* y, int m, int n,
                           int depth) {
  int const lane = threadIdx.x, row = lane / 4, column = 2 * (lane % 4);
  int64_t const batch = blockIdx.x;
  int const m0 = 16 * blockIdx.y, n0 = 8 * blockIdx.z;
  a += (batch * m + m0 + row) * depth + column;
  b += (batch * n + n0 + row) * depth + column;
  int64_t const top = (batch * m + m0 + row) * n + n0 + column, bottom = top + int64_t(8) * n;
  float d[4] = {c[top], c[top + 1], c[bottom], c[bottom + 1]};
  for (int k = 0; k < depth; k += 16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(pair(a + k)), "r"(pair(a + k + 8 * depth)), "r"(pair(a + k + 8)), "r"(pair(a + k + 8 * depth + 8)),
          "r"(pair(b + k)), "r"(pair(b + k + 8)));
  }
  y[top] = d[0], y[top + 1] = d[1], y[bottom] = d[2], y[bottom + 1] = d[3];
}

}  // namespace

extern "C" {

int exp2_approx(float const* x, float* y, int64_t n, cudaStream_t s) { return unary<Exp2Approx>(x, y, n, s); }
int rcp_approx(float const* x, float* y, int64_t n, cudaStream_t s) { return unary<RcpApprox>(x, y, n, s); }
int rsqrt_approx(float const* x, float* y, int64_t n, cudaStream_t s) { return unary<RsqrtApprox>(x, y, n, s); }
int exp_accurate(float const* x, float* y, int64_t n, cudaStream_t s) { return unary<ExpAccurate>(x, y, n, s); }

int fused_multiply_add(float const* a, float const* b, float const* c, float* y, int64_t n, cudaStream_t stream) {
  fma_kernel<<<blocks(n), kThreads, 0, stream>>>(a, b, c, y, n);
  return cudaGetLastError();
}

int tensor_core_product(__nv_bfloat16 const* a, __nv_bfloat16 const* b, float const* c, float* y, int64_t p, int64_t m,
                        int64_t n, int64_t depth, cudaStream_t stream) {
  mma_kernel<<<dim3(p, m / 16, n / 8), 32, 0, stream>>>(a, b, c, y, int(m), int(n), int(depth));
  return cudaGetLastError();
}

}  // extern "C"
