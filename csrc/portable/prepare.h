// The prepare role: a warp loads a chunk's rows and makes its factors.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "common/general.h"
#include "common/sequence.h"
#include "portable/config.h"

namespace flash_kda::portable {

// One head's rows of a [token, channel] tensor.
struct Rows {
  bf16 const* first;
  int64_t pitch;

  __device__ static Rows of(TensorView const& t, Sequence const& s, int head) {
    return {first_row<bf16 const>(t, s, head), t.token_stride};
  }
};

// Starts copying a chunk's rows, 16 bytes a lane at a time; rows past the end become zero, or repeat the last one.
enum class PastTheEnd { kZero, kRepeat };
template <PastTheEnd kPastTheEnd, int kRows>
__device__ __forceinline__ void copy_rows(Tile<kRows>& tile, int first_row, Rows const& rows, int64_t token, int valid,
                                          int lane) {
  int const column = 8 * (lane % 16);
  bf16 const* const first = rows.first + token * rows.pitch + column;
#pragma unroll 4
  for (int row = lane / 16; row < kChunk; row += kWarp / 16) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<cute::uint128_t const*>(first + min(row, valid - 1) * rows.pitch),
        *reinterpret_cast<cute::uint128_t*>(tile.at(first_row + row, column)),
        kPastTheEnd == PastTheEnd::kRepeat || row < valid);
  }
}

// Brings a later chunk's rows into L2: a lane for each half of a row.
__device__ __forceinline__ void prefetch_rows(Rows const& rows, int64_t token, int64_t length, int lane) {
  int64_t const t = token + lane / 2;
  if (t < length) asm volatile("prefetch.global.L2 [%0];" ::"l"(rows.first + t * rows.pitch + kPanel * (lane % 2)));
}

template <class Params>
__device__ __forceinline__ void prepare(Params const& p, SharedStorage& shared, Sequence const& sequence,
                                        int sequence_index, int head, int warp, int lane) {
  ForwardStage& stage = shared.stage[warp];
  Scratch& scratch = shared.scratch[warp];

  auto const gate = Forms<Params>::Gate::of(p, sequence, head, lane);
  auto const beta = Forms<Params>::Beta::of(p, sequence, head);
  int const query_head = key_head(p, head);
  Rows const q = Rows::of(p.q, sequence, query_head), k = Rows::of(p.k, sequence, query_head);
  Rows const v = Rows::of(p.v, sequence, head), g = Rows::of(p.g, sequence, head);

  constexpr int kStride = kPrepareWarps * kChunk;
  uint32_t use = 0;
  for (int64_t token = warp * kChunk; token < sequence.length; token += kStride, ++use) {
    int const valid = int(min(sequence.length - token, int64_t(kChunk)));
    auto const logit = beta.load(p, token, valid, lane);

    if (use > 0) shared.empty[warp].wait((use - 1) % 2);
    copy_rows<PastTheEnd::kZero>(stage.rows, stage.kKeyRow, k, token, valid, lane);
    copy_rows<PastTheEnd::kZero>(stage.rows, stage.kQueryRow, q, token, valid, lane);
    if (g_is_staged(p)) copy_rows<PastTheEnd::kRepeat>(stage.rows, stage.kGateRow, g, token, valid, lane);
    cute::cp_async_fence();
    copy_rows<PastTheEnd::kZero>(shared.v[warp], 0, v, token, valid, lane);
    cute::cp_async_fence();
    // The stage is free only when its last chunk has been used up: the wait for it must not start from DRAM.
    prefetch_rows(k, token + kStride, sequence.length, lane);
    prefetch_rows(q, token + kStride, sequence.length, lane);
    if (g_is_staged(p)) prefetch_rows(g, token + kStride, sequence.length, lane);
    gate.prefetch(p, int(token) + kStride, int(sequence.length));
    prefetch_rows(v, token + kStride, sequence.length, lane);

    cute::cp_async_wait<1>();  // k, q and g are there; V may still be on its way
    __syncwarp();
    make_factors(p, stage, scratch, gate, beta, logit, head, int(token), valid, lane);
    make_matrices(p, stage, scratch, shared.key_norms[warp], {sequence_index, head, int(token), valid}, lane);
    cute::cp_async_wait<0>();
    shared.full[warp].arrive();
  }
}

}  // namespace flash_kda::portable
