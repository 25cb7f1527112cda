"""What `flash_kda.fwd` accepts: every rule is checked before anything is written.

`validate` holds the rules. There are two quick ways for the calls that engines make thousands of times a second. They
may say no to a legal call (which then takes the time of `validate`), never yes to an illegal one: csrc/api/call.cpp,
which the kernels bring along, for PyTorch 2.10 and newer, and `in_common_form`, for older versions and plain calls.
"""

import math
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

HEAD_DIM = 128
LOWER_BOUND_MIN = -5.0
ALIGNMENT = 16  # bytes: the kernels move rows in 16-byte pieces
FLOAT32_MAX = torch.finfo(torch.float32).max
# The kernels count a sequence's tokens, in steps of up to 128, the pairs and the heads in 32 bits.
TOKENS_MAX = 2**31 - 256
PAIRS_MAX = 2**31 - 1
HEADS_MAX = 2**24 - 1

CHECKPOINT_UNIT = 64  # checkpoints lie on multiples of this many tokens
GATES = ("raw", "log")
CHECKPOINTS_AT = ("end", "start")


class Options(NamedTuple):
    """The keyword-only arguments of `flash_kda.fwd`; the defaults make the plain call."""

    state_indices: torch.Tensor | None = None
    checkpoints: torch.Tensor | None = None
    checkpoint_interval: int | None = None
    checkpoint_offsets: torch.Tensor | None = None
    checkpoint_at: str = "end"
    gate: str = "raw"
    use_qk_l2norm_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False


PLAIN = Options()

_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_NUMBER_TYPES = frozenset((float, int))
_bfloat16, _float32, _int64 = torch.bfloat16, torch.float32, torch.int64
_is_grad_enabled = torch.is_grad_enabled


def in_common_form(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
) -> tuple:
    """The plain kernels' arguments, up to the device, if the call is legal, plain and usual; else an empty tuple.

    These are the address and the batch, token and head strides in elements of q, k, v, g, out and beta; the addresses
    of A_log, dt_bias, initial_state, final_state and cu_seqlens, 0 for None; T, H, N, scale and lower_bound; whether
    the states are fp32. Usual means that the address ranges of the inputs do not meet those of the outputs.

    Plain is what the plain kernels serve: one head of q and k for each of v, bf16 tokens, the bounded gate with A_log
    and dt_bias [H, K], contiguous states and int64 cu_seqlens.

    Where csrc/api/call.cpp cannot be, most of what a call costs the host goes by here: a property of a tensor is asked
    for once, and the tensors that every call has are compared without a loop. May raise AttributeError, TypeError,
    ValueError or RuntimeError where an argument is not a dense tensor or number at all.
    """
    shape, device, grad = q.shape, q.device, _is_grad_enabled()
    B, T, H, K = shape
    if not (
        type(q) in _TENSOR_TYPES
        and type(k) in _TENSOR_TYPES
        and type(v) in _TENSOR_TYPES
        and type(g) in _TENSOR_TYPES
        and type(out) in _TENSOR_TYPES
        and type(beta) in _TENSOR_TYPES
        and type(A_log) in _TENSOR_TYPES
        and type(dt_bias) in _TENSOR_TYPES
        and q.dtype is k.dtype is v.dtype is g.dtype is out.dtype is beta.dtype is _bfloat16
        and A_log.dtype is dt_bias.dtype is _float32
        and device == k.device == v.device == g.device == out.device == beta.device == A_log.device == dt_bias.device
        and (q.is_cuda or q.is_cpu)
        and shape == k.shape == v.shape == g.shape == out.shape
        and beta.shape == (B, T, H)
        and A_log.shape == (H,)
        and dt_bias.shape == (H, HEAD_DIM)
        and K == HEAD_DIM
        and 1 <= H <= HEADS_MAX
        and T <= TOKENS_MAX
        and A_log.is_contiguous()
        and dt_bias.is_contiguous()
        # Only a view of one number can be contiguous and, as the imaginary part of a conjugate, lazily negated.
        and (H > 1 or not A_log.is_neg())
        and type(scale) in _NUMBER_TYPES
        and type(lower_bound) in _NUMBER_TYPES
        and -FLOAT32_MAX <= scale <= FLOAT32_MAX
        and LOWER_BOUND_MIN <= lower_bound < 0
        and not may_hold_tangents()
    ):
        return ()
    if grad and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or out.requires_grad
        or beta.requires_grad
        or A_log.requires_grad
        or dt_bias.requires_grad
    ):
        return ()

    q_at, k_at, v_at, g_at, out_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), out.data_ptr()
    beta_at, A_log_at, dt_bias_at = beta.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr()
    if (q_at | k_at | v_at | g_at | out_at) & 15 or not (
        q_at and k_at and v_at and g_at and out_at and beta_at and A_log_at and dt_bias_at
    ):
        return ()
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and g.is_contiguous() and out.is_contiguous():
        token = H * HEAD_DIM
        batch = T * token
        size = 2 * B * batch
        q_end, k_end, v_end, g_end, out_end = q_at + size, k_at + size, v_at + size, g_at + size, out_at + size
        row = HEAD_DIM
        places = q_at, batch, token, row, k_at, batch, token, row, v_at, batch, token, row
        places += g_at, batch, token, row, out_at, batch, token, row
    else:
        places, ends = (), []
        for x, at in ((q, q_at), (k, k_at), (v, v_at), (g, g_at), (out, out_at)):
            batch, token, head, channel = x.stride()
            if channel != 1 or (batch | token | head) & 7:
                return ()
            places += at, batch, token, head
            ends.append(at + 2 * ((B - 1) * batch + (T - 1) * token + (H - 1) * head + HEAD_DIM))
        # The strides of out: each dimension steps over the one inside it, in the order [B, T, H] or [B, H, T].
        if not (
            (head >= HEAD_DIM and token >= H * head and batch >= T * token)
            or (token >= HEAD_DIM and head >= T * token and batch >= H * head)
        ):
            return ()
        q_end, k_end, v_end, g_end, out_end = ends
    batch, token, head = beta.stride()
    beta_end = beta_at + 2 * ((B - 1) * batch + (T - 1) * token + (H - 1) * head + 1)

    # Of what is not there, address and end are 0: a range that meets no other.
    N, cu_seqlens_at, cu_seqlens_end = B, 0, 0
    if cu_seqlens is not None:
        (entries,) = cu_seqlens.shape
        N, cu_seqlens_at = entries - 1, cu_seqlens.data_ptr()
        if (
            type(cu_seqlens) not in _TENSOR_TYPES
            or cu_seqlens.dtype is not _int64
            or cu_seqlens.device != device
            or B != 1
            or not cu_seqlens_at
            or not cu_seqlens.is_contiguous()
            or (grad and cu_seqlens.requires_grad)
        ):
            return ()
        cu_seqlens_end = cu_seqlens_at + 8 * entries
    if N * H > PAIRS_MAX:
        return ()

    initial_at = initial_end = final_at = final_end = 0
    fp32 = False
    state = final_state if initial_state is None else initial_state
    if state is not None:
        dtype, state_shape = state.dtype, (N, H, HEAD_DIM, HEAD_DIM)
        fp32 = dtype is _float32
        if not fp32 and dtype is not _bfloat16:
            return ()
        size = N * H * HEAD_DIM * HEAD_DIM * (4 if fp32 else 2)
        if final_state is not None:
            final_at = _address_of_state(final_state, dtype, state_shape, device, grad)
            final_end = final_at + size
            if not final_at or (final_at < out_end and out_at < final_end):
                return ()
        if initial_state is not None:
            initial_at = _address_of_state(initial_state, dtype, state_shape, device, grad)
            if not initial_at:
                return ()
            if initial_at != final_at:  # else updated in place
                initial_end = initial_at + size
    A_log_end, dt_bias_end = A_log_at + 4 * H, dt_bias_at + 4 * H * HEAD_DIM
    if (
        (q_at < out_end and out_at < q_end)
        or (k_at < out_end and out_at < k_end)
        or (v_at < out_end and out_at < v_end)
        or (g_at < out_end and out_at < g_end)
        or (beta_at < out_end and out_at < beta_end)
        or (A_log_at < out_end and out_at < A_log_end)
        or (dt_bias_at < out_end and out_at < dt_bias_end)
        or (initial_at < out_end and out_at < initial_end)
        or (cu_seqlens_at < out_end and out_at < cu_seqlens_end)
        or (q_at < final_end and final_at < q_end)
        or (k_at < final_end and final_at < k_end)
        or (v_at < final_end and final_at < v_end)
        or (g_at < final_end and final_at < g_end)
        or (beta_at < final_end and final_at < beta_end)
        or (A_log_at < final_end and final_at < A_log_end)
        or (dt_bias_at < final_end and final_at < dt_bias_end)
        or (initial_at < final_end and final_at < initial_end)
        or (cu_seqlens_at < final_end and final_at < cu_seqlens_end)
    ):
        return ()
    places += beta_at, batch, token, head, A_log_at, dt_bias_at, initial_at, final_at, cu_seqlens_at
    return places + (T, H, N, scale, lower_bound, fp32)


def _address_of_state(x, dtype, shape, device, grad):
    """The address of a state in the common form, else 0."""
    address = x.data_ptr()
    if (
        type(x) in _TENSOR_TYPES
        and x.dtype is dtype
        and x.device == device
        and x.shape == shape
        and not address & 15
        and x.is_contiguous()
        and not (grad and x.requires_grad)
    ):
        return address
    return 0


def validate(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state,
    final_state,
    cu_seqlens,
    options: Options = PLAIN,
) -> None:
    """Raise TypeError (type, dtype) or ValueError (all else) for the first rule that the call breaks."""
    required = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state, "final_state": final_state}
    optional |= {"cu_seqlens": cu_seqlens}
    optional |= {name: getattr(options, name) for name in ("state_indices", "checkpoints", "checkpoint_offsets")}
    tensors = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in tensors.items():
        check_tensor(name, x, name in optional)
    scale = _number("scale", scale)
    lower_bound = None if lower_bound is None else _number("lower_bound", lower_bound)
    _check_switches(options)

    for name in ("q", "k", "v", "out"):
        check_dtype(name, tensors[name], torch.bfloat16)
    for name in ("g", "beta", "initial_state", "final_state", "checkpoints"):
        if name in tensors:
            check_dtype(name, tensors[name], torch.bfloat16, torch.float32)
    for name in ("A_log", "dt_bias"):
        if name in tensors:
            check_dtype(name, tensors[name], torch.float32)
    if initial_state is not None and final_state is not None and initial_state.dtype != final_state.dtype:
        raise TypeError(
            f"final_state: expected the dtype of initial_state, {initial_state.dtype}, got {final_state.dtype}"
        )
    for name in ("cu_seqlens", "state_indices"):
        if name in tensors:
            check_dtype(name, tensors[name], torch.int64, torch.int32)
    if "checkpoint_offsets" in tensors:
        check_dtype("checkpoint_offsets", tensors["checkpoint_offsets"], torch.int64)

    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q: expected a tensor on a CPU or CUDA device, got {q.device}")

    _check_shapes(tensors, options)

    for name, x in tensors.items():
        _check_memory(name, x)
        if x.is_neg():
            raise ValueError(
                f"{name}: expected plain values, got a lazily negated view (is_neg() is true); pass its resolve_neg()"
            )
    for name in ("q", "k", "v", "g", "out"):
        _check_rows(name, tensors[name])
    for name in ("A_log", "dt_bias", "cu_seqlens", "state_indices", "checkpoints", "checkpoint_offsets"):
        if name in tensors and not tensors[name].is_contiguous():
            x = tensors[name]
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {x.stride()} for shape {list(x.shape)}"
            )
    for name in ("initial_state", "final_state"):
        if name in tensors:
            _check_state_strides(name, tensors[name])
    for name in ("initial_state", "final_state", "checkpoints"):
        if name in tensors and tensors[name].data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}: expected a {ALIGNMENT}-byte aligned address, got {tensors[name].data_ptr():#x}; "
                "its storage offset is not a multiple of 16 bytes"
            )
    _check_overlaps(tensors)

    if not abs(scale) <= FLOAT32_MAX:
        raise ValueError(f"scale: expected a finite fp32 number, got {scale}")
    if lower_bound is not None and not LOWER_BOUND_MIN <= lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number in [{LOWER_BOUND_MIN:g}, 0), got {lower_bound}")
    check_gradients(tensors)
    if options.gate == "log":
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if x is not None:
                raise ValueError(f'{name}: expected None with gate="log", where g holds the decays themselves')


def may_hold_tangents() -> bool:
    """Whether tensors may be dual ones, of forward-mode differentiation: within `forward_ad.dual_level()`."""
    return forward_ad._current_level >= 0


def check_gradients(tensors: dict[str, torch.Tensor]) -> None:
    """ValueError for a tensor that a derivative is to be taken with respect to: there would be none, silently."""
    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            got = "requires_grad=True"
        elif may_hold_tangents() and forward_ad.unpack_dual(x).tangent is not None:
            got = "a dual tensor with a tangent"
        else:
            continue
        raise ValueError(
            f"{name}: expected a tensor that needs no gradient, got {got}; fwd computes the forward pass only: call it "
            "under torch.inference_mode() or torch.no_grad(), or detach the tensor"
        )


def _check_memory(name, x):
    """ValueError where no memory of its own stands behind x, which has some unless it has no elements."""
    try:
        has_memory = bool(x.data_ptr()) or not x.numel()
    except RuntimeError:
        has_memory = False
    if not has_memory:
        raise ValueError(
            f"{name}: expected a tensor with memory of its own, got one whose storage was freed (resized to 0), or one "
            "that torch.func (vmap, grad, jvp, functionalize) has put in the place of another"
        )


def _check_switches(options):
    for name, known in (("gate", GATES), ("checkpoint_at", CHECKPOINTS_AT)):
        check_choice(name, getattr(options, name), known)
    for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type_name(value)}")
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: expected False with use_beta_sigmoid_in_kernel=False, where beta is already activated"
        )
    interval = options.checkpoint_interval
    if options.checkpoints is None:
        for name in ("checkpoint_interval", "checkpoint_offsets"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name}: expected None without checkpoints")
        return
    check_interval("checkpoint_interval", interval, "an int with checkpoints")


def type_name(value) -> str:
    """The name of a value's type, with its module where that is another's: NumPy's bool is not Python's."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_interval(name, interval, expected="an int"):
    """TypeError or ValueError unless checkpoints can lie `interval` tokens apart."""
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise TypeError(f"{name}: expected {expected}, got {type_name(interval)}")
    if interval <= 0 or interval % CHECKPOINT_UNIT or interval > TOKENS_MAX:
        raise ValueError(f"{name}: expected a positive multiple of {CHECKPOINT_UNIT} tokens, got {interval}")


def check_choice(name, value, known):
    """TypeError or ValueError unless value is one of the known strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type_name(value)}")
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")


def _check_shapes(tensors, options):
    q, cu_seqlens = tensors["q"], tensors.get("cu_seqlens")
    if q.dim() != 4 or q.shape[-1] != HEAD_DIM or q.shape[2] < 1:
        raise ValueError(f"q: expected shape [B, T, H, {HEAD_DIM}] with H >= 1, got {list(q.shape)}")
    B, T, H, _ = q.shape
    N = B
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"q: expected B = 1 with cu_seqlens (packed sequences), got shape {list(q.shape)}")
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
            raise ValueError(f"cu_seqlens: expected shape [N + 1] with N >= 0, got {list(cu_seqlens.shape)}")
        N = len(cu_seqlens) - 1
    if T > TOKENS_MAX:
        raise ValueError(f"q: expected at most 2^31 - 256 tokens, got shape {list(q.shape)}")

    def check(name, letters, shape):
        if name in tensors and tensors[name].shape != shape:
            raise ValueError(
                f"{name}: expected shape [{letters}] = {list(shape)} (q has shape {list(q.shape)}), "
                f"got {list(tensors[name].shape)}"
            )

    check("k", "B, T, H, K", (B, T, H, HEAD_DIM))
    v = tensors["v"]
    if v.dim() != 4 or (v.shape[0], v.shape[1], v.shape[3]) != (B, T, HEAD_DIM) or not v.shape[2] or v.shape[2] % H:
        raise ValueError(
            f"v: expected shape [B, T, HV, V] = [{B}, {T}, HV, {HEAD_DIM}] with HV a multiple of H = {H} "
            f"(q has shape {list(q.shape)}), got {list(v.shape)}"
        )
    HV = v.shape[2]
    if HV > HEADS_MAX:
        raise ValueError(f"{'q' if HV == H else 'v'}: expected fewer than 2^24 heads, got shape {list(v.shape)}")
    if N * HV > PAIRS_MAX:
        name = "q" if cu_seqlens is None else "cu_seqlens"
        raise ValueError(f"{name}: expected fewer than 2^31 (sequence, head) pairs, got N = {N} and {HV} heads")
    check("g", "B, T, HV, K", (B, T, HV, HEAD_DIM))
    check("beta", "B, T, HV", (B, T, HV))
    check("out", "B, T, HV, V", (B, T, HV, HEAD_DIM))
    check("A_log", "HV", (HV,))
    if "dt_bias" in tensors and tensors["dt_bias"].shape != (HV * HEAD_DIM,):
        check("dt_bias", "HV, K", (HV, HEAD_DIM))
    check("state_indices", "N", (N,))
    check("checkpoint_offsets", "N + 1", (N + 1,))
    if "state_indices" not in tensors:
        for name in ("initial_state", "final_state"):
            check(name, "N, HV, V, K", (N, HV, HEAD_DIM, HEAD_DIM))
        check_rows = ("checkpoints",)
    else:
        if "initial_state" not in tensors and "final_state" not in tensors:
            raise ValueError("state_indices: expected None without initial_state and final_state")
        check_rows = ("initial_state", "final_state", "checkpoints")
    for name in check_rows:
        if name in tensors:
            x, letter = tensors[name], "M" if name == "checkpoints" else "P"
            rows = x.shape[0] if x.dim() else 0
            check(name, f"{letter}, HV, V, K", (rows, HV, HEAD_DIM, HEAD_DIM))
    if "state_indices" in tensors and "initial_state" in tensors and "final_state" in tensors:
        check("final_state", "P, HV, V, K", tuple(tensors["initial_state"].shape))
    if "checkpoints" in tensors and cu_seqlens is None and options.checkpoint_offsets is None:
        rows = B * checkpoint_count(T, options.checkpoint_interval, options.checkpoint_at)
        if len(tensors["checkpoints"]) < rows:
            raise ValueError(
                f"checkpoints: expected at least {rows} rows for {B} sequences of {T} tokens, "
                f"got {len(tensors['checkpoints'])}"
            )


def checkpoint_count(tokens, interval, at):
    """How many checkpoints a sequence of so many tokens has; tokens may be a tensor."""
    return tokens // interval if at == "end" else (tokens + interval - 1) // interval


def is_plain(q, v, g, beta, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens, options) -> bool:
    """Whether the plain kernels serve a call that `validate` has passed."""
    return (
        options is PLAIN
        and q.shape[2] == v.shape[2]
        and g.dtype == beta.dtype == torch.bfloat16
        and A_log is not None
        and dt_bias is not None
        and lower_bound is not None
        and (cu_seqlens is None or cu_seqlens.dtype == torch.int64)
        and all(x is None or x.is_contiguous() for x in (initial_state, final_state))
    )


def check_tensor(name, x, is_optional):
    """TypeError unless x is a plain dense tensor."""
    if not isinstance(x, torch.Tensor):
        expected = "a torch.Tensor or None" if is_optional else "a torch.Tensor"
        raise TypeError(f"{name}: expected {expected}, got {type(x).__name__}")
    # While a graph is made, tensors stand for others, at which `fwd` looks when it runs.
    if type(x) not in _TENSOR_TYPES and not torch.compiler.is_compiling():
        raise TypeError(
            f"{name}: expected a plain torch.Tensor or Parameter, got the subclass {type(x).__name__}; "
            "pass the tensor that it holds"
        )
    if x.layout is not torch.strided or x.is_nested:
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: expected a strided (dense) tensor, got {got}")


def is_number(value) -> bool:
    """Whether `fwd` takes it for scale or lower_bound: an int or a float, and True is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name, value):
    if not is_number(value):
        raise TypeError(f"{name}: expected a float, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite fp32 number, got an int beyond the range of float") from None


def check_dtype(name, x, *expected):
    """TypeError unless x has one of the expected dtypes."""
    if x.dtype not in expected:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, expected))}, got {x.dtype}")


def _check_rows(name, x):
    """The layout that the kernels can address: contiguous channels, rows that start on 16-byte boundaries."""
    if not x.numel():
        return
    strides, unit = x.stride(), ALIGNMENT // x.element_size()
    if strides[3] != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {strides[3]} (strides {strides})")
    if x.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name}: expected a {ALIGNMENT}-byte aligned address, got {x.data_ptr():#x}; "
            f"its storage offset is not a multiple of {unit} elements"
        )
    for dimension, size, stride in zip(("batch", "token", "head"), x.shape[:3], strides[:3], strict=True):
        if size > 1 and stride % unit:
            raise ValueError(
                f"{name}: expected a {dimension} stride that is a multiple of {unit} elements (16 bytes), got {stride} "
                f"(strides {strides})"
            )


def _check_state_strides(name, x):
    """Rows of a pool may lie apart; each is contiguous and starts on a 16-byte boundary."""
    if not x.numel():
        return
    unit = ALIGNMENT // x.element_size()
    if not x[0].is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous rows [HV, V, K], got strides {x.stride()} for shape {list(x.shape)}"
        )
    row, pitch = x[0].numel(), x.stride(0)
    if len(x) > 1 and (pitch < row or pitch % unit):
        raise ValueError(
            f"{name}: expected a first stride of at least {row} elements (a row) and a multiple of {unit} (16 bytes), "
            f"got {pitch} (strides {x.stride()})"
        )


class _Footprint(NamedTuple):
    """Where a tensor's elements lie: bytes [start, end), in runs of `run` bytes that (stride, size) pairs repeat."""

    start: int
    end: int
    run: int
    outer: list[tuple[int, int]]

    @classmethod
    def of(cls, x):
        start, size = x.data_ptr(), x.element_size()
        if x.is_contiguous():
            run = x.numel() * size
            return cls(start, start + run, run, [])
        run, outer = size, []
        for stride, count in sorted(
            (stride * size, count) for stride, count in zip(x.stride(), x.shape, strict=True) if count > 1
        ):
            if not outer and stride == run:
                run *= count
            else:
                outer.append((stride, count))
        return cls(start, start + run + sum(stride * (count - 1) for stride, count in outer), run, outer)


def _overlaps_itself(x):
    """Whether two elements of x may share an address. Says yes also to layouts too tangled to tell."""
    footprint = _Footprint.of(x)
    extent = footprint.run
    for stride, count in footprint.outer:
        if stride < extent:
            return True
        extent += stride * (count - 1)
    return False


def _may_overlap(a, b):
    """Whether two footprints may share an address: not if their ranges are apart or interleave periodically."""
    if a.end <= b.start or b.end <= a.start:
        return False
    period = math.gcd(*(stride for stride, _ in a.outer + b.outer))
    distance = (b.start - a.start) % period if period else 0
    return not (a.run <= distance and distance + b.run <= period)


def _check_overlaps(tensors):
    if _overlaps_itself(tensors["out"]):
        x = tensors["out"]
        raise ValueError(
            f"out: expected every element at an address of its own, got strides {x.stride()} for shape {list(x.shape)}"
        )
    footprints = {name: _Footprint.of(x) for name, x in tensors.items() if x.numel()}
    for output in ("out", "final_state", "checkpoints"):
        if output not in footprints:
            continue
        for name, footprint in footprints.items():
            if name == output or not _may_overlap(footprints[output], footprint):
                continue
            if {output, name} == {"initial_state", "final_state"} and footprints[output] == footprint:
                continue  # updated in place: a kernel reads a (sequence, head)'s state before it writes it
            raise ValueError(f"{output}: expected memory of its own, got a tensor that overlaps {name}")
