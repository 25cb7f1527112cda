"""Small calls of flash_kda.fwd for compute-sanitizer (tests/gpu.sh): tails, packed and empty sequences, state modes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python tests/sanitizer_grid.py [SCHEDULE [PART ...]]
    python tests/sanitizer_grid.py --list      # the schedules that the device runs

Parts: `short` calls, whose chunks all find a fresh stage; `long` ones, which go round the ring of stages several times;
and `general` ones, of the kernels that serve more than the plain call. With the schedule `segments`, which cuts
whatever has more than a chunk, also `cut`, at lengths of the grid's choice, short enough for fresh stages, and
`long_cut`, where every kernel goes round its stages. All that the schedule has by default.

Without torch's caching allocator each tensor is an allocation of its own, so that an access past its end is seen.
"""

import os
import sys
from contextlib import contextmanager
from itertools import cycle

import schedules
import torch
from inputs import HEAD_DIM, cu_seqlens_of, make_inputs

import flash_kda

# (batch, tokens, sequence lengths or None)
GRID = (
    (1, 1, None),
    (2, 15, None),
    (1, 16, None),
    (2, 17, None),
    (1, 33, None),
    (1, 65, None),
    (1, 130, None),
    (1, 24, [4, 8, 12]),
    (1, 115, [17, 33, 65]),
    (1, 40, [0, 1, 0, 38, 1, 0]),
    (1, 50, [20, 23]),
    (1, 0, [0, 0]),
    (1, 200, [1] * 200),
)
STATES = ((False, None), (True, torch.float32), (True, torch.bfloat16), (False, torch.float32), (True, None))
# Pairs split over a cluster of two CTAs; whole pairs, more of them than the GPU has SMs; and those planned by length.
LONG_GRID = ((1, 700, None, 1), (1, 700, None, 3), (2, 260, None, 70), (1, 450, [300, 20, 130], 50))
PARTS = ("short", "long", "general")
CUT_PARTS = ("cut", "long_cut")
SANITIZED = (*schedules.EXACT, "segments")
CLAMPED = ([-5, 10, 99], [0, 30, 10, 28], [2**40, 2**41], [0, 37, 0, 37, 0, 37])
# (tokens of a segment, batch, tokens, sequence lengths or None): few and many segments, tails, ends around those of
# segments, sequences that are not cut, and none.
CUT_GRID = (
    (16, 1, 32, None),
    (16, 2, 177, None),
    (48, 2, 130, None),
    (48, 1, 144, None),
    (16, 1, 130, [0, 1, 63, 0, 16, 17, 33]),
    (48, 1, 291, [47, 48, 0, 49, 97, 50]),
)
LONG_CUT_GRID = ((256, 1, 1300, None), (256, 1, 1100, [700, 0, 400]), (16, 1, 600, None), (320, 2, 700, None))


def call(B, T, H, initial, final_dtype, cu_seqlens=None):
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = make_inputs("long", B, T, H, "cuda", T, (final_dtype or torch.float32) if initial else None, N=N)
    state = None if final_dtype is None else torch.empty(N, H, HEAD_DIM, HEAD_DIM, dtype=final_dtype, device="cuda")
    flash_kda.fwd(**inputs, out=torch.empty_like(inputs["v"]), final_state=state, cu_seqlens=cu_seqlens)


def short():
    states = cycle(STATES)
    for B, T, lengths in GRID:
        for H in (1, 3):
            call(B, T, H, *next(states), None if lengths is None else cu_seqlens_of(lengths, "cuda"))
    for cu_seqlens in CLAMPED:
        call(1, 37, 2, *next(states), torch.tensor(cu_seqlens, device="cuda"))
    return 2 * len(GRID) + len(CLAMPED)


def long():
    states = cycle(STATES)
    for B, T, lengths, H in LONG_GRID:
        call(B, T, H, *next(states), None if lengths is None else cu_seqlens_of(lengths, "cuda"))
    return len(LONG_GRID)


def general_call(lengths, H, HV=None, state_dtype=torch.float32, rows=None, **options):
    """A packed call with HV heads of v; with `rows` in place of a pool of as many rows, which lie apart."""
    T, N = sum(lengths), len(lengths)
    inputs = make_inputs("long", 1, T, HV or H, "cuda", T, state_dtype, N=rows or N)
    inputs["q"], inputs["k"] = inputs["q"][:, :, :H].contiguous(), inputs["k"][:, :, :H].contiguous()
    cu_seqlens = cu_seqlens_of(lengths, "cuda").to(torch.int32)
    out, state = torch.empty_like(inputs["v"]), inputs["initial_state"].clone()
    if rows:
        pool = state.new_empty(rows, state[0].numel() + 64)[:, :-64].unflatten(1, state.shape[1:])
        inputs["initial_state"] = state = pool.copy_(state)
    flash_kda.fwd(**inputs | {"out": out, "final_state": state, "cu_seqlens": cu_seqlens} | options)


def general():
    def indices(*rows):
        return torch.tensor(rows, device="cuda")

    strong = {"lower_bound": None, "A_log": torch.full((2,), 4.0, device="cuda")}
    activated = {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    general_call([20, 0, 23], 2)
    general_call([20, 0, 23], 2, **strong)
    general_call([20, 0, 23], 2, g=torch.randn(1, 43, 2, HEAD_DIM, device="cuda"), **strong)
    general_call([37], 2, lower_bound=None, allow_neg_eigval=True, dt_bias=None)
    general_call([33, 5], 1, HV=2, g=torch.randn(1, 38, 2, HEAD_DIM, device="cuda"))
    decays = -torch.rand(1, 43, 2, HEAD_DIM, device="cuda") * 30
    general_call([43], 2, gate="log", g=decays, A_log=None, dt_bias=None, lower_bound=None, **activated)
    for at in ("end", "start"):
        checkpoints = torch.empty(8, 2, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        general_call([200, 70, 1], 2, checkpoints=checkpoints, checkpoint_interval=64, checkpoint_at=at)
    general_call([20, 5, 40], 2, state_dtype=torch.bfloat16, rows=4, state_indices=indices(2, -1, 0))
    # Decoding has a kernel of its own, under the schedule `auto`.
    schedule = os.environ["FLASH_KDA_SCHEDULE"]
    os.environ["FLASH_KDA_SCHEDULE"] = "auto"
    general_call([1, 2, 1], 2, rows=4, state_indices=indices(3, -1, 0))
    general_call([1, 2, 1], 2, rows=4, state_indices=indices(3, -1, 0), **strong)
    general_call([0, 3, 1], 1, HV=2, state_dtype=torch.bfloat16, rows=4, state_indices=indices(1, 2, 5))
    os.environ["FLASH_KDA_SCHEDULE"] = schedule
    return 12


@contextmanager
def segments_of(tokens):
    before = os.environ["FLASH_KDA_SCHEDULE"]
    os.environ["FLASH_KDA_SCHEDULE"] = f"segments:{tokens}"
    yield
    os.environ["FLASH_KDA_SCHEDULE"] = before


def cut_calls(grid, H):
    states = cycle(STATES)
    for L, B, T, lengths in grid:
        with segments_of(L):
            call(B, T, H, *next(states), None if lengths is None else cu_seqlens_of(lengths, "cuda"))
    return len(grid)


def cut_general_calls(L):
    """Of kernels that serve more than the plain call: checkpoints, a pool, grouped heads, strong decays."""
    lengths, H = [2 * L + 5, 0, 3 * L, 1], 2
    checkpoints = torch.empty(sum(lengths) // 64 + len(lengths), H, HEAD_DIM, HEAD_DIM, device="cuda")
    strong = {"lower_bound": None, "A_log": torch.full((H,), 4.0, device="cuda"), "dt_bias": None}
    indices = torch.tensor([2, 3, -1, 0], device="cuda")
    with segments_of(L):
        general_call(lengths, H, checkpoints=checkpoints, checkpoint_interval=64)
        general_call(lengths, H, checkpoints=checkpoints, checkpoint_interval=64, checkpoint_at="start")
        general_call(lengths, 1, HV=H, rows=4, state_indices=indices, **strong)
    return 3


def cut():
    for cu_seqlens in CLAMPED:
        with segments_of(16):
            call(1, 37, 2, True, torch.float32, torch.tensor(cu_seqlens, device="cuda"))
    return len(CLAMPED) + cut_calls(CUT_GRID, 2) + cut_general_calls(32)


def long_cut():
    return cut_calls(LONG_CUT_GRID, 2) + cut_general_calls(256)


def parts_of(schedule):
    return (*PARTS, *CUT_PARTS) if schedule == "segments" else PARTS


def main(arguments):
    served = [schedule for schedule in SANITIZED if not schedules.why_not(schedule)]
    if arguments == ["--list"]:
        print(*served)
        return
    calls = {part.__name__: part for part in (short, long, general, cut, long_cut)}
    for schedule in arguments[:1] or served:
        if schedule not in served:
            sys.exit(f"schedule: expected one of {', '.join(served)}, got {schedule!r}")
        os.environ["FLASH_KDA_SCHEDULE"] = schedule
        parts, chosen = parts_of(schedule), arguments[1:] or parts_of(schedule)
        for part in chosen:
            if part not in parts:
                sys.exit(f"part: expected one of {', '.join(parts)}, got {part!r}")
            count = calls[part]()
            torch.cuda.synchronize()
            print(f"{schedule}, {part}: {count} calls")
        if left_out := [part for part in parts if part not in chosen]:
            print(f"{schedule}, left out: {', '.join(left_out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
