"""Small calls of flash_kda.fwd for compute-sanitizer (tests/gpu.sh): tails, packed and empty sequences, state modes.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python tests/sanitizer_grid.py [SCHEDULE]
    python tests/sanitizer_grid.py --list      # the schedules that the device runs

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
CLAMPED = ([-5, 10, 99], [0, 30, 10, 28], [2**40, 2**41])


def call(B, T, H, initial, final_dtype, cu_seqlens=None):
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = make_inputs("long", B, T, H, "cuda", T, (final_dtype or torch.float32) if initial else None, N=N)
    state = None if final_dtype is None else torch.empty(N, H, HEAD_DIM, HEAD_DIM, dtype=final_dtype, device="cuda")
    flash_kda.fwd(**inputs, out=torch.empty_like(inputs["v"]), final_state=state, cu_seqlens=cu_seqlens)


def grid():
    states = cycle(STATES)
    for B, T, lengths in GRID:
        for H in (1, 3):
            call(B, T, H, *next(states), None if lengths is None else cu_seqlens_of(lengths, "cuda"))
    for cu_seqlens in CLAMPED:
        call(1, 37, 2, *next(states), torch.tensor(cu_seqlens, device="cuda"))
    torch.cuda.synchronize()


def main(arguments):
    served = [schedule for schedule in schedules.SCHEDULES if not schedules.why_not(schedule)]
    if arguments == ["--list"]:
        print(*served)
        return
    for schedule in arguments or served:
        if schedule not in served:
            sys.exit(f"schedule: expected one of {', '.join(served)}, got {schedule!r}")
        os.environ["FLASH_KDA_SCHEDULE"] = schedule
        grid()
        print(f"{schedule}: {2 * len(GRID) + len(CLAMPED)} calls")


if __name__ == "__main__":
    main(sys.argv[1:])
