"""Kimi Delta Attention of cuDNN frontend (1.32 and newer), by its CUDA C++ engine for Hopper.

`pip install "nvidia-cudnn-frontend[cutedsl]>=1.32"`; the engine compiles its kernel by NVRTC, which needs CUDA's
headers. It reads g and beta in fp32: what it does to convert bf16 ones is part of its call.
"""

import torch

from benchmarks.peers.peer import Peer

ENGINE = "kda_hopper_cuda"  # the fastest of its engines on Hopper, as its own heuristics rank them


def unavailable():
    if torch.cuda.get_device_capability() != (9, 0):
        return "cuDNN frontend's Hopper kernel needs compute capability 9.0"
    try:
        from cudnn.linear_attention import kimi_delta_attention  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"cuDNN frontend 1.32 or newer cannot be imported: {error}"
    return None


def prepare(inputs, cu_seqlens):
    from cudnn.linear_attention import kimi_delta_attention

    if cu_seqlens is None:
        B, T = inputs["q"].shape[:2]
        cu_seqlens = torch.arange(0, (B + 1) * T, T, device=inputs["q"].device)
    cu_seqlens = cu_seqlens.int()
    tokens = {name: inputs[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}

    @torch.inference_mode()
    def call():
        out, final_state = kimi_delta_attention(
            **tokens,
            cu_seqlens=cu_seqlens,
            scale=inputs["scale"],
            initial_state=inputs["initial_state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            gate_lower_bound=inputs["lower_bound"],
            a_log=inputs["A_log"],
            dt_bias=inputs["dt_bias"],
            plan_name=ENGINE,
        )
        return out.view_as(inputs["v"]), final_state

    return call


PEER = Peer("cuDNN frontend", {}, ("many heads", "few heads"), unavailable, prepare)
