"""Small calls of flash_kda.fwd for compute-sanitizer (tests/gpu.sh): tails, packed and empty sequences, state modes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python tests/sanitizer_grid.py [SCHEDULE [PART ...]]
    python tests/sanitizer_grid.py --list      # the schedules that the device runs

Parts: `short` calls, whose chunks all find a fresh stage; `long` ones, which go round the ring of stages several times;
and `general` ones, of the kernels that serve more than the plain call. All three by default.

Without torch's caching allocator each tensor is an allocation of its own, so that an access past its end is seen.
"""

import os
import sys
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
CLAMPED = ([-5, 10, 99], [0, 30, 10, 28], [2**40, 2**41])


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
    """A packed call with HV heads of v; the states are pools of `rows` rows if that is given."""
    T, N = sum(lengths), len(lengths)
    inputs = make_inputs("long", 1, T, HV or H, "cuda", T, state_dtype, N=rows or N)
    inputs["q"], inputs["k"] = inputs["q"][:, :, :H].contiguous(), inputs["k"][:, :, :H].contiguous()
    cu_seqlens = cu_seqlens_of(lengths, "cuda").to(torch.int32)
    out, state = torch.empty_like(inputs["v"]), inputs["initial_state"].clone()
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
    os.environ["FLASH_KDA_SCHEDULE"] = schedule
    return 11


def main(arguments):
    served = [schedule for schedule in schedules.SCHEDULES if not schedules.why_not(schedule)]
    if arguments == ["--list"]:
        print(*served)
        return
    chosen, parts = arguments[:1] or served, arguments[1:] or PARTS
    for schedule in chosen:
        if schedule not in served:
            sys.exit(f"schedule: expected one of {', '.join(served)}, got {schedule!r}")
        os.environ["FLASH_KDA_SCHEDULE"] = schedule
        for part in parts:
            if part not in PARTS:
                sys.exit(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
            count = {"short": short, "long": long, "general": general}[part]()
            torch.cuda.synchronize()
            print(f"{schedule}, {part}: {count} calls")


if __name__ == "__main__":
    main(sys.argv[1:])
