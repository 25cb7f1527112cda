// The mma.sync side: one 16 x 8 x 16 product and the matrix loads that feed it, on CuTe's architecture atoms.
//
// Fragments (g = lane / 4, t = lane % 4; every register holds two neighbouring columns):
//   accumulator 16 x 8:  c[0], c[1] at (g, 2t), (g, 2t + 1);  c[2], c[3] the same in row g + 8
//   A 16 x 16:           a[0] (g, 2t)  a[1] (g + 8, 2t)  a[2] (g, 2t + 8)  a[3] (g + 8, 2t + 8)
// so two neighbouring accumulators, packed to bf16, are the A operand of the next product: no shuffle.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "common/math.h"

namespace flash_kda {

// c += a b
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2],
                                            c[3]);
}

// ldmatrix takes four 8 x 8 matrices at once; lanes 8 i .. 8 i + 7 name the rows of matrix i. These are the places in a
// 16 x 16 block that a lane names, so that the registers come in the order of
//   an A operand [row, depth], or two B operands [depth, column] (b[0], b[1] and b[2], b[3]) from a block [depth,
//   column], read transposed; two B operands from a block [column, depth], or two accumulators' worth of a block read
//   transposed.
struct BlockPlace {
  int row, column;
  __device__ static BlockPlace of_a(int lane) { return {lane % 16, 8 * (lane / 16)}; }
  __device__ static BlockPlace of_b(int lane) { return {lane % 8 + 8 * (lane / 16), 8 * (lane / 8 % 2)}; }
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], void const* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<cute::uint128_t const*>(row), r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], void const* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<cute::uint128_t const*>(row), r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void store_matrices(uint32_t const (&r)[4], void* row) {
  cute::SM90_U32x4_STSM_N::copy(r[0], r[1], r[2], r[3], *static_cast<cute::uint128_t*>(row));
}

__device__ __forceinline__ void store_matrices_transposed(uint32_t const (&r)[4], void* row) {
  cute::SM90_U16x8_STSM_T::copy(r[0], r[1], r[2], r[3], *static_cast<cute::uint128_t*>(row));
}

// The A operand made of two neighbouring 16 x 8 accumulators.
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], float const (&left)[4], float const (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

}  // namespace flash_kda
