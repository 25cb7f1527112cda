"""One chunk_kda call of flash-linear-attention in a process of its own; test_fla.py compares the results.

    python fla_dispatch.py SEED FILE

Logs at INFO level to standard error and saves {"out", "final_state", "calls": calls of flash_kda.fwd} to FILE.
"""

import logging
import sys

import torch
from fla.ops.kda import chunk_kda
from inputs import make_inputs

import flash_kda

KERNEL_FLAGS = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "state_v_first": True,
    "output_final_state": True,
}


def dispatch_inputs(seed):
    return make_inputs("long", 1, 1024, 4, "cuda", seed, torch.float32)


def main(seed, path):
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
    calls = 0
    fwd = flash_kda.fwd

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return fwd(*args, **kwargs)

    flash_kda.fwd = counted
    with torch.inference_mode():
        out, final_state = chunk_kda(**dispatch_inputs(seed), **KERNEL_FLAGS)
    torch.save({"out": out.cpu(), "final_state": final_state.cpu(), "calls": calls}, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
