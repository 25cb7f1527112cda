// The recurrence role: a warpgroup carries 64 value rows of the state through the chunks in fp32 wgmma accumulators.
// Value rows never mix, so the two warpgroups do not talk to each other.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "common/state_io.h"
#include "sm90/schedule.h"

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

// A matrix of every stage: `layout` and a third mode that walks the ring.
template <class Config, class Layout>
__device__ __forceinline__ auto in_every_stage(bf16* in_first_stage, Layout layout) {
  using namespace cute;
  auto const ring = make_layout(Int<Config::kStages>{}, Int<int(sizeof(Stage) / sizeof(bf16))>{});
  return make_tensor(make_smem_ptr(in_first_stage),
                     make_composed_layout(layout.layout_a(), layout.offset(), append<3>(layout.layout_b(), ring)));
}

// All chunks of an item, by a warpgroup. `chunk` counts the chunks of the CTA's list.
template <class Config, class Params>
__device__ __forceinline__ void recur(Params const& p, SharedStorage<Config>& shared, WorkItem const& item,
                                      uint32_t& chunk, int warp, int lane) {
  using namespace cute;
  int const warp_value = item.first_value + 16 * warp;  // the first of the warp's sixteen value rows
  int const thread = threadIdx.x % 128;

  TiledMMA contract = make_tiled_mma(ContractAtom{});
  TiledMMA square = make_tiled_mma(SquareAtom{});
  TiledMMA update = make_tiled_mma(UpdateAtom{});
  auto const contract_slice = contract.get_thread_slice(thread);
  auto const square_slice = square.get_thread_slice(thread);
  auto const update_slice = update.get_thread_slice(thread);

  // An empty sequence hands its state on as it came, to the last bit.
  bool const is_empty = item.length() == 0;
  Tensor state = make_tensor<float>(Accumulator<kHeadDim / 8>{});
  StateRows& state_rows = reinterpret_cast<StateRows&>(state(0));
  load_initial_state(state_rows, p, item.sequence_index, item.head, warp_value, is_empty ? 1.f : kShiftDown, lane);
  auto const checkpoint = [&](int tokens) {
    store_checkpoint(p, state_rows, item.sequence_index, item.head, warp_value, tokens, item.length(), lane);
  };
  checkpoint(0);

  Tensor xo = make_tensor<float>(Accumulator<4>{});  // S' [K+; Q+]^T: X's part and then O's
  // O goes on in registers of its own: as a part of xo, ptxas serialises wgmma (C7511).
  Tensor o = make_tensor<float>(Accumulator<2>{});
  Tensor u = make_tensor<float>(Accumulator<2>{});
  Tensor s_operand = make_tensor<bf16>(Operand<kHeadDim / 16>{});
  Tensor x_hi = make_tensor<bf16>(Operand<1>{}), x_lo = make_tensor<bf16>(Operand<1>{});
  Tensor u_operand = make_tensor<bf16>(Operand<1>{});
  uint32_t* const s_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(s_operand.data()));
  uint32_t* const x_hi_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(x_hi.data()));
  uint32_t* const x_lo_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(x_lo.data()));
  uint32_t* const u_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(u_operand.data()));

  Stage& first = shared.stage[0];
  auto const kq = contract_slice.partition_fragment_B(in_every_stage<Config>(first.kq.data, TileKMajor<2 * kChunk>{}));
  auto const k_grown = update_slice.partition_fragment_B(in_every_stage<Config>(first.g.data, TileMNMajor<kChunk>{}));
  auto const a_hi = square_slice.partition_fragment_B(in_every_stage<Config>(first.a_hi.data, SquareLayout{}));
  auto const a_lo = square_slice.partition_fragment_B(in_every_stage<Config>(first.a_lo.data, SquareLayout{}));
  auto const m = square_slice.partition_fragment_B(in_every_stage<Config>(first.m.data, SquareLayout{}));

  // Two lanes store a token's sixteen values.
  OutTile& out_tile = shared.out[warp];
  int const row = lane / 2, column = 8 * (lane % 2);
  bf16* out = first_row<bf16>(p.out, item.sequence, item.head) + row * p.out.token_stride + warp_value + column;
  BlockPlace const place = BlockPlace::of_b(lane);
  // A chunk's O waits in the out tile until the next chunk's first products run. `left` tokens were left with that
  // chunk.
  auto const store_out = [&](int left) {
    __syncwarp();  // every lane has written the out tile
    if (row < left) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4 const*>(out_tile.at(row, column));
    out += kChunk * p.out.token_stride;
    __syncwarp();  // every lane has read it
  };

#pragma unroll 1
  for (int left = item.length(); left > 0; left -= kChunk, ++chunk) {
    RingPlace<Config> const ring(chunk);
    uint32_t const s = ring.stage;
    Stage& stage = shared.stage[s];

#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) s_bits[i] = pack_bf16(state(2 * i), state(2 * i + 1));
    shared.full[s].wait(ring.use % 2);
    uint32_t v[4];
    load_matrices_transposed(v, stage.v.at(place.row, 16 * warp + place.column));

    warpgroup_fence_operand(xo);
    warpgroup_arrive();
    contract.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int b = 0; b < kHeadDim / 16; ++b) {
      gemm(contract, s_operand(_, _, b), kq(_, _, b, s), xo);
      contract.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    if (left < item.length()) store_out(left + kChunk);
    warpgroup_wait<0>();
    warpgroup_fence_operand(xo);
#pragma unroll
    for (int i = 0; i < 4; ++i) warpgroup_fence_operand(v[i]);  // not to be awaited between the products

    float4 decay[kHeadDim / 16];
    auto const fetch_decay = [&] {
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        decay[j] = *reinterpret_cast<float4 const*>(stage.decay.pair(2 * j, lane % 4));
      }
    };
    if constexpr (Config::kDecayEarly) fetch_decay();
#pragma unroll
    for (int i = 0; i < 8; ++i) o(i) = xo(8 + i);
    // X = V - S' K+^T and A both in two bf16 parts; the product of the low parts is below fp32 rounding of the whole.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const value = unpack_bf16(v[i]);
      float const x = __fsub_rn(value.x, xo(2 * i)), y = __fsub_rn(value.y, xo(2 * i + 1));
      x_hi_bits[i] = pack_bf16(x, y);
      float2 const hi = unpack_bf16(x_hi_bits[i]);
      x_lo_bits[i] = pack_bf16(__fsub_rn(x, hi.x), __fsub_rn(y, hi.y));
    }
    warpgroup_fence_operand(u);
    warpgroup_arrive();
    square.accumulate_ = GMMA::ScaleOut::Zero;
    gemm(square, x_lo(_, _, 0), a_hi(_, _, 0, s), u);
    square.accumulate_ = GMMA::ScaleOut::One;
    gemm(square, x_hi(_, _, 0), a_lo(_, _, 0, s), u);
    gemm(square, x_hi(_, _, 0), a_hi(_, _, 0, s), u);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(u);
#pragma unroll
    for (int i = 0; i < 4; ++i) u_bits[i] = pack_bf16(u(2 * i), u(2 * i + 1));

    auto const apply_decay = [&](bool is_negative) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        float2 d = j % 2 ? float2{decay[j / 2].z, decay[j / 2].w} : float2{decay[j / 2].x, decay[j / 2].y};
        if (is_negative) d = {-d.x, -d.y};
        state(4 * j) = __fmul_rn(state(4 * j), d.x), state(4 * j + 1) = __fmul_rn(state(4 * j + 1), d.y);
        state(4 * j + 2) = __fmul_rn(state(4 * j + 2), d.x), state(4 * j + 3) = __fmul_rn(state(4 * j + 3), d.y);
      }
    };
    bool const decay_first = kIsGeneral<Params> && stage.decay.comes_first();
    if (decay_first) {
      if constexpr (!Config::kDecayEarly) fetch_decay();
      apply_decay(true);
    }
    warpgroup_fence_operand(o);
    warpgroup_fence_operand(state);
    warpgroup_arrive();
    gemm(square, u_operand(_, _, 0), m(_, _, 0, s), o);
    warpgroup_commit_batch();
    update.accumulate_ = GMMA::ScaleOut::One;
    gemm(update, u_operand(_, _, 0), k_grown(_, _, 0, s), state);
    warpgroup_commit_batch();

    warpgroup_wait<1>();
    warpgroup_fence_operand(o);
    uint32_t const o_bits[4] = {pack_bf16(o(0), o(1)), pack_bf16(o(2), o(3)), pack_bf16(o(4), o(5)),
                                pack_bf16(o(6), o(7))};
    store_matrices_transposed(o_bits, out_tile.at(place.row, place.column));
    if constexpr (!Config::kDecayEarly) fetch_decay();
    warpgroup_wait<0>();
    warpgroup_fence_operand(state);
    if (!decay_first) apply_decay(false);
    __syncwarp();  // every lane has read the stage
    if (lane == 0) shared.empty[s].arrive();
    if (left >= kChunk) checkpoint(item.length() - left + kChunk);
  }
  if (!is_empty) store_out((item.length() - 1) % kChunk + 1);

  store_final_state(state_rows, p, item.sequence_index, item.head, warp_value, is_empty ? 1.f : kShiftUp, lane);
}

}  // namespace flash_kda::sm90
