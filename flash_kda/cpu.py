"""The CPU path of `flash_kda.fwd`: the chunked form of Kimi Delta Attention in PyTorch, fp32 inside.

Per chunk of C = 16 tokens, with G_i the inclusive cumulative sum of the natural-log decays, B = diag(beta):

    K+_i = k_i e^{G_i}    Q+_i = scale q_i e^{G_i}    K-_j = k_j e^{-G_j}    K~_j = k_j e^{G_C - G_j}
    L = strictly lower part of B K+ K-^T    M = lower part of Q+ K-^T    A = (I + L)^{-1} B    W = A K+
    U = A V - W S^T    O = Q+ S^T + M U    S <- S diag(e^{G_C}) + U^T K~

With MA for M A, O = MA V - (MA K+ - Q+) S^T has the form of U, so that one product with the state serves both:

    [U; O] = [A; MA] V - [W; MA K+ - Q+] S^T

Only [U; O] and S depend on the previous chunk; everything else is computed for many chunks, heads and sequences at
once.

Range: lower_bound >= -5 and C = 16 keep |G| <= 80, so e^{G} and e^{-G} are ordinary fp32 numbers and no further
reference point is needed. The decay to the chunk's end is summed on its own, not divided out, so it is at most 1
whatever the gates are. Under the unbounded gates, rows of L and M from the first one on whose G leaves that range come
from the decays between pairs of tokens instead, each summed on its own (`_exact_rows`): whatever the decays are, and
whatever follows in the chunk.

Reproducibility: every matrix product has a shape that depends on the chunk alone and tails are padded, so a row's
bits depend neither on later tokens nor on the other sequences and heads of the call. Elementwise functions run on
contiguous buffers only, since PyTorch may evaluate exp differently on strided data.
"""

import math
import threading

import torch

from flash_kda.recurrence import L2_EPSILON, sequence_bounds
from flash_kda.validation import FLOAT32_MAX, PLAIN, Options

CHUNK = 16
RANGE = 81.0  # of |G|, just past what the bounded gate reaches
STRONGEST_DECAY = -208.0  # a natural-log decay that takes every fp32 number to zero, as any stronger one does
# Rows of 128 channels (tokens times heads) processed together: large enough to amortise a PyTorch call, small enough
# for caches, and bounded, so that memory use does not grow with the input.
BLOCK_ROWS = 4096
BUFFERS = 7  # of that many rows, in which a block works
TEMPORARIES = 8  # of that many rows: more than what PyTorch's functions allocate at any one time
_FP32 = dict(dtype=torch.float32, device="cpu")  # whatever the caller's defaults are
_kept = threading.local()


@torch.inference_mode()
@torch.autocast("cpu", enabled=False)
def fwd_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    options: Options = PLAIN,
) -> None:
    """`flash_kda.fwd` for CPU tensors that have passed validation; shapes, dtypes and meaning are those of `fwd`."""
    scale = float(scale)  # PyTorch takes no int beyond int64
    B, T, _, _ = q.shape
    H = v.shape[2]
    starts, lengths = sequence_bounds(B, T, cu_seqlens)
    # (sequence, first row's batch index and token, length), longest first: the running ones are always a prefix.
    sequences = [
        (n, *((0, start) if cu_seqlens is not None else (n, 0)), length)
        for n, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    sequences.sort(key=lambda sequence: -sequence[3])
    gate = _gate(A_log, dt_bias, lower_bound, H, options)
    states = _States(initial_state, final_state, len(sequences), options)
    tensors = (q, k, v, g, beta)

    # Everything that needs memory comes before anything is written: what is lacking shows while the caller's tensors
    # are as they were. (Other threads may still take what PyTorch's functions will ask for.)
    rows = max(BLOCK_ROWS, CHUNK * H)
    workspace = _workspace(rows)
    group = max(1, BLOCK_ROWS // (CHUNK * H))
    # [K, V]: transposed, which makes both products with a state plain row-major ones. The last is for prefixes.
    running_states = torch.empty(min(group, len(sequences)) + 1, H, 128, 128, **_FP32)
    torch.empty(TEMPORARIES, rows * 128, **_FP32)

    for i in range(0, len(sequences), group):
        part = sequences[i : i + group]
        state = running_states[: len(part)]
        _forward(part, tensors, scale, gate, out, states, state, workspace, options)
        if not math.isfinite(state.sum().item()):
            # In a matrix product 0 * NaN is NaN, so a NaN or Inf input also reaches earlier rows of its own chunk. The
            # tokens before it do not depend on it: they are computed again, as the sequence that ends there. What
            # spreads comes by k, v, g or beta, all of which reach the state and stay in it. One in q remains in its
            # own row.
            for n, b, start, length in part:
                prefix = _finite_prefix(tensors, b, start, length)
                if 0 < prefix < length:
                    short = [(n, b, start, prefix)]
                    _forward(short, tensors, scale, gate, out, states, running_states[-1:], workspace, options)
        states.store([n for n, *_ in part], state)  # last, because it may be the initial state


def _finite_prefix(tensors, b, start, length):
    """How many of the tokens come before the first that is NaN or Inf in any of the tensors."""
    step = max(1, BLOCK_ROWS // tensors[2].shape[2])
    for first in range(0, length, step):
        rows = slice(start + first, start + min(first + step, length))
        finite = torch.stack([x[b, rows].isfinite().flatten(1).all(-1) for x in tensors]).all(0)
        if not finite.all():
            return first + int(finite.int().cumprod(0).sum())
    return length


def _workspace(rows):
    """fp32 [BUFFERS, rows * 128], the same memory for all blocks, and for all calls of a thread.

    Fresh memory would cost as much in page faults as the computation itself. A thread keeps what blocks of BLOCK_ROWS
    need, 14 MiB; what more heads need is given back.
    """
    if rows > BLOCK_ROWS:
        return torch.empty(BUFFERS, rows * 128, **_FP32)
    if not hasattr(_kept, "workspace"):
        _kept.workspace = torch.empty(BUFFERS, BLOCK_ROWS * 128, **_FP32)
    return _kept.workspace


def _gate(A_log, dt_bias, lower_bound, H, options):
    """(function, sums, bounded): decays, triangles, and whether a chunk stays within RANGE whatever g is.

    The function turns g, fp32 [..., H, CHUNK, 128], in place into natural-log decays over a common factor: lower_bound
    for the bounded gate, else 1. Cumulative sums within a chunk, and those of the tokens after each, are products with
    triangles of that factor.
    """
    A_log = torch.zeros(H, **_FP32) if A_log is None else A_log
    dt_bias = torch.zeros(H, 128, **_FP32) if dt_bias is None else dt_bias.view(H, 128)
    # Finite: 0 times it has to be 0.
    negated_slope, bias = A_log.exp().clamp(max=FLOAT32_MAX).neg()[:, None, None], dt_bias[:, None, :]
    ones = torch.ones(CHUNK, CHUNK, **_FP32)
    sums = torch.cat((ones.tril(), ones.triu(1)))

    def bounded(g):
        return _sigmoid_of_negated(g.add_(bias).mul_(negated_slope))

    def softplus(g):
        # Where softplus is an exponential, the slope goes into its exponent: alone, one might vanish and the other
        # overflow.
        g.add_(bias).clamp_(max=FLOAT32_MAX)
        small = torch.add(g, A_log[:, None, None]).exp_().neg_()
        large = negated_slope * torch.nn.functional.softplus(g)
        return g.copy_(torch.where(g < -15, small, large)).clamp_(min=STRONGEST_DECAY)

    if options.gate == "log":
        return lambda g: g.clamp_(min=STRONGEST_DECAY), sums, False
    if lower_bound is None:
        return softplus, sums, False
    return bounded, sums.mul_(float(lower_bound)), True


def _sigmoid_of_negated(x):
    """1 / (1 + exp(x)), in place."""
    # Not torch.sigmoid: its vectorised body and its scalar tail differ in the last bit, and where the tail lies
    # depends on the size of the tensor.
    return x.exp_().add_(1).reciprocal_()


class _States:
    """The states of the sequences: rows of the caller's tensors, and where checkpoints go."""

    def __init__(self, initial, final, N, options):
        self.initial, self.final = initial, final
        self.rows = list(range(N))
        if options.state_indices is not None:
            pool = len(initial if initial is not None else final)
            self.rows = [row if 0 <= row < pool else -1 for row in options.state_indices.tolist()]
        self.checkpoints = options.checkpoints
        if self.checkpoints is not None:
            self.offsets = options.checkpoint_offsets.tolist()
            self.interval, self.at_start = options.checkpoint_interval, options.checkpoint_at == "start"

    def load(self, sequences, state):
        """Fill `state`, fp32 [sequences, H, K, V]."""
        for n, place in zip(sequences, state.unbind(), strict=True):
            if self.initial is None or self.rows[n] < 0:
                place.zero_()
            else:
                place.copy_(self.initial[self.rows[n]].transpose(1, 2))

    def store(self, sequences, state):
        """Write `state`, fp32 [sequences, H, K, V], to the final states."""
        if self.final is None:
            return
        for n, place in zip(sequences, state.unbind(), strict=True):
            if self.rows[n] >= 0:
                self.final[self.rows[n]].copy_(place.transpose(1, 2))

    def store_checkpoint(self, sequence, tokens, length, state):
        """`state` [H, K, V] after `tokens` of the sequence's `length` tokens, where that is a checkpoint."""
        if self.checkpoints is None or tokens % self.interval:
            return
        if tokens >= length if self.at_start else tokens == 0 or tokens > length:
            return
        row = self.offsets[sequence] + tokens // self.interval - (not self.at_start)
        if 0 <= row < min(self.offsets[sequence + 1], len(self.checkpoints)):
            self.checkpoints[row].copy_(state.transpose(1, 2))


def _forward(sequences, tensors, scale, gate, out, states, state, workspace, options):
    """Run some (index, batch row, first token, length) `sequences`, longest first, from start to end.

    `state`, fp32 [sequences, H, K, V], is where their states are loaded and run, and holds the final ones afterwards.
    """
    H = tensors[2].shape[2]
    states.load([n for n, *_ in sequences], state)
    for i, (n, _, _, length) in enumerate(sequences):
        states.store_checkpoint(n, 0, length, state[i])

    token = 0
    running = len(sequences)
    while True:
        while running and sequences[running - 1][3] <= token:
            running -= 1
        if not running:
            break
        # As many chunks as fit the block, but not past the chunk in which the shortest running sequence ends.
        chunks = max(1, BLOCK_ROWS // (running * H * CHUNK))
        chunks = min(chunks, -(-(sequences[running - 1][3] - token) // CHUNK))
        parts = [
            (i, b, start + token, min(length - token, chunks * CHUNK))
            for i, (_, b, start, length) in enumerate(sequences[:running])
        ]

        def checkpoint(chunk, token=token, running=running):
            tokens = token + (chunk + 1) * CHUNK
            if states.checkpoints is not None and tokens % states.interval == 0:
                for i, (n, _, _, length) in enumerate(sequences[:running]):
                    states.store_checkpoint(n, tokens, length, state[i])

        _block(parts, chunks, tensors, scale, gate, out, state[:running], workspace, options, checkpoint)
        token += chunks * CHUNK


def _pieces(parts):
    """(part, its chunks, batch row, tokens, rows of each chunk): whole chunks in one piece, the tail in another."""
    for i, b, start, length in parts:
        whole = length // CHUNK
        if whole:
            yield i, slice(0, whole), b, slice(start, start + whole * CHUNK), CHUNK
        if length % CHUNK:
            yield i, slice(whole, whole + 1), b, slice(start + whole * CHUNK, start + length), length % CHUNK


def _block(parts, chunks, tensors, scale, gate, out, state, workspace, options, checkpoint):
    """Advance the running sequences by `chunks` chunks: write their rows of out, update `state` [running, H, K, V].

    `checkpoint` is told the number of every chunk whose state is complete.
    """
    running, H = state.shape[:2]
    shape = (chunks, running, H, CHUNK)
    pieces = list(_pieces(parts))
    tails = [(where, i, rows) for i, where, _, _, rows in pieces if rows < CHUNK]
    matrices = chunks * running * H

    def buffer(first, count=1):
        """`count` buffers of the workspace from the `first` on, as [matrices, count * CHUNK, 128]."""
        return workspace[first : first + count].view(-1)[: matrices * count * CHUNK * 128].view(matrices, -1, 128)

    def load(x, buffer):
        """Tokens of x [B, T, H, ...] as fp32 [chunks, running, H, CHUNK, ...], zero past a sequence's end."""
        groups = (x.shape[2], H // x.shape[2])  # every head of q and k serves as many of v
        for i, where, b, tokens, rows in pieces:
            place = buffer[where, i, :, :rows].unflatten(1, groups)
            place.copy_(x[b, tokens].unflatten(0, (-1, rows)).transpose(1, 2).unsqueeze(2))
        return clear_tails(buffer)

    def clear_tails(buffer):
        for where, i, rows in tails:
            buffer[where, i, :, rows:] = 0
        return buffer

    def inverse_norm(x):
        if not options.use_qk_l2norm_in_kernel:
            return torch.ones(*x.shape[:-1], 1, **_FP32)
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2_EPSILON).rsqrt_()

    def activated(beta):
        if options.use_beta_sigmoid_in_kernel:
            beta = _sigmoid_of_negated(beta.neg_())
        return clear_tails(beta.mul_(2) if options.allow_neg_eigval else beta)

    # First 0 above -Q+, then W above MA K+ - Q+. The result of a batched product has to be contiguous: PyTorch would
    # compute it matrix by matrix otherwise.
    WQ = buffer(0, 2)
    q = WQ[:, CHUNK:]
    k_plus, k, g, decay = buffer(2), buffer(3), buffer(4), buffer(5, 2)
    log_decay, sums, bounded = gate
    clear_tails(log_decay(load(tensors[3], g.view(*shape, 128))))
    beta = activated(load(tensors[4], torch.empty(shape, **_FP32))).view(matrices, CHUNK)

    # e^{G_i} above e^{G_C - G_j}
    torch.bmm(sums.expand(matrices, -1, -1), g, out=decay)
    inexact = torch.empty(0, dtype=torch.int64)
    if not bounded:
        beyond = (decay[:, :CHUNK].amin(-1) < -RANGE).int().cummax(-1).values.bool()
        inexact = beyond.any(-1).nonzero().flatten()
    decay.exp_()
    to_here, to_end = decay[:, :CHUNK], decay[:, CHUNK:]
    chunk_decay = to_here[:, -1, :, None].clone()

    load(tensors[0], q.unflatten(0, shape[:3]))
    q.mul_(inverse_norm(q).mul_(-scale))
    q_unit = q[inexact] if len(inexact) else None
    q.mul_(to_here)
    load(tensors[1], k.view(*shape, 128))
    k.mul_(inverse_norm(k))
    torch.mul(k, to_here, out=k_plus)
    exact = _exact_rows(q_unit, k[inexact], g[inexact]) if len(inexact) else ()
    k_minus = torch.div(k, to_here, out=to_here).mT
    k_end = k.mul_(to_end).mT
    L = torch.bmm(k_plus, k_minus)
    # Selected, not multiplied: what is above the diagonal, scale e^75 at most, may be infinite.
    M = torch.bmm(q, k_minus).tril_()
    for x, rows in zip((L, M), exact, strict=False):
        x[inexact] = torch.where(beyond[inexact, :, None], rows, x[inexact])
    L.mul_(beta[..., None])
    M.neg_()
    # The triangular solve reads neither L's diagonal nor what is above it.
    A = torch.linalg.solve_triangular(L.mT, beta.diag_embed(), upper=True, left=False, unitriangular=True).mT
    A = torch.cat((A, M @ A), 1)
    WQ[:, :CHUNK] = 0
    WQ.baddbmm_(A, k_plus)
    # g and the decays are no longer needed, and their memory is.
    v = load(tensors[2], g.view(*shape, 128)).view_as(g)
    UO = torch.bmm(A, v, out=decay)

    S = state.view(running * H, 128, 128)
    by_chunk = (x.unflatten(0, (chunks, -1)).unbind() for x in (WQ, UO, UO[:, :CHUNK], k_end, chunk_decay))
    for chunk, (WQ_c, UO_c, U_c, k_end_c, decay_c) in enumerate(zip(*by_chunk, strict=True)):
        UO_c.baddbmm_(WQ_c, S, alpha=-1)
        S.mul_(decay_c).baddbmm_(k_end_c, U_c)
        checkpoint(chunk)

    o = UO[:, CHUNK:]
    for i, where, b, tokens, rows in pieces:
        out[b, tokens].unflatten(0, (-1, rows)).copy_(o.unflatten(0, shape[:3])[where, i, :, :rows].transpose(1, 2))


def _exact_rows(q, k, log_decay):
    """Rows of K+ K-^T and Q+ K-^T from the decays between tokens, 0 above the diagonal; all fp32 [n, CHUNK, 128]."""
    between = torch.zeros_like(k)  # from token j to the row's token i, for every j
    L, M = (torch.zeros(len(k), CHUNK, CHUNK, **_FP32) for _ in range(2))
    for i in range(CHUNK):
        between[:, :i] += log_decay[:, i : i + 1]
        decayed = between.exp().mul_(k)
        L[:, i, :i] = (decayed * k[:, i : i + 1]).sum(-1)[:, :i]
        M[:, i, : i + 1] = (decayed * q[:, i : i + 1]).sum(-1)[:, : i + 1]
    return L, M
