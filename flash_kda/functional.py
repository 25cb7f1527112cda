"""`flash_kda.chunk_kda`: flash-linear-attention's call, answered by `flash_kda.fwd` into tensors that it allocates."""

import torch

from flash_kda.interface import checkpoint_offsets, fwd
from flash_kda.validation import ALIGNMENT, HEAD_DIM, check_dtype, check_tensor

STATE_INTERVAL = 64  # tokens between the intermediate states, flash-linear-attention's chunk
CHUNK_SIZES = (32, 64)  # what flash-linear-attention takes


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = STATE_INTERVAL,
) -> tuple[torch.Tensor, ...]:
    """Kimi Delta Attention with the argument names, defaults and return values of `fla.ops.kda.chunk_kda` (0.6).

    Note the defaults: q and k are taken as normalised, g as natural-log decays and beta as activated, unless the
    `use_*_in_kernel` switches say otherwise. The formula is that of `flash_kda.fwd`.

    Args:
        q, k: bf16 [B, T, H, K]; K = V = 128.
        v: bf16 [B, T, HV, V], HV a multiple of H.
        g: bf16 or fp32 [B, T, HV, K], natural-log decays, or the raw gate with use_gate_in_kernel.
        beta: bf16 or fp32 [B, T, HV].
        scale: factor of the query; None is K ** -0.5.
        initial_state: fp32 or bf16 [N, HV, K, V], or [N, HV, V, K] with state_v_first.
        output_final_state: whether to return the final state.
        use_gate_in_kernel: g is raw; A_log [HV] and dt_bias [HV * K] or [HV, K] (None is 0) go with it. The gate is
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), or -exp(A_log) * softplus(g + dt_bias) where lower_bound
            is None. A_log may have dimensions of size 1 besides.
        allow_neg_eigval: 2 * sigmoid(beta); only with use_beta_sigmoid_in_kernel.
        safe_gate: with use_gate_in_kernel it requires lower_bound; it changes no result here, where every gate is safe.
        lower_bound: in [-5, 0).
        return_intermediate_states: return the states before every 64 tokens, too.
        state_v_first: states are [V, K]; else [K, V], which costs a transposed copy of each.
        cu_seqlens: int64 or int32 [N + 1], packed sequences.
        cu_seqlens_cpu: the same on the host: return_intermediate_states then does not wait for the device.
        use_graph, max_num_seqs: with use_graph the number of intermediate states of packed sequences is taken as its
            upper bound, so that nothing waits for the device and the call can be captured.
        disable_recompute: accepted; it concerns a backward pass.
        cp_context: None; context parallelism is not supported.
        chunk_size: 64 with return_intermediate_states; else 64 or 32, and it changes no result.

    Returns:
        out: bf16 [B, T, HV, V]. Rows that no sequence covers hold anything.
        final_state: fp32 [N, HV, K, V] ([N, HV, V, K] with state_v_first), or None.
        h: with return_intermediate_states only, bf16 [B, NT, HV, K, V] (or [V, K]): the states before every 64 tokens,
            NT = ceil(T / 64), or the sum over the packed sequences (B = 1). With use_graph rows past that sum hold
            anything.

    Raises:
        TypeError, ValueError, RuntimeError: as `flash_kda.fwd` does, whose limits are those of this call.
    """
    if cp_context is not None:
        raise ValueError("cp_context: expected None, context parallelism is not supported")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound: expected a number with safe_gate=True and use_gate_in_kernel=True, got None")
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel=True and lower_bound=None, got None")
    if return_intermediate_states and chunk_size != STATE_INTERVAL:
        raise ValueError(f"chunk_size: expected {STATE_INTERVAL} with return_intermediate_states, got {chunk_size!r}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {', '.join(map(str, CHUNK_SIZES))}, got {chunk_size!r}")
    # What has to hold before `fwd` can look at it.
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_tensor(name, x, is_optional=False)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("initial_state", initial_state)):
        if x is not None:
            check_tensor(name, x, is_optional=True)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}")
    # FLA reads it as [HV * K] whatever its shape is: [K, HV] would be other numbers than meant.
    if dt_bias is not None and dt_bias.dim() > 1 and dt_bias.shape[-1] != HEAD_DIM:
        raise ValueError(f"dt_bias: expected shape [HV * {HEAD_DIM}] or [HV, {HEAD_DIM}], got {list(dt_bias.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("initial_state", initial_state)):
        if x is not None and x.dim() != 4:
            raise ValueError(f"{name}: expected four dimensions, got shape {list(x.shape)}")
    if initial_state is not None:
        check_dtype("initial_state", initial_state, torch.bfloat16, torch.float32)
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None:
            check_tensor(name, x, is_optional=True)
            check_dtype(name, x, torch.int64, torch.int32)
            if x.dim() != 1 or not x.shape[0]:
                raise ValueError(f"{name}: expected shape [N + 1] with N >= 0, got {list(x.shape)}")
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, which says where sequences begin")
    if cu_seqlens is not None and cu_seqlens_cpu is not None and cu_seqlens.shape != cu_seqlens_cpu.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected the shape of cu_seqlens, {list(cu_seqlens.shape)}, "
            f"got {list(cu_seqlens_cpu.shape)}"
        )
    B, T = q.shape[:2]
    HV = v.shape[2]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1

    def layout(state):
        return state if state_v_first else state.transpose(-1, -2).contiguous()

    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = None
    if output_final_state:
        final_state = torch.empty(N, HV, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=q.device)
    if initial_state is not None:
        initial_state = layout(initial_state).contiguous()
        # The running state is fp32 whatever the initial one is, and so is what is returned.
        initial_state = initial_state.float() if output_final_state else initial_state
    checkpoints = {}
    if return_intermediate_states:
        offsets, rows = _state_rows(B, T, cu_seqlens, cu_seqlens_cpu, use_graph, q.device)
        checkpoints = {
            "checkpoints": torch.empty(rows, HV, HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16, device=q.device),
            "checkpoint_interval": STATE_INTERVAL,
            "checkpoint_offsets": offsets,
            "checkpoint_at": "start",
        }
    if use_gate_in_kernel:
        gate = {
            "A_log": None if A_log is None else A_log.float().flatten(),
            "dt_bias": None if dt_bias is None else dt_bias.float().flatten(),
            "lower_bound": lower_bound,
        }
    else:
        gate = {"A_log": None, "dt_bias": None, "lower_bound": None, "gate": "log"}
    fwd(
        *(_served(x) for x in (q, k, v, g)),
        beta,
        HEAD_DIM**-0.5 if scale is None else scale,
        out,
        initial_state=initial_state,
        final_state=final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        **gate,
        **checkpoints,
    )
    if final_state is not None:
        final_state = layout(final_state)
    if not return_intermediate_states:
        return out, final_state
    h = layout(checkpoints["checkpoints"])
    return out, final_state, h.unflatten(0, (B, -(-T // STATE_INTERVAL))) if cu_seqlens is None else h[None]


def _served(x):
    """x itself where `fwd` takes its strides, else a contiguous copy."""
    unit = ALIGNMENT // x.element_size()
    steps = (stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    # A traced tensor has no address yet: `fwd` looks at it when the graph runs. Nor has one that torch.func has put in
    # the place of another, which is `fwd`'s to refuse.
    try:
        aligned = torch.compiler.is_compiling() or x.data_ptr() % ALIGNMENT == 0
    except RuntimeError:
        return x
    if aligned and x.stride(-1) == 1 and all(stride % unit == 0 for stride in steps):
        return x
    return x.contiguous()


def _state_rows(B, T, cu_seqlens, cu_seqlens_cpu, use_graph, device):
    """(checkpoint offsets on the device, rows needed) of the states before every 64 tokens."""
    if cu_seqlens is None:
        offsets = checkpoint_offsets(torch.full((B,), T, device=device), STATE_INTERVAL, "start")
        return offsets, B * (-(-T // STATE_INTERVAL))
    offsets = _packed_offsets(cu_seqlens, T)
    if use_graph:
        return offsets, max(0, -(-T // STATE_INTERVAL) + len(cu_seqlens) - 2)
    return offsets, int((offsets if cu_seqlens_cpu is None else _packed_offsets(cu_seqlens_cpu, T))[-1])


def _packed_offsets(cu_seqlens, T):
    """Checkpoint offsets of packed sequences, whose entries are clamped as `fwd` clamps them."""
    start = cu_seqlens[:-1].clamp(0, T)
    length = (cu_seqlens[1:].clamp(max=T) - start).clamp(min=0)
    return checkpoint_offsets(length, STATE_INTERVAL, "start")
