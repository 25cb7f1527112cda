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


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention (Kimi Linear report, arXiv 2510.26692), one token after the other, in `dtype`.

    Per sequence and head, with q_t and k_t L2-normalised (epsilon 1e-6 under the root), b_t = sigmoid(beta_t) and the
    natural-log decay a_t = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias)):

        S_t = S_{t-1} diag(exp(a_t)) (I - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = scale * S_t q_t

    Arguments have the shapes that `flash_kda.fwd` takes (any floating dtype, any device); all sequences advance
    together, so the number of steps is the longest length. Reads `cu_seqlens` on the host.

    Returns:
        out: `dtype` [B, T, H, V]; rows that no sequence covers are zero.
        final_state: `dtype` [N, H, V, K].
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
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

    def normalised(x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype)
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)

    decay = torch.exp(lower_bound * torch.sigmoid(A_log.to(dtype).exp()[:, None] * (g.to(dtype) + dt_bias.to(dtype))))
    state = torch.zeros(N, H, V, K, dtype=dtype, device=q.device)
    if initial_state is not None:
        state += initial_state[order].to(dtype)

    outs = []
    inputs = (normalised(q) * float(scale), normalised(k), v, decay, torch.sigmoid(beta.to(dtype)))
    for q_t, k_t, v_t, decay_t, beta_t in zip(*map(by_step, inputs), strict=True):
        S = state[: len(q_t)]
        S *= decay_t[:, :, None, :]
        u_t = beta_t[..., None] * (v_t - (S @ k_t[..., None]).squeeze(-1))
        S += u_t[..., :, None] * k_t[..., None, :]
        outs.append((S @ q_t[..., None]).squeeze(-1))

    out = torch.zeros(B * T, H, V, dtype=dtype, device=q.device)
    if outs:
        out[rows] = torch.cat(outs)
    final_state = torch.empty_like(state)
    final_state[order] = state
    return out.view(B, T, H, V), final_state
