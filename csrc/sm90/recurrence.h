// The recurrence role: a warpgroup carries 64 value rows of the state through the chunks in fp32 wgmma accumulators.
// Value rows never mix, so the two warpgroups do not talk to each other.
#pragma once

#include "common/state_io.h"
#include "sm90/scan.h"
#include "sm90/schedule.h"
#include "sm90/wgmma.h"

namespace flash_kda::sm90 {

// A lane's share of a chunk's decays, as stage.h orders them.
using Decays = float4[kHeadDim / 16];

__device__ __forceinline__ void fetch_decay(Decays& decay, Decay& stored, int lane) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 16; ++j) {
    decay[j] = *reinterpret_cast<float4 const*>(stored.pair(2 * j, lane % 4));
  }
}

template <class State>
__device__ __forceinline__ void apply_decay(State& state, Decays const& decay, bool is_negative) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    float2 d = j % 2 ? float2{decay[j / 2].z, decay[j / 2].w} : float2{decay[j / 2].x, decay[j / 2].y};
    if (is_negative) d = {-d.x, -d.y};
    state(4 * j) = __fmul_rn(state(4 * j), d.x), state(4 * j + 1) = __fmul_rn(state(4 * j + 1), d.y);
    state(4 * j + 2) = __fmul_rn(state(4 * j + 2), d.x), state(4 * j + 3) = __fmul_rn(state(4 * j + 3), d.y);
  }
}

// All chunks of an item, by a warpgroup; `ring` is where they start. release(stage) is called by every lane that has
// read a stage.
template <class Config, class Params, class Release>
__device__ __forceinline__ void recur(Params const& p, SharedStorage<Config>& shared, WorkItem const& item,
                                      RingPlace<Config>& ring, int warp, int lane, Release const& release) {
  using namespace cute;
  int const warp_value = item.first_row + 16 * warp;  // the first of the warp's sixteen value rows

  TiledMMA contract = make_tiled_mma(ContractAtom{});
  TiledMMA square = make_tiled_mma(SquareAtom{});
  TiledMMA update = make_tiled_mma(UpdateAtom{});

  // An empty sequence hands its state on as it came, to the last bit.
  bool const is_empty = item.length() == 0;
  Tensor state = make_tensor<float>(Accumulator<kHeadDim / 8>{});
  StateRows& state_rows = reinterpret_cast<StateRows&>(state(0));
  if constexpr (kIsSegmented<Params>) {
    scan(p, shared, state, item, warp_value, lane);
  } else {
    load_initial_state(state_rows, p, item.sequence_index, item.head, warp_value, is_empty ? 1.f : kShiftDown, lane);
  }
  auto const checkpoint = [&](int tokens) {
    store_checkpoint(p, state_rows, item.sequence_index, item.head, warp_value, tokens, item.length(), lane);
  };
  checkpoint(0);

  Tensor ox = make_tensor<float>(Accumulator<4>{});  // S' [Q+; K+]^T: O's part and then X's
  // O goes on in registers of its own: as a part of ox, ptxas serialises wgmma (C7511).
  Tensor o = make_tensor<float>(Accumulator<2>{});
  Tensor u = make_tensor<float>(Accumulator<2>{});
  Tensor s_operand = make_tensor<bf16>(Operand<kHeadDim / 16>{});
  Tensor x_hi = make_tensor<bf16>(Operand<1>{}), x_lo = make_tensor<bf16>(Operand<1>{});
  Tensor u_operand = make_tensor<bf16>(Operand<1>{});
  uint32_t* const s_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(s_operand.data()));
  uint32_t* const x_hi_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(x_hi.data()));
  uint32_t* const x_lo_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(x_lo.data()));
  uint32_t* const u_bits = reinterpret_cast<uint32_t*>(raw_pointer_cast(u_operand.data()));

  // Without the CTA's rank in its cluster, which stands above the address.
  uint32_t const first_address = (cast_smem_ptr_to_uint(&shared.stage[0]) & 0x3ffff) / 16;

  // Two lanes store a token's sixteen values.
  OutTile& out_tile = shared.forward.out[warp];
  int const row = lane / 2, column = 8 * (lane % 2);
  bf16* out = first_row<bf16>(p.out, item.sequence, item.head) + row * p.out.token_stride + warp_value + column;
  BlockPlace const place = BlockPlace::of_b(lane);
  // A chunk's O waits in the out tile until the next chunk begins and, where registers are plenty, in them until that
  // one's first products run. `left` tokens were left with that chunk.
  constexpr bool kFetchOutEarly = Config::kIsSplit;
  uint4 out_values;
  auto const fetch_out = [&](int left) {
    __syncwarp();  // every lane has written the out tile
    if (row < left) out_values = *reinterpret_cast<uint4 const*>(out_tile.at(row, column));
  };
  auto const store_out = [&](int left) {
    if (row < left) *reinterpret_cast<uint4*>(out) = out_values;
    out += kChunk * p.out.token_stride;
    __syncwarp();  // every lane has read the out tile
  };

#pragma unroll 1
  for (int left = item.length(); left > 0; left -= kChunk, ring.advance(1)) {
    int const s = ring.stage;
    ForwardStage& stage = shared.stage[s];
    uint32_t const address = first_address + s * uint32_t(sizeof(ForwardStage) / 16);

#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) s_bits[i] = pack_bf16(state(2 * i), state(2 * i + 1));
    bool const has_before = left < item.length();
    if (kFetchOutEarly && has_before) fetch_out(left + kChunk);
    shared.full[s].wait(ring.use % 2);
    bool const decay_first = kIsUnbounded<Params> && stage.decay.comes_first();
    uint32_t v[4];
    load_matrices_transposed(v, shared.v[s].at(place.row, 16 * warp + place.column));
    if (left < kChunk) {  // rows past the end hold anything
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const token = 8 * (i / 2) + 2 * (lane % 4);
        v[i] = token + 1 < left ? v[i] : token < left ? v[i] & 0xffffu : 0;
      }
    }
    float2 norm[2];  // of the tokens of a lane's columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      norm[half] = *reinterpret_cast<float2 const*>(&shared.forward.key_norms[s].data[8 * half + 2 * (lane % 4)]);
    }

    warpgroup_fence_operand(ox);
    warpgroup_arrive();
    contract.accumulate_ = GMMA::ScaleOut::Zero;
#pragma unroll
    for (int b = 0; b < kHeadDim / 16; ++b) {
      gemm(contract, s_operand(_, _, b),
           RowsKMajor::of(address,
                          tile_offset<ForwardStage::kRows>(ForwardStage::kQueryRow, 16 * b) * int(sizeof(bf16))),
           ox);
      contract.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    if (has_before) {
      if constexpr (!kFetchOutEarly) fetch_out(left + kChunk);
      store_out(left + kChunk);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(ox);
#pragma unroll
    for (int i = 0; i < 4; ++i) warpgroup_fence_operand(v[i]);  // not to be awaited between the products

#pragma unroll
    for (int i = 0; i < 8; ++i) o(i) = ox(i);
    // X = V - S' K+^T diag(n) and A both in two bf16 parts; the product of the low parts is below fp32 rounding of the
    // whole.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const value = unpack_bf16(v[i]);
      float const x = __fmaf_rn(-norm[i / 2].x, ox(8 + 2 * i), value.x);
      float const y = __fmaf_rn(-norm[i / 2].y, ox(9 + 2 * i), value.y);
      PairParts const parts = PairParts::of(x, y);
      x_hi_bits[i] = parts.hi, x_lo_bits[i] = parts.lo;
    }
    auto const a_hi = SquareKMajor::of(address, offsetof(ForwardStage, a_hi));
    auto const a_lo = SquareKMajor::of(address, offsetof(ForwardStage, a_lo));
    warpgroup_fence_operand(u);
    warpgroup_arrive();
    square.accumulate_ = GMMA::ScaleOut::Zero;
    gemm(square, x_lo(_, _, 0), a_hi, u);
    square.accumulate_ = GMMA::ScaleOut::One;
    gemm(square, x_hi(_, _, 0), a_lo, u);
    gemm(square, x_hi(_, _, 0), a_hi, u);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(u);
#pragma unroll
    for (int i = 0; i < 4; ++i) u_bits[i] = pack_bf16(u(2 * i), u(2 * i + 1));

    if (decay_first) {
      Decays decay;  // not the one below, which would be kept from here on
      fetch_decay(decay, stage.decay, lane);
      apply_decay(state, decay, true);
    }
    warpgroup_fence_operand(o);
    warpgroup_fence_operand(state);
    warpgroup_arrive();
    gemm(square, u_operand(_, _, 0), SquareKMajor::of(address, offsetof(ForwardStage, m)), o);
    warpgroup_commit_batch();
    update.accumulate_ = GMMA::ScaleOut::One;
    gemm(update, u_operand(_, _, 0),
         RowsMNMajor<ForwardStage::kRows>::of(
             address, tile_offset<ForwardStage::kRows>(ForwardStage::kGateRow, 0) * int(sizeof(bf16))),
         state);
    warpgroup_commit_batch();

    warpgroup_wait<1>();
    warpgroup_fence_operand(o);
    uint32_t const o_bits[4] = {pack_bf16(o(0), o(1)), pack_bf16(o(2), o(3)), pack_bf16(o(4), o(5)),
                                pack_bf16(o(6), o(7))};
    store_matrices_transposed(o_bits, out_tile.at(place.row, place.column));
    // Not sooner: wgmma reads its operands from the same shared memory, and every earlier place was slower.
    Decays decay;
    fetch_decay(decay, stage.decay, lane);
    warpgroup_wait<0>();
    warpgroup_fence_operand(state);
    if (!decay_first) apply_decay(state, decay, false);
    release(s);
    if (left >= kChunk) checkpoint(item.length() - left + kChunk);
  }
  if (!is_empty) {
    int const left = (item.length() - 1) % kChunk + 1;
    fetch_out(left);
    store_out(left);
  }

  store_state(state_rows, final_state_of(p, item.sequence_index, item.head, warp_value), is_empty ? 1.f : kShiftUp,
              lane);
}

}  // namespace flash_kda::sm90
