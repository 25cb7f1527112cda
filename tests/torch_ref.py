"""The portable kernel step by step in PyTorch, rounding where it rounds: results agree bit for bit.

Every (sequence, head) pair is walked in chunks of 16 tokens, all pairs at once. Factors of all chunks are made first
(they do not depend on the state), then one step a chunk carries the state. PyTorch does what rounds the same everywhere
(fp32 addition and multiplication, conversion to bf16); tests/reference_ops.cu supplies single instructions for the
rest.

Formula: the Kimi Linear report, arXiv 2510.26692; notation as in csrc/portable/config.h. CUDA only, SM90 or newer.
"""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from pathlib import Path

import torch

CHUNK = 16
HEAD_DIM = 128
SHIFT = 57


class _Ops:
    """The single instructions of reference_ops.cu, on CUDA tensors of the current device and stream."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))

    def _call(self, name: str, *arguments) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        values = [ctypes.c_void_p(a.data_ptr()) if torch.is_tensor(a) else ctypes.c_int64(a) for a in arguments]
        status = getattr(self._library, name)(*values, stream)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def _elementwise(self, name: str, *operands: torch.Tensor) -> torch.Tensor:
        operands = [x.contiguous() for x in torch.broadcast_tensors(*operands)]
        assert all(x.is_cuda and x.dtype == torch.float32 for x in operands)
        result = torch.empty_like(operands[0])
        if result.numel():
            self._call(name, *operands, result, result.numel())
        return result

    def exp2_approx(self, x: torch.Tensor) -> torch.Tensor:
        return self._elementwise("exp2_approx", x)

    def rcp_approx(self, x: torch.Tensor) -> torch.Tensor:
        return self._elementwise("rcp_approx", x)

    def rsqrt_approx(self, x: torch.Tensor) -> torch.Tensor:
        return self._elementwise("rsqrt_approx", x)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return self._elementwise("exp_accurate", x)

    def fma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """a b + c, rounded once; operands broadcast."""
        return self._elementwise("fused_multiply_add", a, b, c)

    def mma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """c + a b^T for bf16 a [P, m, depth], b [P, n, depth] and fp32 c [P, m, n], depth in ascending steps of 16."""
        a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
        (p, m, depth), n = a.shape, b.shape[1]
        assert a.dtype == b.dtype == torch.bfloat16 and c.dtype == torch.float32
        assert b.shape == (p, n, depth) and c.shape == (p, m, n)
        assert m % 16 == 0 and n % 8 == 0 and depth % 16 == 0
        result = torch.empty_like(c)
        if result.numel():
            self._call("tensor_core_product", a, b, c, result, p, m, n, depth)
        return result


@functools.cache
def ops() -> _Ops:
    """Compile the instruction helpers with nvcc (seconds, once a process) and load them."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise RuntimeError("torch_ref needs nvcc to build tests/reference_ops.cu: put it on the PATH or set CUDA_HOME")
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}"
    source = Path(__file__).with_name("reference_ops.cu")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "reference_ops.so"
        subprocess.run(
            [str(Path(CUDA_HOME) / "bin" / "nvcc"), "-O2", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
            + [f"-gencode=arch=compute_{arch},code=sm_{arch}", str(source), "-o", str(library)],
            check=True,
        )
        return _Ops(library)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16 and widen again."""
    return x.to(torch.bfloat16).float()


def _product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """c + a b^T as the tensor core accumulates it, over any leading dimensions. a and b hold bf16 values."""
    lead = a.shape[:-2]
    rows, columns = a.shape[-2], b.shape[-2]
    if c is None:
        c = a.new_zeros(*lead, rows, columns, dtype=torch.float32)
    flat = ops().mma(
        a.reshape(-1, *a.shape[-2:]).to(torch.bfloat16),
        b.reshape(-1, *b.shape[-2:]).to(torch.bfloat16),
        c.reshape(-1, rows, columns),
    )
    return flat.reshape(*lead, rows, columns)


def _square_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares over the channels: the diagonal of x x^T."""
    return _product(x, x).diagonal(dim1=-2, dim2=-1)


def _sigmoid_of_negated_log2(z: torch.Tensor) -> torch.Tensor:
    return ops().rcp_approx(1.0 + ops().exp2_approx(z))


def _inverse(lower: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """diag(diagonal) (I + L)^-1 by back substitution for its rows, in descending order."""
    x = torch.diag_embed(diagonal)
    for r in range(CHUNK - 1, 0, -1):
        x[..., :r] = ops().fma(-lower[..., r : r + 1, :r], x[..., r : r + 1], x[..., :r])
    return x


def _gather(x: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B, T, H, ...] -> [N, H, chunks, 16, ...] in fp32, rows that are not there set to zero."""
    flat = x.reshape(-1, *x.shape[2:])
    if flat.shape[0] == 0:
        return x.new_zeros(*rows.shape, *x.shape[2:], dtype=torch.float32).movedim(3, 1)
    picked = flat[rows.clamp(max=flat.shape[0] - 1)].float()
    mask = valid.reshape(*valid.shape, *([1] * (picked.dim() - valid.dim())))
    return torch.where(mask, picked, torch.zeros((), device=x.device)).movedim(3, 1)


def forward(
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
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as in ``flash_kda.fwd``; returns (out, final_state).

    out is bf16 [B, T, H, 128], final_state ``state_dtype`` [N, H, 128, 128].
    Rows of ``out`` that belong to no sequence are zero.
    """
    exp2, fma = ops().exp2_approx, ops().fma
    device = q.device
    B, T, H, D = q.shape
    log2e = torch.tensor(math.log2(math.e), dtype=torch.float32, device=device)

    # Where each chunk's rows lie: [N, chunks, 16] rows of the flattened [B * T] tokens.
    if cu_seqlens is None:
        begins = torch.arange(B, device=device) * T
        lengths = torch.full((B,), T, device=device)
    else:
        begins = cu_seqlens[:-1].clamp(0, T)
        lengths = torch.maximum(cu_seqlens[1:].clamp(max=T), begins) - begins
    N = begins.numel()
    chunks = -(-int(lengths.max()) // CHUNK) if N else 0
    position = torch.arange(chunks * CHUNK, device=device).reshape(chunks, CHUNK)
    valid = position < lengths[:, None, None]
    rows = begins[:, None, None] + position

    state = torch.zeros(N, H, D, D, device=device) if initial_state is None else initial_state.float().clone()
    out = torch.zeros(B, T, H, D, dtype=torch.bfloat16, device=device)
    if chunks == 0 or N == 0:
        return out, state.to(state_dtype)

    q, k, v, g = (_gather(x, rows, valid) for x in (q, k, v, g))  # [N, H, chunks, 16, D]
    logit = _gather(beta, rows, valid)  # [N, H, chunks, 16]
    valid = valid[:, None]

    # Gates: log2 decay = lower_bound log2(e) sigmoid(exp(A_log) (g + dt_bias)), summed inside the chunk.
    slope = -ops().exp(A_log) * log2e
    bias = (dt_bias * slope[:, None])[None, :, None]
    slope = slope[None, :, None, None]
    floor = torch.tensor(lower_bound, dtype=torch.float32, device=device) * log2e
    running = torch.zeros_like(g)
    total = torch.zeros_like(g[..., 0, :])
    for i in range(CHUNK):
        sigmoid = _sigmoid_of_negated_log2(fma(g[..., i, :], slope, bias))
        total = torch.where(valid[..., i, None], fma(floor, sigmoid, total), total)
        running[..., i, :] = total
    decay = exp2(total)
    strength = torch.where(valid, _sigmoid_of_negated_log2(logit * -log2e), 0.0)

    # Factors, shifted by a power of two.
    norm_q = ops().rsqrt_approx(_square_sums(q) + 1e-6) * torch.tensor(scale, dtype=torch.float32, device=device)
    exponent = running + SHIFT
    shrink, grow = exp2(exponent), exp2(-exponent)
    k_shrunk = _bf16(k * shrink)
    q_shrunk = _bf16(q * norm_q[..., None] * shrink)
    k_grown = _bf16(k * grow)
    gram = _product(k_shrunk, k_grown)
    norm_k = ops().rsqrt_approx(gram.diagonal(dim1=-2, dim2=-1) + 1e-6)
    lower = torch.tril((strength * norm_k)[..., None] * gram * norm_k[..., None, :], -1)
    m = _bf16(torch.tril(_product(q_shrunk, k_grown)))
    a = _inverse(lower, norm_k) * strength[..., None, :]
    a_hi = _bf16(a)
    a_lo = _bf16(a - a_hi)
    del running, exponent, shrink, grow, gram, g, q, k

    # The recurrence, value rows by tokens. Empty sequences pass their state on untouched.
    some = (lengths > 0)[:, None, None, None]
    state = torch.where(some, state * 2.0**-SHIFT, state)
    o = torch.zeros_like(v)
    for c in range(chunks):
        live = valid[:, :, c].any(-1)[..., None, None]
        state_bf16 = _bf16(state)
        x = fma(-norm_k[:, :, c, None], _product(state_bf16, k_shrunk[:, :, c]), v[:, :, c].mT)
        x_hi = _bf16(x)
        x_lo = _bf16(x - x_hi)
        u = _product(x_lo, a_hi[:, :, c])
        u = _product(x_hi, a_lo[:, :, c], u)
        u = _bf16(_product(x_hi, a_hi[:, :, c], u))
        o_t = _product(u, m[:, :, c], _product(state_bf16, q_shrunk[:, :, c]))
        o[:, :, c] = o_t.mT
        state = torch.where(live, _product(u, k_grown[:, :, c].mT, state) * decay[:, :, c, None, :], state)
    state = torch.where(some, state * 2.0**SHIFT, state)

    picked = valid[:, 0]
    out.view(-1, H, D)[rows[picked]] = o.movedim(1, 3)[picked].to(torch.bfloat16)
    return out, state.to(state_dtype)
