"""Input generators and the error measure that CPU tests, GPU tests and benchmarks share."""

import math
from itertools import accumulate

import torch

HEAD_DIM = 128
LOWER_BOUND = -5.0
GATE_KINDS = ("random", "long")
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")  # [B, T, H(, 128)]


def cu_seqlens_of(lengths, device="cpu"):
    """Prefix sums of `lengths` as the int64 [N + 1] tensor that `flash_kda.fwd` takes."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)


def make_gate(kind, B, T, H, generator):
    """Raw gate g (bf16 [B, T, H, 128]), A_log (fp32 [H]) and dt_bias (fp32 [H, 128]) on the generator's device.

    "random": every channel forgets within a few tokens. "long": the mean decay a token is log-uniform in [0.001, 2], so
    that some channels remember thousands of tokens, as those of trained models do.
    """
    options = {"generator": generator, "device": generator.device}
    if kind == "random":
        g = torch.randn(B, T, H, HEAD_DIM, dtype=torch.bfloat16, **options)
        return g, torch.rand(H, **options), torch.rand(H, HEAD_DIM, **options)
    if kind == "long":
        g = torch.randn(B, T, H, HEAD_DIM, dtype=torch.bfloat16, **options).mul_(0.5)
        low, high = math.log(0.001), math.log(2.0)
        decay = torch.exp(low + (high - low) * torch.rand(H, HEAD_DIM, **options))
        return g, torch.zeros(H, device=generator.device), torch.logit(decay / -LOWER_BOUND)
    raise ValueError(f"kind: expected one of {GATE_KINDS}, got {kind!r}")


def make_inputs(kind, B, T, H, device, seed=0, state_dtype=None, N=None):
    """Arguments of `flash_kda.fwd` for one gate kind, as a dict without out, final_state and cu_seqlens.

    q, k, v, g are bf16 [B, T, H, 128], beta bf16 [B, T, H], A_log fp32 [H], dt_bias fp32 [H, 128]. With `state_dtype`,
    initial_state is 0.1 N(0, 1) of shape [N or B, H, 128, 128]; without, None. Equal arguments give equal tensors on
    one device.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    options = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(B, T, H, HEAD_DIM, **options) for _ in range(3))
    g, A_log, dt_bias = make_gate(kind, B, T, H, generator)
    beta = torch.randn(B, T, H, **options)
    initial_state = None
    if state_dtype is not None:
        shape = (B if N is None else N, H, HEAD_DIM, HEAD_DIM)
        initial_state = torch.randn(shape, generator=generator, device=generator.device).mul_(0.1).to(state_dtype)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": HEAD_DIM**-0.5,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": LOWER_BOUND,
        "initial_state": initial_state,
    }


def packed_inputs(lengths, H, kind="long", seed=0, state_dtype=torch.float32, device="cuda"):
    """(inputs, cu_seqlens) of sequences of these lengths in one packed batch; the rest as in `make_inputs`."""
    inputs = make_inputs(kind, 1, sum(lengths), H, device, seed, state_dtype, N=len(lengths))
    return inputs, cu_seqlens_of(lengths, device)


def cut(inputs, start, end, sequence=None):
    """The tokens [start, end), as contiguous tensors, with initial_state row `sequence` if that is given."""
    alone = inputs | {name: inputs[name][:, start:end].clone() for name in TOKEN_INPUTS}
    if sequence is not None and inputs["initial_state"] is not None:
        alone["initial_state"] = inputs["initial_state"][sequence : sequence + 1].clone()
    return alone


def relative_error(x, ref):
    """||x - ref|| / ||ref|| in fp64; 0 where both are all zero, inf where x has a NaN or an Inf that ref has not."""
    x, ref = x.double(), ref.double()
    difference, norm = (x - ref).norm().item(), ref.norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else (math.inf if difference else 0.0)
