// The wgmma side: products of 64 rows by a warpgroup, and the operands that they take.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/stage.h"

namespace flash_kda::sm90 {

// A from registers throughout: the accumulator of one product is, packed to bf16 register by register, the A operand of
// the next. B [tokens, channels] and [tokens, tokens] K-major, B [channels, tokens] MN-major.
using ContractAtom = cute::SM90_64x32x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>;
using SquareAtom = cute::SM90_64x16x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K>;
using UpdateAtom = cute::SM90_64x128x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::MN>;

// Accumulators of 64 rows by 8 kTiles columns, and A operands of 16 kBlocks depth.
template <int kTiles>
using Accumulator = cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kTiles>>, cute::_1, cute::_1>;
template <int kBlocks>
using Operand = cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kBlocks>>;

// B operands as GMMA descriptors: of the matrix `offset` bytes into a stage, given the stage's address / 16. CuTe makes
// the same ones of the layouts in common/stage.h, but masks and shifts an address anew for every product.
template <uint32_t kLow, uint32_t kHigh>
struct Descriptor {
  __device__ static auto of(uint32_t stage_address, int offset) {
    cute::GmmaDescriptor descriptor;
    descriptor.reg32_[0] = stage_address + (uint32_t(offset) / 16 + kLow);  // shared memory ends below 2^18: no carry
    descriptor.reg32_[1] = kHigh;
    return cute::make_tensor(cute::GMMA::DescriptorIterator{descriptor},
                             cute::Layout<cute::Shape<cute::_1, cute::_1>>{});
  }
};
// Low word: start address / 16, distance of blocks along the leading dimension / 16 from bit 16 on. High word: distance
// along the other one / 16, swizzle mode from bit 30 on.
constexpr uint32_t leading(int bytes) { return uint32_t(bytes) / 16 << 16; }
constexpr uint32_t kSwizzle128 = uint32_t(cute::GMMA::LayoutType::B128) << 30;
constexpr int kGroupBytes = 8 * kPanel * int(sizeof(bf16));  // eight rows of a panel
template <int kRows>
constexpr int kPanelStride = kRows * kPanel * int(sizeof(bf16));             // from a tile's panel to the next
using RowsKMajor = Descriptor<leading(16), kSwizzle128 | kGroupBytes / 16>;  // the leading distance is not used
template <int kRows>
using RowsMNMajor = Descriptor<leading(kPanelStride<kRows>), kSwizzle128 | kGroupBytes / 16>;
using SquareKMajor =
    Descriptor<leading(square_offset(0, 8) * int(sizeof(bf16))), square_offset(8, 0) * sizeof(bf16) / 16>;

}  // namespace flash_kda::sm90
