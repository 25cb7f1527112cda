"""The operation token by token: the yardstick of the tests, the benchmarks and the command line.

Written for exactness and for reading, not for speed: `flash_kda.fwd` is the fast one.
"""

import torch

L2_EPSILON = 1e-6


def sequence_bounds(B: int, T: int, cu_seqlens: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Start row and length of every sequence, rows counted over [B * T].

    With `cu_seqlens` (int64 [N + 1]) out-of-range and non-monotone entries are clamped as the kernels clamp them:
    start_n = clamp(cu_n, 0, T), end_n = clamp(cu_{n+1}, start_n, T).
    """
    if cu_seqlens is None:
        return [b * T for b in range(B)], [T] * B
    cu = cu_seqlens.tolist()
    starts = [min(max(start, 0), T) for start in cu[:-1]]
    lengths = [min(max(end, start), T) - start for start, end in zip(starts, cu[1:], strict=True)]
    return starts, lengths


def natural_log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    gate: str = "raw",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The natural-log decays [B, T, HV, K] of `flash_kda.fwd`'s gates, in `dtype`."""
    g = g.to(dtype)
    if gate == "log":
        return g
    slope = 1.0 if A_log is None else A_log.to(dtype).exp()[:, None]
    x = g if dt_bias is None else g + dt_bias.to(dtype).view(g.shape[-2:])
    if lower_bound is None:
        return -slope * torch.nn.functional.softplus(x, threshold=50.0)
    return lower_bound * torch.sigmoid(slope * x)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    checkpoint_interval: int | None = None,
    checkpoint_at: str = "end",
    gate: str = "raw",
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Kimi Delta Attention (Kimi Linear report, arXiv 2510.26692), one token after the other, in `dtype`.

    Per sequence and head, with q_t and k_t L2-normalised (epsilon 1e-6 under the root), b_t = sigmoid(beta_t) and the
    natural-log decay a_t = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias)):

        S_t = S_{t-1} diag(exp(a_t)) (I - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = scale * S_t q_t

    Arguments have the shapes and meanings that `flash_kda.fwd` gives them (any floating dtype, any device), other
    gates and activations included; initial_state is [N, HV, V, K], without indices. All sequences advance together, so
    the number of steps is the longest length. Reads `cu_seqlens` on the host.

    Returns:
        out: `dtype` [B, T, HV, V]; rows that no sequence covers are zero.
        final_state: `dtype` [N, HV, V, K].
        checkpoints: with `checkpoint_interval` only, `dtype` [M, HV, V, K], sequence after sequence.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    starts, lengths = sequence_bounds(B, T, cu_seqlens)
    N = len(lengths)

    # Longest first, so that the sequences still running at any step are a prefix; tokens are then laid out step by
    # step.
    order = torch.tensor(sorted(range(N), key=lambda n: -lengths[n]), dtype=torch.int64, device=q.device)
    start = torch.tensor(starts, dtype=torch.int64, device=q.device)[order]
    length = torch.tensor(lengths, dtype=torch.int64, device=q.device)[order]
    steps = torch.arange(max(lengths, default=0), device=q.device)
    running = steps[:, None] < length[None, :]
    rows = (start[None, :] + steps[:, None])[running]
    counts = running.sum(1).tolist()

    def by_step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.reshape(B * T, *x.shape[2:])[rows].to(dtype).split(counts)

    def of_key(x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype)
        if use_qk_l2norm_in_kernel:
            x = x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)
        return x.repeat_interleave(HV // H, 2)

    decay = natural_log_decay(g, A_log, dt_bias, lower_bound, gate, dtype).exp()
    beta = beta.to(dtype)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    state = torch.zeros(N, HV, V, K, dtype=dtype, device=q.device)
    if initial_state is not None:
        state += initial_state[order].to(dtype)

    outs = []
    taken = {}  # sequence -> its checkpoints

    def take_checkpoints(step: int) -> None:
        if checkpoint_interval is None or step % checkpoint_interval or (step == 0 and checkpoint_at == "end"):
            return
        for place, n in enumerate(order.tolist()):
            if lengths[n] >= step + (checkpoint_at == "start"):
                taken.setdefault(n, []).append(state[place].clone())

    inputs = (of_key(q) * float(scale), of_key(k), v, decay, beta)
    for step, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(*map(by_step, inputs), strict=True)):
        take_checkpoints(step)
        S = state[: len(q_t)]
        S *= decay_t[:, :, None, :]
        u_t = beta_t[..., None] * (v_t - (S @ k_t[..., None]).squeeze(-1))
        S += u_t[..., :, None] * k_t[..., None, :]
        outs.append((S @ q_t[..., None]).squeeze(-1))
    take_checkpoints(len(counts))

    out = torch.zeros(B * T, HV, V, dtype=dtype, device=q.device)
    if outs:
        out[rows] = torch.cat(outs)
    final_state = torch.empty_like(state)
    final_state[order] = state
    if checkpoint_interval is None:
        return out.view(B, T, HV, V), final_state
    checkpoints = [x for n in range(N) for x in taken.get(n, [])]
    checkpoints = torch.stack(checkpoints) if checkpoints else state.new_zeros(0, HV, V, K)
    return out.view(B, T, HV, V), final_state, checkpoints
