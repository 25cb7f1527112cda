// A chunk of 16 tokens in shared memory: k, q and g, and the factors that take their place. Both kernels share the
// layout; it serves ldmatrix and wgmma alike. V lies beside it.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include <cstddef>

#include "common/mma.h"
#include "params.h"

namespace flash_kda {

using bf16 = cutlass::bfloat16_t;

constexpr int kWarp = 32;
constexpr int kChunk = 16;
constexpr int kPanel = kHeadDim / 2;  // channels of a row of 128 bytes

// [token, channel] tiles: two panels of 64 channels, rows of 128 bytes, swizzled so that a row written by a warp and an
// 8 x 8 matrix read by ldmatrix (eight rows, one 16-byte column) touch every bank once: what TMA calls the 128-byte
// swizzle, and GMMA the K-major layout of rows (the token dimension is N) or the MN-major one (it is K).
template <int kRows>
__host__ __device__ constexpr int tile_offset(int row, int channel) {
  return channel / kPanel * (kRows * kPanel) + row * kPanel + ((channel % kPanel) ^ (row % 8 * 8));
}
template <int kRows>
__device__ __forceinline__ int tile_offset(BlockPlace place) {
  return tile_offset<kRows>(place.row, place.column);
}

// The layouts that wgmma's descriptors are made from, of some rows of a tile, from one on that is a multiple of 8.
template <int kTileRows, int kRows = kTileRows>
using TileKMajor =
    decltype(cute::composition(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<bf16>{},
                                                   cute::Shape<cute::Int<kTileRows>, cute::Int<kHeadDim>>{}),
                               cute::Tile<cute::Int<kRows>, cute::Int<kHeadDim>>{}));
template <int kTileRows, int kRows = kTileRows>
using TileMNMajor = decltype(cute::composition(
    cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<bf16>{},
                        cute::Shape<cute::Int<kHeadDim>, cute::Int<kTileRows>>{}, cute::Step<cute::_2, cute::_1>{}),
    cute::Tile<cute::Int<kHeadDim>, cute::Int<kRows>>{}));
// [token, token] matrices: 8 x 8 blocks of 128 bytes, one after the other.
using SquareLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_INTER_Atom<bf16>{},
                                                  cute::Shape<cute::Int<kChunk>, cute::Int<kChunk>>{}));
__host__ __device__ constexpr int square_offset(int row, int column) {
  return column / 8 * (8 * kChunk) + row * 8 + column % 8;
}

// The arithmetic above against CuTe's layouts, whose swizzle is exclusive-ored into addresses by hardware.
template <int kRows>
constexpr bool offsets_are_the_layouts() {
  constexpr cute::Swizzle<3, 3, 3> swizzle{};
  constexpr auto k_major = cute::get_nonswizzle_portion(TileKMajor<kRows>{});
  constexpr auto mn_major = cute::get_nonswizzle_portion(TileMNMajor<kRows>{});
  constexpr auto square = cute::get_nonswizzle_portion(SquareLayout{});
  for (int row = 0; row < kRows; ++row) {
    for (int channel = row % 8; channel < kHeadDim; channel += 8) {  // every 16-byte column, within what compilers fold
      if (tile_offset<kRows>(row, channel) != int(swizzle(k_major(row, channel)))) return false;
      if (tile_offset<kRows>(row, channel) != int(swizzle(mn_major(channel, row)))) return false;
    }
  }
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; ++j) {
      if (square_offset(i, j) != int(square(i, j))) return false;
    }
  }
  return true;
}
static_assert(offsets_are_the_layouts<kChunk>() && offsets_are_the_layouts<2 * kChunk>() &&
              offsets_are_the_layouts<3 * kChunk>());

template <int kRows, int kChannels = kHeadDim>
struct alignas(1024) Tile {
  static_assert(kChannels % kPanel == 0 && kRows % 8 == 0);
  bf16 data[kRows * kChannels];
  __device__ bf16* at(int row, int channel) { return &data[tile_offset<kRows>(row, channel)]; }
  // Channels 16 b .. 16 b + 15 of what lies at `offset` for b = 0: one exclusive or a block.
  __device__ bf16* in_block(int b, int offset) {
    return &data[b / (kPanel / 16) * (kRows * kPanel) + (offset ^ (b % (kPanel / 16) * 16))];
  }
};

// 2^{G_C} of a chunk, in the order of accumulators: lane t = lane % 4 needs channels 8 j + 2 t and 8 j + 2 t + 1 of
// every tile j, and finds those of tiles j and j + 1 (j even) in 16 bytes, next to the other lanes' 16. Where all are
// negative (-0 too), the state decays by their magnitudes before the chunk's update instead of after it.
struct alignas(16) Decay {
  float data[kHeadDim];
  __device__ float* pair(int j, int t) { return &data[j / 2 * 16 + t * 4 + j % 2 * 2]; }
  __device__ bool comes_first() const { return signbit(data[0]); }
};

struct Square {
  bf16 data[kChunk * kChunk];
  __device__ bf16* at(int row, int column) { return &data[square_offset(row, column)]; }
  __device__ bf16* at(BlockPlace place) { return at(place.row, place.column); }
};

// A chunk's factors. With G the running log2 decay inside the chunk, c = kShift, and n_i = 1 / |k_i|:
//   K+ = k 2^{G + c}      Q+ = scale q / |q| 2^{G + c}      K- = k 2^{-G - c}      S' = S 2^{-c}
//   X = V - diag(n) K+ S'^T,  U = A X,  O = Q+ S'^T + M U,  S' <- (S' + U^T K-) diag(2^{G_C})
// where L = strictly lower part of diag(beta n) K+ K-^T diag(n),  M = lower part of Q+ K-^T,
//   A = diag(n) (I + L)^{-1} diag(beta).
// k is not normalised row by row: its norm is found on the diagonal of K+ K-^T, and goes with the small matrices.
// Where no output is wanted (Pass::kTransition), the WY form: U = A V + W S'^T with W = -A diag(n) K+ in K+'s place.
//
// G reaches -115 over 16 tokens at lower_bound = -5; the shift, a power of two and thus exact, keeps every decay within
// 2^+-58, so that values up to 2^69 and states down to 2^-69 neither overflow nor lose bits. It is a constant: a
// shift that followed the data would let later tokens change the rounding of earlier outputs.
constexpr float kShift = 57.f;
constexpr float kShiftDown = 0x1p-57f;  // 2^{-c}
constexpr float kShiftUp = 0x1p57f;

// What a chunk is prepared for.
enum class Pass {
  kForward,    // outputs and states
  kTransition  // states only: no q, no Q+ and no M, but W
};

// L, in the order [i][j] but for halves of eight columns, which change places in every other pair of rows: a fragment's
// stores then meet every bank once.
struct LowerTriangle {
  float data[kChunk * kChunk];
  __device__ float* at(int i, int j) { return &data[i * kChunk + (j ^ (i / 2 % 2 * 8))]; }
};

template <Pass kPass>
struct Stage {
  // First rows of the inputs, and of the factors that take their places.
  static constexpr int kQueryRow = 0;                                   // q, then Q+
  static constexpr int kKeyRow = kPass == Pass::kForward ? kChunk : 0;  // k, then K+, then, in a transition, W
  static constexpr int kGateRow = kKeyRow + kChunk;                     // g, then K-
  static constexpr int kRows = kGateRow + kChunk;
  // From a place among the tile's first rows to the same among those.
  static constexpr int kToQuery = tile_offset<kRows>(kQueryRow, 0);
  static constexpr int kToKey = tile_offset<kRows>(kKeyRow, 0);
  static constexpr int kToGate = tile_offset<kRows>(kGateRow, 0);

  Tile<kRows> rows;
  Square a_hi, a_lo;  // A = a_hi + a_lo
  Square m;           // M
  Decay decay;        // 2^{G_C}
  // L lies in A's place until it is solved, and in a transition then the parts of -A diag(n) until W is made.
  __device__ LowerTriangle& l() { return reinterpret_cast<LowerTriangle&>(a_hi); }
};
using ForwardStage = Stage<Pass::kForward>;
using TransitionStage = Stage<Pass::kTransition>;
static_assert(sizeof(LowerTriangle) == 2 * sizeof(Square) &&
              offsetof(ForwardStage, a_lo) == offsetof(ForwardStage, a_hi) + sizeof(Square));
static_assert(sizeof(ForwardStage) == 14 * 1024 && sizeof(TransitionStage) == 10 * 1024,
              "every stage starts on a swizzle period");

// n of a stage's chunk.
struct alignas(16) KeyNorms {
  float data[kChunk];
};

// What the warp that prepares a chunk keeps to itself.
struct Scratch {
  alignas(16) float query_norm[kChunk];  // scale / |q_i|
  alignas(16) float beta[kChunk];
  // Of a transition:
  alignas(16) float key_weight[kChunk];  // -beta_i n_i
  KeyNorms key_norms;
  int rows_in_range;  // common/general.h
};

}  // namespace flash_kda
