"""`flash_kda.fwd`: the call, and its way to the CPU path or to the compiled kernels."""

import importlib
import os

import torch

from flash_kda.validation import in_common_form, validate

SCHEDULES = ("auto", "portable", "sm90")

_extension = None


def extension():
    """The compiled kernels, `flash_kda._C`, loaded at first use; RuntimeError if there are none."""
    global _extension
    if _extension is None:
        try:
            _extension = importlib.import_module("flash_kda._C")
        except ModuleNotFoundError as error:
            if error.name != "flash_kda._C":
                raise
            raise RuntimeError(
                "this flash_kda was installed without CUDA kernels (FLASH_KDA_CUDA_ARCHS=none) and runs on CPU tensors "
                "only; to build them, run `FLASH_KDA_CUDA_ARCHS=auto pip install -v --no-build-isolation .` in its "
                "sources on a machine with nvcc 12.9 or newer"
            ) from None
    return _extension


def _raw_stream_of(device_index):
    return torch.cuda.current_stream(device_index).cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream_of)


def schedule() -> str:
    """The kernel schedule that the environment variable FLASH_KDA_SCHEDULE asks for; ValueError for an unknown one."""
    name = os.environ.get("FLASH_KDA_SCHEDULE", "auto")
    if name not in SCHEDULES:
        raise ValueError(f"FLASH_KDA_SCHEDULE: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    return name


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """Kimi Delta Attention, forward pass, written into `out` and `final_state`.

    Per sequence and head, with the state S in R^{V x K} and K = V = 128 (Kimi Linear report, arXiv 2510.26692):

        q_t <- q_t / sqrt(|q_t|^2 + 1e-6)        k_t likewise
        a_t  = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias))        natural log of the decay, per key channel
        S   <- S diag(exp(a_t))
        u_t  = sigmoid(beta_t) * (v_t - S k_t)
        S   <- S + u_t k_t^T
        o_t  = scale * S q_t

    Args:
        q, k: bf16 [B, T, H, K], query and key before normalisation; H >= 1.
        v: bf16 [B, T, H, V], value.
        g: bf16 [B, T, H, K], gate before activation.
        beta: bf16 [B, T, H], logits, any strides.
        scale: factor of the query, usually K ** -0.5; finite in fp32.
        out: bf16 [B, T, H, V], written in place.
        A_log: fp32 [H], natural log of the gate's slope.
        dt_bias: fp32 [H, K], gate bias.
        lower_bound: natural log of the strongest decay of a token, in [-5, 0).
        initial_state: bf16 or fp32 [N, H, V, K]; None starts from zero.
        final_state: bf16 or fp32 [N, H, V, K], written in place; None skips it. It has initial_state's dtype and
            may be the same tensor. The running state is fp32 in either case.
        cu_seqlens: int64 [N + 1], on the tensors' device: B is 1 and sequence n holds the tokens cu_seqlens[n] up to
            cu_seqlens[n + 1]. Without it every batch row is a sequence and N = B.

    q, k, v, g and out may have any batch, token and head strides that are multiples of 8 elements, with contiguous
    channels; A_log, dt_bias, the states and cu_seqlens are contiguous. q, k, v, g, out and both states start at 16-byte
    aligned addresses. Nothing is copied. `out` and `final_state` overlap no other argument and `out` does not overlap
    itself.

    A zero-length sequence copies its initial state (or zeros) to its final state to the last bit; T = 0 and N = 0 are
    legal. Rows of `out` that no sequence covers stay as they are. cu_seqlens is not read by the host on a GPU: entries
    are clamped instead of checked, to start = clamp(cu_seqlens[n], 0, T) and end = clamp(cu_seqlens[n + 1], start, T).

    Range: the GPU kernels shift factors by up to 2^57, so |u_t| (about |v_t|) up to 2^69 and states from 2^-69 up come
    through without overflow or lost bits. A NaN or an Inf in a token never reaches another sequence. The CPU path keeps
    it from every earlier token, too; on a GPU it may reach earlier tokens of the same chunk of 16 (0 * NaN in a matrix
    product), never earlier chunks.

    CUDA tensors: asynchronous on torch's current stream of their device, without host synchronisation, safe to capture
    in a CUDA graph. FLASH_KDA_SCHEDULE = auto | portable | sm90 picks the kernels: sm90 runs on compute capability 9.0,
    portable everywhere, auto is sm90 where that runs. What TMA cannot address (no tokens, a stride of 0) sm90 leaves to
    portable. Their results agree to the bit.
    CPU tensors: chunked PyTorch, fp32 inside, whatever the schedule.

    Raises (before anything is written; the message names the argument, what was expected and what came):
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device, stride, value or overlap; a tensor that requires grad while grad mode is on
            (there is no backward pass); an unknown FLASH_KDA_SCHEDULE.
        RuntimeError: CUDA tensors without kernels for their device in this installation, a schedule that their device
            does not run, or a failed launch.
    """
    arguments = (q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
    try:
        valid = in_common_form(*arguments)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        valid = False
    if not valid:
        validate(*arguments)
    chosen = schedule()
    if not q.is_cuda:
        from flash_kda.cpu import fwd_cpu

        fwd_cpu(*arguments)
        return

    B, T, H, _ = q.shape
    device = q.get_device()
    state = final_state if initial_state is None else initial_state
    (_extension or extension()).fwd(
        *_address(q),
        *_address(k),
        *_address(v),
        *_address(g),
        *_address(out),
        *_address(beta),
        A_log.data_ptr(),
        dt_bias.data_ptr(),
        0 if initial_state is None else initial_state.data_ptr(),
        0 if final_state is None else final_state.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        T,
        H,
        B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        scale,
        lower_bound,
        state is not None and state.dtype is torch.float32,
        device,
        _raw_stream(device),
        chosen,
    )


def _address(x):
    """Address and batch, token and head strides in elements."""
    return x.data_ptr(), *x.stride()[:3]
