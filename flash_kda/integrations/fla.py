"""A backend for flash-linear-attention's dispatcher, in place of the one that it ships for flash_kda.

FLA's own backend serves raw inputs with the bounded gate. This one also takes grouped value heads, intermediate states,
A_log or dt_bias of None, the softplus gate, decays and betas that are already activated, normalised q and k, negative
eigenvalues, and states in either layout.
"""

import inspect

import torch

from flash_kda.functional import CHUNK_SIZES, STATE_INTERVAL, chunk_kda
from flash_kda.interface import extension
from flash_kda.validation import HEAD_DIM, LOWER_BOUND_MIN, is_number, type_name


def register() -> None:
    """Make `fla.ops.kda.chunk_kda` call this package wherever it can. Idempotent.

    FLA's switches keep their meaning: FLA_FLASH_KDA=0 opts out, and FLA logs at INFO which backend it took or why it
    declined one.

    Raises:
        ImportError: flash-linear-attention 0.6 or newer is not installed.
        RuntimeError: FLA_DISABLE_BACKEND_DISPATCH=1 has turned FLA's dispatcher off.
    """
    try:
        from fla import backends
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError as error:
        raise ImportError(
            f"flash_kda.integrations.fla needs flash-linear-attention 0.6 or newer, which cannot be imported: {error}"
        ) from error
    if not hasattr(backends, "register"):
        raise ImportError(
            "flash_kda.integrations.fla needs flash-linear-attention 0.6 or newer: fla.backends has no register"
        )
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1 has turned flash-linear-attention's dispatcher off")

    class FlashKDABackend(backends.BaseBackend):
        backend_type = "flash_kda"  # the shipped backend's, which it replaces
        package_name = "flash_kda"
        env_var = "FLA_FLASH_KDA"
        default_enable = True
        priority = 3

        def chunk_kda_verifier(self, *args, **kwargs):
            reason = why_not(*args, **kwargs)
            return reason is None, reason

        def chunk_kda(self, *args, **kwargs):
            return chunk_kda(*args, **_current_names(kwargs))

    backends.register(fla_chunk_kda)(FlashKDABackend)


_SIGNATURE = inspect.signature(chunk_kda)


def _current_names(kwargs):
    """A call's keyword arguments, with FLA's former name of state_v_first replaced."""
    kwargs = dict(kwargs)
    if "transpose_state_layout" in kwargs:
        kwargs["state_v_first"] = kwargs.pop("transpose_state_layout")
    return kwargs


def why_not(*args, **kwargs) -> str | None:
    """Why `flash_kda.chunk_kda` cannot take the arguments of a call of `fla.ops.kda.chunk_kda`; None if it can."""
    if "state_v_first" in kwargs and "transpose_state_layout" in kwargs:
        return "flash_kda does not know which of state_v_first and transpose_state_layout to take"
    try:
        bound = _SIGNATURE.bind(*args, **_current_names(kwargs))
    except TypeError as error:
        return f"flash_kda does not know these arguments: {error}"
    bound.apply_defaults()
    x = bound.arguments
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    for name in ("q", "k", "v", "g", "beta"):
        if not isinstance(x[name], torch.Tensor):
            return f"flash_kda requires tensors, got {name} of {type(x[name]).__name__}"
    for name in ("q", "k", "v", "g"):
        if x[name].dim() != 4:
            return f"flash_kda requires four dimensions, got {name} of shape {list(x[name].shape)}"
    if torch.is_grad_enabled():
        return "flash_kda computes the forward pass only, and gradients are enabled"
    if not q.is_cuda:
        return f"flash_kda serves flash-linear-attention on CUDA devices, got {q.device}"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != torch.bfloat16:
            return f"flash_kda requires bfloat16, got {name} of {tensor.dtype}"
    for name, tensor in (("g", g), ("beta", beta)):
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            return f"flash_kda requires bfloat16 or float32, got {name} of {tensor.dtype}"
    state = x["initial_state"]
    if state is not None and getattr(state, "dtype", None) not in (torch.bfloat16, torch.float32):
        kind = getattr(state, "dtype", type(state).__name__)
        return f"flash_kda requires bfloat16 or float32, got initial_state of {kind}"
    if q.shape[-1] != HEAD_DIM or v.shape[-1] != HEAD_DIM:
        return f"flash_kda requires K = V = {HEAD_DIM}, got K = {q.shape[-1]} and V = {v.shape[-1]}"
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        return f"flash_kda requires HV to be a multiple of H, got HV = {v.shape[2]} and H = {q.shape[2]}"
    if x["cu_seqlens"] is None and x["cu_seqlens_cpu"] is not None:
        return "flash_kda requires cu_seqlens with cu_seqlens_cpu"
    if x["cp_context"] is not None:
        return "flash_kda does not support context parallelism"
    for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
        if not isinstance(x[name], bool):
            return f"flash_kda requires a bool, got {name} of {type_name(x[name])}"
    for name in ("scale", "lower_bound"):
        if x[name] is not None and not is_number(x[name]):
            return f"flash_kda requires a float, got {name} of {type_name(x[name])}"
    if x["use_gate_in_kernel"]:
        bound_of_gate = x["lower_bound"]
        if bound_of_gate is None and (x["safe_gate"] or x["A_log"] is None):
            return "flash_kda requires lower_bound with safe_gate=True or without A_log"
        if bound_of_gate is not None and not LOWER_BOUND_MIN <= bound_of_gate < 0:
            return f"flash_kda requires lower_bound in [{LOWER_BOUND_MIN:g}, 0), got {bound_of_gate}"
    if x["allow_neg_eigval"] and not x["use_beta_sigmoid_in_kernel"]:
        return "allow_neg_eigval requires use_beta_sigmoid_in_kernel=True"
    if x["chunk_size"] not in CHUNK_SIZES:
        return f"flash_kda requires chunk_size in {CHUNK_SIZES}, got {x['chunk_size']}"
    if x["return_intermediate_states"] and x["chunk_size"] != STATE_INTERVAL:
        return (
            f"flash_kda returns intermediate states every {STATE_INTERVAL} tokens, got chunk_size = {x['chunk_size']}"
        )
    try:
        archs = extension().build_info()["archs"]
    except RuntimeError as error:
        return str(error)
    major, minor = torch.cuda.get_device_capability(q.device)
    if f"{major}{minor}a" not in archs:
        return f"flash_kda was built for {', '.join(archs)}, and {q.device} has compute capability {major}.{minor}"
    return None
