"""chunk_kda of flash-linear-attention with its own Triton kernels."""

import torch

from benchmarks.peers.peer import Peer


def unavailable():
    try:
        from fla.ops.kda import chunk_kda  # noqa: F401
    except ImportError as error:
        return f"flash-linear-attention cannot be imported: {error}"
    return None


def prepare(inputs, cu_seqlens):
    from fla.ops.kda import chunk_kda

    # Without the host's copy FLA would read cu_seqlens back from the device, which no CUDA graph can capture.
    cu_seqlens_cpu = None if cu_seqlens is None else cu_seqlens.cpu()

    @torch.inference_mode()
    def call():
        return chunk_kda(
            **inputs,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            output_final_state=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            state_v_first=True,
        )

    return call


# Only on the many-heads table by default: compiling and tuning it for every head count takes minutes.
PEER = Peer("FLA Triton", {"FLA_FLASH_KDA": "0"}, ("many heads",), unavailable, prepare)
