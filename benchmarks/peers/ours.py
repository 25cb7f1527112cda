"""flash_kda.fwd, one peer for each schedule."""

from functools import partial

import torch

import flash_kda
from benchmarks.cases import HEAD_DIM
from benchmarks.peers.peer import Peer


def unavailable(schedule):
    try:
        from flash_kda import _C  # noqa: F401
    except ImportError as error:
        return f"flash_kda was built without kernels: {error}"
    if schedule == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        return "the sm90 schedule needs compute capability 9.0"
    return None


def prepare(inputs, cu_seqlens, fwd=flash_kda.fwd):
    """A call of `fwd`, this project's or one with its arguments, into tensors of its own."""
    B, _, H, _ = inputs["q"].shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.empty_like(inputs["v"])
    final_state = torch.empty(N, H, HEAD_DIM, HEAD_DIM, device=out.device)
    arguments = {**inputs, "out": out, "final_state": final_state, "cu_seqlens": cu_seqlens}

    def call():
        fwd(**arguments)
        return out, final_state

    return call


PEERS = tuple(
    Peer(
        f"flash_kda {schedule}",
        {"FLASH_KDA_SCHEDULE": schedule},
        ("many heads", "few heads"),
        partial(unavailable, schedule),
        prepare,
    )
    for schedule in ("portable", "sm90", "auto")
)
