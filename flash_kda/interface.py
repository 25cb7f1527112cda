"""`flash_kda.fwd`: the call, and its way to the CPU path or to the compiled kernels."""

import functools
import importlib
import os
import re

import torch
from torch.autograd.graph import increment_version

from flash_kda.validation import (
    CHECKPOINTS_AT,
    PLAIN,
    Options,
    check_choice,
    check_interval,
    checkpoint_count,
    in_common_form,
    is_plain,
    may_hold_tangents,
    validate,
)

SCHEDULES = ("auto", "pairs", "portable", "sm90", "segments")

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
        _let_it_read_tensors(_extension)
    return _extension


def _not_launched(*arguments) -> bool:
    return False


# Launches a call that is legal and usual, straight from its tensors: True; else does nothing: False. It takes `fwd`'s
# arguments by position, with or without the keyword-only ones. The kernels' own once they are loaded, if PyTorch lets
# others read its tensors (2.10 and newer).
_launch = _not_launched


def _let_it_read_tensors(kernels):
    global _launch
    # PyTorch's own table: into older versions other packages put one whose streams need not be the current ones.
    find_table = getattr(torch._C, "_dlpack_exchange_api", None)
    if find_table is None:
        return
    if kernels.read_tensors_with(find_table(), torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled):
        _launch = kernels.fwd_tensors


def _raw_stream_of(device_index):
    return torch.cuda.current_stream(device_index).cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream_of)


def _is_segments_of(name):
    match = re.fullmatch("segments:([1-9][0-9]{,8})", name)
    return match is not None and int(match[1]) % 16 == 0


def schedule() -> str:
    """The kernel schedule that the environment variable FLASH_KDA_SCHEDULE asks for; ValueError for an unknown one.

    One of SCHEDULES, or segments:TOKENS, which cuts sequences into segments of that many tokens, a multiple of 16.
    """
    name = os.environ.get("FLASH_KDA_SCHEDULE", "auto")
    if name not in SCHEDULES and not _is_segments_of(name):
        raise ValueError(
            f"FLASH_KDA_SCHEDULE: expected one of {', '.join(SCHEDULES)}, or segments:TOKENS with a multiple of 16, "
            f"got {name!r}"
        )
    return name


def fwd(
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
    *,
    state_indices: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
    checkpoint_interval: int | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
    checkpoint_at: str = "end",
    gate: str = "raw",
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> None:
    """Kimi Delta Attention, forward pass, written into `out`, `final_state` and `checkpoints`.

    Per sequence and head, with the state S in R^{V x K} and K = V = 128 (Kimi Linear report, arXiv 2510.26692):

        q_t <- q_t / sqrt(|q_t|^2 + 1e-6)        k_t likewise
        a_t  = lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias))        natural log of the decay, per key channel
        S   <- S diag(exp(a_t))
        u_t  = sigmoid(beta_t) * (v_t - S k_t)
        S   <- S + u_t k_t^T
        o_t  = scale * S q_t

    Args:
        q, k: bf16 [B, T, H, K], query and key before normalisation; H >= 1.
        v: bf16 [B, T, HV, V], value; HV is a multiple of H, and head h of v goes with head h // (HV / H) of q and k.
        g: bf16 or fp32 [B, T, HV, K], gate before activation, or natural-log decays (see `gate`).
        beta: bf16 or fp32 [B, T, HV], logits, any strides.
        scale: factor of the query, usually K ** -0.5; finite in fp32.
        out: bf16 [B, T, HV, V], written in place.
        A_log: fp32 [HV], natural log of the gate's slope; None is a slope of 1.
        dt_bias: fp32 [HV, K] or [HV * K], gate bias; None is 0.
        lower_bound: natural log of the strongest decay of a token, in [-5, 0). None takes the unbounded gate
            a_t = -exp(A_log) * softplus(g_t + dt_bias), which is right for every finite input: natural-log decays of
            -208 and less take every fp32 state to zero, and count as -208. A sum g_t + dt_bias beyond the range of fp32
            counts as the largest number in it.
        initial_state: bf16 or fp32 [N, HV, V, K]; None starts from zero.
        final_state: bf16 or fp32 [N, HV, V, K], written in place; None skips it. It has initial_state's dtype and
            may be the same tensor. The running state is fp32 in either case.
        cu_seqlens: int64 or int32 [N + 1], on the tensors' device: B is 1 and sequence n holds the tokens cu_seqlens[n]
            up to cu_seqlens[n + 1]. Without it every batch row is a sequence and N = B.
        state_indices: int64 or int32 [N], on the tensors' device: initial_state and final_state are pools
            [P, HV, V, K] of one shape, and sequence n reads and writes row state_indices[n]. -1, as any index outside
            the pool, starts from zero and writes no state. Other rows stay untouched. Where two sequences name one
            row, parts of either's state end up in it, and parts of either's may be read.
        checkpoints: bf16 or fp32 [M, HV, V, K], written in place: the sequences' states on the way; None skips them.
        checkpoint_interval: tokens between checkpoints, a multiple of 64.
        checkpoint_offsets: int64 [N + 1], on the tensors' device: sequence n has rows checkpoint_offsets[n] up to
            checkpoint_offsets[n + 1] of `checkpoints`; what does not fit there, or not into the tensor, is left out.
            None lays the sequences' checkpoints one after the other, as `flash_kda.checkpoint_offsets` does.
        checkpoint_at: "end" writes the states after each whole interval of a sequence: 130 tokens at an interval of 64
            give those after 64 and 128 tokens. "start" writes the states before each interval, begun ones included:
            those before token 0, 64 and 128.
        gate: "raw", or "log": g holds the natural-log decays a_t themselves, at most 0, of any strength; A_log, dt_bias
            and lower_bound are None.
        use_qk_l2norm_in_kernel: False takes q and k as they are, normalised by the caller.
        use_beta_sigmoid_in_kernel: False takes beta as it is, activated by the caller.
        allow_neg_eigval: 2 * sigmoid(beta_t) instead of sigmoid(beta_t).

    q, k, v, g and out may have any batch, token and head strides that are multiples of 16 bytes, with contiguous
    channels. The states' rows may lie apart (a first stride that is a multiple of 16 bytes); each is contiguous, as
    are A_log, dt_bias, cu_seqlens, state_indices and the checkpoints. q, k, v, g, out, the states and checkpoints start
    at 16-byte aligned addresses. Nothing is copied. `out`, `final_state` and `checkpoints` overlap no other argument
    and `out` does not overlap itself.

    A zero-length sequence copies its initial state (or zeros) to its final state to the last bit; T = 0 and N = 0 are
    legal. Rows of `out` that no sequence covers stay as they are. cu_seqlens is not read by the host on a GPU: entries
    are clamped instead of checked, to start = clamp(cu_seqlens[n], 0, T) and end = clamp(cu_seqlens[n + 1], start, T).

    Range: the GPU kernels shift factors by up to 2^57, so |u_t| (about |v_t|) up to 2^69 and states from 2^-69 up come
    through without overflow or lost bits. A NaN or an Inf in a token never reaches another sequence. The CPU path keeps
    it from every earlier token, too; on a GPU it may reach earlier tokens of the same chunk of 16 (0 * NaN in a matrix
    product), never earlier chunks.

    CUDA tensors: asynchronous on torch's current stream of their device, without host synchronisation, safe to capture
    in a CUDA graph. FLASH_KDA_SCHEDULE = auto | pairs | portable | sm90 | segments picks the kernels: sm90 and segments
    run on compute capability 9.0, portable everywhere. What TMA cannot address (no tokens, a stride of 0) they leave to
    portable. portable and sm90 agree to the bit; segments, which cuts sequences (segments:TOKENS: into pieces of that
    many), agrees with them within their errors, and takes a workspace from PyTorch's allocator. auto takes segments for
    few heads and long sequences, else sm90 where that runs; pairs is auto without segments, so that a sequence's bits
    do not depend on the batch. For decoding, which is a call with `state_indices` and at most 16 tokens a batch row, or
    4 a packed sequence on average, both take a kernel that works token by token in fp32.
    CPU tensors: chunked PyTorch, fp32 inside, whatever the schedule.
    Under torch.compile the call is the custom operator `torch.ops.flash_kda.fwd`, which mutates its outputs.

    Raises (before anything is written; the message names the argument, what was expected and what came):
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong shape, device, stride, value or overlap; a tensor that requires grad while grad mode is on,
            or is a dual tensor with a tangent (there are no derivatives); an unknown FLASH_KDA_SCHEDULE.
        RuntimeError: CUDA tensors without kernels for their device in this installation, a schedule that their device
            does not run, or a failed launch.
    """
    arguments = (q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
    options = options_of(
        state_indices,
        checkpoints,
        checkpoint_interval,
        checkpoint_offsets,
        checkpoint_at,
        gate,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    if torch.compiler.is_compiling():
        torch.ops.flash_kda.fwd(*arguments, *options)
        return
    run(arguments, options)


def options_of(
    state_indices, checkpoints, interval, offsets, at, gate, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval
) -> Options:
    """The keyword-only arguments of `fwd`, in order, as Options; PLAIN itself where all are at their defaults."""
    if (
        state_indices is None
        and checkpoints is None
        and interval is None
        and offsets is None
        and type(at) is str
        and at == "end"
        and type(gate) is str
        and gate == "raw"
        and use_qk_l2norm is True
        and use_beta_sigmoid is True
        and allow_neg_eigval is False
    ):
        return PLAIN
    return Options(
        state_indices, checkpoints, interval, offsets, at, gate, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval
    )


def run(arguments: tuple, options: Options) -> None:
    """`fwd` for its positional arguments, in order, and its options."""
    # Tangents are not seen from C++.
    if not may_hold_tangents() and _launch(*(arguments if options is PLAIN else arguments + options)):
        _count_as_written(arguments, options)
        return
    numbers = ()
    if options is PLAIN:
        try:
            numbers = in_common_form(*arguments)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            pass
    plain = bool(numbers)
    if not plain:
        validate(*arguments, options)
    chosen = schedule()
    q = arguments[0]
    if options.checkpoints is not None and options.checkpoint_offsets is None:
        options = options._replace(
            checkpoint_offsets=_dense_offsets(q, arguments[-1], options.checkpoint_interval, options.checkpoint_at)
        )
    if not q.is_cuda:
        from flash_kda.cpu import fwd_cpu

        fwd_cpu(*arguments, options)
        return
    if not plain:
        numbers, plain = numbers_of(*arguments, options)
    kernels = _extension or extension()
    device = q.get_device()
    call = kernels.fwd if plain else kernels.fwd_general
    cu_seqlens, tokens, heads, sequences = numbers[-7:-3]
    size = _workspace_bytes(tokens, heads, sequences, cu_seqlens != 0, device, chosen)
    if size:
        # Given back when the kernels have been launched: the allocator keeps the order of the stream.
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        call(*numbers, device, _raw_stream(device), chosen, workspace.data_ptr(), size)
    else:
        call(*numbers, device, _raw_stream(device), chosen, 0, 0)
    _count_as_written(arguments, options)


def _count_as_written(arguments, options):
    """Tells autograd what the kernels wrote: it then refuses a backward pass that needs what was there before."""
    out, final_state, checkpoints = arguments[6], arguments[11], options.checkpoints
    increment_version(out)
    if final_state is not None:
        increment_version(final_state)
    if checkpoints is not None:
        increment_version(checkpoints)


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(tokens, heads, sequences, is_packed, device, chosen):
    return extension().workspace_bytes(tokens, heads, sequences, is_packed, device, chosen)


def numbers_of(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens, options
):
    """(the kernels' arguments, up to the device, of a call that `validate` has passed; whether it is a plain one)."""
    B, T, H, _ = q.shape
    HV = v.shape[2]
    state = final_state if initial_state is None else initial_state
    common = (
        *(number for x in (q, k, v, g, out, beta) for number in (x.data_ptr(), *x.stride()[:3])),
        *(_pointer(x) for x in (A_log, dt_bias, initial_state, final_state, cu_seqlens)),
        T,
        HV,
        B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        scale,
        -1.0 if lower_bound is None else lower_bound,
        state is not None and state.dtype is torch.float32,
    )
    if is_plain(q, v, g, beta, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens, options):
        return common, True
    indices, checkpoints = options.state_indices, options.checkpoints
    general = (
        _pointer(indices),
        indices is not None and indices.dtype is torch.int32,
        0 if state is None else state.shape[0],
        *(0 if x is None else _pitch(x) for x in (initial_state, final_state)),
        _pointer(checkpoints),
        _pointer(options.checkpoint_offsets),
        0 if checkpoints is None else checkpoints.shape[0],
        options.checkpoint_interval or 0,
        options.checkpoint_at == "start",
        checkpoints is not None and checkpoints.dtype is torch.float32,
        HV // H,
        "log" if options.gate == "log" else "softplus" if lower_bound is None else "sigmoid",
        ("twice sigmoid" if options.allow_neg_eigval else "sigmoid")
        if options.use_beta_sigmoid_in_kernel
        else "activated",
        cu_seqlens is not None and cu_seqlens.dtype is torch.int32,
        g.dtype is torch.float32,
        beta.dtype is torch.float32,
        options.use_qk_l2norm_in_kernel,
    )
    return general + common, False


def checkpoint_offsets(lengths: torch.Tensor, interval: int, at: str = "end") -> torch.Tensor:
    """Where the checkpoints of sequences of these lengths lie if they follow each other without gaps.

    Args:
        lengths: integers [N], tokens of the sequences, on any device; the host does not read them.
        interval, at: `checkpoint_interval` and `checkpoint_at` of `fwd`.

    Returns:
        int64 [N + 1] on the lengths' device: sequence n has rows [n] up to [n + 1], and [N] rows are needed in all.

    Raises:
        TypeError, ValueError: lengths that are no tensor of integers [N], or an interval or `at` that `fwd` rejects.
    """
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"lengths: expected a torch.Tensor, got {type(lengths).__name__}")
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype is torch.bool:
        raise TypeError(f"lengths: expected an integer dtype, got {lengths.dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths: expected shape [N], got {list(lengths.shape)}")
    check_interval("interval", interval)
    check_choice("at", at, CHECKPOINTS_AT)
    counts = checkpoint_count(lengths.to(torch.int64), interval, at)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _dense_offsets(q, cu_seqlens, interval, at):
    B, T = q.shape[:2]
    if cu_seqlens is None:
        count = checkpoint_count(T, interval, at)
        return torch.arange(0, (B + 1) * count, count, device=q.device) if count else q.new_zeros(B + 1).long()
    start = cu_seqlens[:-1].clamp(0, T)
    end = torch.maximum(cu_seqlens[1:].clamp(max=T), start)
    return checkpoint_offsets(end - start, interval, at)


def _pointer(x):
    return 0 if x is None else x.data_ptr()


def _pitch(state):
    """Elements from one row of a state pool to the next."""
    return state.stride(0) if len(state) > 1 else 0
