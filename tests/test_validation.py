"""Every rule of `flash_kda.fwd`: the exception's type, a message that names the argument, and nothing written."""

import itertools
import os
import re
import subprocess
import sys

import call_reader
import pytest
import torch
from call_reader import OPTIONS, ORDER
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import cu_seqlens_of, make_inputs

import flash_kda
from flash_kda import interface
from flash_kda.interface import SCHEDULES, numbers_of
from flash_kda.validation import PLAIN, _Footprint, _may_overlap, _overlaps_itself, in_common_form, validate

T, H, N = 24, 2, 3
TOKEN_TENSORS = ("q", "k", "v", "g", "out")
STATES = ("initial_state", "final_state")
TENSORS = (*TOKEN_TENSORS, "beta", "A_log", "dt_bias", *STATES, "cu_seqlens")
OPTIONAL = ("A_log", "dt_bias", *STATES, "cu_seqlens")


@pytest.fixture
def call():
    """A legal packed call with both states; out and final_state hold a pattern."""
    x = make_inputs("random", 1, T, H, "cpu", state_dtype=torch.float32, N=N)
    x["out"] = torch.full_like(x["q"], 7.0)
    x["final_state"] = torch.full_like(x["initial_state"], 7.0)
    x["cu_seqlens"] = cu_seqlens_of([8, 8, 8])
    return x


def rejects(call, error, pattern, **changes):
    with pytest.raises(error, match=pattern):
        flash_kda.fwd(**call | changes)
    for name in ("out", "final_state"):
        assert torch.all(call[name] == 7.0), f"{name} was written"
    # The quick checks must agree: they may refuse to decide, but not say yes. Python's does not see options.
    if call_reader.why_not() is None:
        assert call_reader.read(call | changes) is None
    arguments = [(call | changes)[name] for name in ORDER]
    try:
        if set(OPTIONS) & set(call | changes):
            return
        assert not in_common_form(*arguments)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass


def test_the_legal_call_passes_both_checks(call):
    arguments = [call[name] for name in ORDER]
    validate(*arguments)
    assert in_common_form(*arguments)
    flash_kda.fwd(**call)
    assert not (call["out"] == 7.0).any() and not (call["final_state"] == 7.0).any()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [3.0, "text", [1, 2], True])
def test_not_a_tensor(call, name, value):
    rejects(call, TypeError, rf"^{name}: expected a torch\.Tensor.*got {type(value).__name__}", **{name: value})


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in OPTIONAL])
def test_none(call, name):
    rejects(call, TypeError, rf"^{name}: expected a torch\.Tensor, got NoneType", **{name: None})


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16])
def test_dtype(call, name, dtype):
    rejects(call, TypeError, rf"^{name}: expected dtype .*got {dtype}", **{name: call[name].to(dtype)})


@pytest.mark.parametrize("name", ["initial_state", "final_state"])
def test_state_dtypes_match(call, name):
    message = r"^final_state: expected the dtype of initial_state, torch\..*, got torch\."
    rejects(call, TypeError, message, **{name: call[name].bfloat16()})


def test_head_dimension_of_all_at_once(call):
    changes = {name: call[name][..., :64].contiguous() for name in TOKEN_TENSORS}
    rejects(call, ValueError, r"^q: expected shape \[B, T, H, 128\]", **changes)


class Wrapper(torch.Tensor):
    pass


@pytest.mark.parametrize("name", TENSORS)
def test_subclass(call, name):
    rejects(call, TypeError, rf"^{name}: .*subclass Wrapper", **{name: call[name].as_subclass(Wrapper)})


@pytest.mark.parametrize("name", TENSORS)
def test_sparse(call, name):
    rejects(call, TypeError, rf"^{name}: expected a strided", **{name: call[name].to_sparse()})


@pytest.mark.parametrize("name", TENSORS)
def test_nested(call, name):
    rejects(call, TypeError, rf"^{name}: .*got a nested tensor", **{name: torch.nested.nested_tensor([call[name]])})


@pytest.mark.parametrize("name", TENSORS)
def test_freed_storage(call, name):
    freed = call[name].clone()
    freed.untyped_storage().resize_(0)
    rejects(call, ValueError, rf"^{name}: expected a tensor with memory", **{name: freed})


def test_lazily_negated():
    """The kernels would read the numbers that memory holds. One head, so that the view counts as contiguous."""
    x = make_inputs("random", 1, T, 1, "cpu", state_dtype=torch.float32)
    x |= {"out": torch.full_like(x["q"], 7.0), "final_state": torch.full_like(x["initial_state"], 7.0)}
    A_log = torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag
    rejects(x | {"cu_seqlens": None}, ValueError, r"^A_log: .*lazily negated", A_log=A_log)


@pytest.mark.parametrize("name", TENSORS)
def test_device(call, name):
    rejects(call, ValueError, r"expected the device of q", **{name: call[name].to("meta")})


def test_unsupported_device(call):
    changes = {name: call[name].to("meta") for name in TENSORS}
    rejects(call, ValueError, r"^q: expected a tensor on a CPU or CUDA device, got meta", **changes)


@pytest.mark.parametrize("name", TENSORS)
def test_rank(call, name):
    rejects(call, ValueError, rf"^{name}: expected shape", **{name: call[name][None]})


@pytest.mark.parametrize(
    ("name", "dimension"),
    [(name, d) for name in TENSORS[:-1] for d in range({"beta": 3, "A_log": 1, "dt_bias": 2}.get(name, 4))],
)
def test_size(call, name, dimension):
    x = call[name]
    longer = torch.cat((x, x.narrow(dimension, 0, 1)), dimension)
    # q sets B, T and H, so that a longer q shows at the first argument that disagrees, and a longer batch at q itself.
    blamed = {0: "q", 1: "k", 2: "k", 3: "q"}[dimension] if name == "q" else name
    rejects(call, ValueError, rf"^{blamed}: expected", **{name: longer})


def test_no_heads(call):
    changes = {name: call[name][:, :, :0] for name in ("q", "k", "v", "g", "beta", "out")}
    rejects(call, ValueError, r"^q: expected shape \[B, T, H, 128\] with H >= 1", **changes)


def test_batch_with_cu_seqlens(call):
    changes = {name: torch.cat((call[name], call[name])) for name in ("q", "k", "v", "g", "beta", "out")}
    rejects(call, ValueError, r"^q: expected B = 1 with cu_seqlens", **changes)


def test_empty_cu_seqlens(call):
    rejects(call, ValueError, r"^cu_seqlens: expected shape \[N \+ 1\]", cu_seqlens=call["cu_seqlens"][:0])


def test_number_of_sequences(call):
    rejects(call, ValueError, r"^initial_state: expected shape \[N, HV, V, K\]", cu_seqlens=cu_seqlens_of([12, 12]))
    rejects(call, ValueError, r"^initial_state: expected shape \[N, HV, V, K\]", cu_seqlens=None)


def test_too_many_pairs(call):
    rows = {name: call[name][:, :, :1].expand(2**31, -1, -1, -1) for name in TOKEN_TENSORS}
    changes = rows | {"beta": call["beta"][:, :, :1].expand(2**31, -1, -1), "A_log": call["A_log"][:1]}
    changes |= {"dt_bias": call["dt_bias"][:1], "initial_state": None, "final_state": None, "cu_seqlens": None}
    rejects(call, ValueError, r"^q: expected fewer than 2\^31 \(sequence, head\) pairs", **changes)


def test_too_many_tokens(call):
    tokens = 2**31 - 255
    changes = {name: call[name][:, :1].expand(1, tokens, -1, -1) for name in TOKEN_TENSORS}
    changes["beta"] = call["beta"][:, :1].expand(1, tokens, -1)
    rejects(call, ValueError, r"^q: expected at most 2\^31 - 256 tokens", **changes)


def test_too_many_heads(call):
    changes = {name: call[name][:, :, :1].expand(-1, -1, 2**24, -1) for name in TOKEN_TENSORS}
    changes |= {"beta": call["beta"][:, :, :1].expand(-1, -1, 2**24), "A_log": call["A_log"][:1].expand(2**24)}
    changes |= {"dt_bias": call["dt_bias"][:1].expand(2**24, -1), "initial_state": None, "final_state": None}
    rejects(call, ValueError, r"^q: expected fewer than 2\^24 heads", **changes)


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_channel_stride(call, name):
    wide = torch.zeros(1, T, H, 256, dtype=torch.bfloat16)[..., ::2]
    rejects(call, ValueError, rf"^{name}: expected stride 1 in the last dimension, got 2", **{name: wide})


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_alignment(call, name):
    shifted = torch.zeros(T * H * 128 + 8, dtype=torch.bfloat16)[1 : 1 + T * H * 128].view(1, T, H, 128)
    rejects(call, ValueError, rf"^{name}: expected a 16-byte aligned address", **{name: shifted})


@pytest.mark.parametrize("name", TOKEN_TENSORS)
@pytest.mark.parametrize("dimension", ["token", "head"])
def test_row_strides(call, name, dimension):
    shape = (1, T, H, 132) if dimension == "head" else (1, T, H * 128 + 4)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    x = x[..., :128] if dimension == "head" else x[..., : H * 128].unflatten(-1, (H, 128))
    rejects(call, ValueError, rf"^{name}: expected a (token|head) stride that is a multiple of 8 elements", **{name: x})


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_batch_stride(name):
    x = make_inputs("random", 2, T, H, "cpu")
    x |= {"out": torch.full_like(x["q"], 7.0), "final_state": torch.full((2, H, 128, 128), 7.0), "cu_seqlens": None}
    wide = torch.full((2, T * H * 128 + 4), 7.0, dtype=torch.bfloat16)[:, :-4].view(2, T, H, 128)
    message = rf"^{name}: expected a batch stride that is a multiple of 8 elements \(16 bytes\), got {T * H * 128 + 4} "
    rejects(x, ValueError, message, **{name: wide})


@pytest.mark.parametrize("name", ["A_log", "dt_bias", *STATES, "cu_seqlens"])
def test_contiguous(call, name):
    strided = call[name].repeat_interleave(2, -1)[..., ::2]
    expected = r"contiguous rows \[HV, V, K\]" if name in STATES else "a contiguous tensor"
    rejects(call, ValueError, rf"^{name}: expected {expected}, got strides", **{name: strided})


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("pitch", [H * 128 * 128 - 4, H * 128 * 128 + 2, 0])
def test_state_pitch(call, name, pitch):
    """Rows that overlap, and rows that start off 16-byte boundaries."""
    wide = torch.zeros(N * (H * 128 * 128 + 4)).as_strided((N, H, 128, 128), (pitch, 128 * 128, 128, 1))
    rejects(call, ValueError, rf"^{name}: expected a first stride of at least .*, got {pitch} ", **{name: wide})


@pytest.mark.parametrize("name", STATES)
def test_state_alignment(call, name):
    shifted = torch.zeros(call[name].numel() + 4)[1:-3].view(call[name].shape)
    rejects(call, ValueError, rf"^{name}: expected a 16-byte aligned address", **{name: shifted})


@pytest.mark.parametrize("name", TOKEN_TENSORS[:-1])
def test_out_overlaps_an_input(call, name):
    rejects(call, ValueError, rf"^out: expected memory of its own, got a tensor that overlaps {name}", out=call[name])
    buffer = torch.zeros(1, T + 1, H, 128, dtype=torch.bfloat16)
    rejects(call, ValueError, rf"^out: .*overlaps {name}", **{"out": buffer[:, 1:], name: buffer[:, :-1]})


@pytest.mark.parametrize("dimension", [1, 2])
def test_out_overlaps_itself(call, dimension):
    out = call["out"].narrow(dimension, 0, 1).expand(call["out"].shape)
    rejects(call, ValueError, r"^out: expected every element at an address of its own", out=out)


@pytest.mark.parametrize("output", ["out", "final_state"])
@pytest.mark.parametrize("name", TENSORS)
def test_neighbours_and_overlaps(call, output, name):
    """Two tensors in one buffer, either first: side by side they pass both checks, with bytes in common neither."""
    if name == output:
        return
    sizes = {x: call[x].numel() * call[x].element_size() for x in (output, name)}
    for first, second in ((output, name), (name, output)):
        buffer = torch.zeros(sum(sizes.values()) + 16, dtype=torch.uint8)
        for common in (0, min(16, sizes[first])):
            lead = (common - sizes[first]) % 16  # so that the second is aligned
            end = lead + sizes[first]
            parts = {first: buffer[lead:end], second: buffer[end - common : end - common + sizes[second]]}
            views = {x: part.view(call[x].dtype).view(call[x].shape) for x, part in parts.items()}
            if common:
                rejects(call, ValueError, "expected memory of its own, got a tensor that overlaps", **views)
            else:
                arguments = [(call | views)[x] for x in ORDER]
                validate(*arguments)
                assert in_common_form(*arguments)
                if call_reader.why_not() is None:
                    assert call_reader.read(call | views) == call_reader.expected(call | views)


class TestFootprints:
    """Against the addresses themselves: whatever shares one is seen."""

    @st.composite
    def tensors(draw):
        dimensions = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=4))
        sizes, strides = zip(*dimensions, strict=True)
        return torch.empty(1000, dtype=torch.bfloat16).as_strided(sizes, strides, draw(st.integers(0, 100)))

    @staticmethod
    def places(x):
        steps = itertools.product(
            *(
                range(0, size * stride, stride) if stride else [0] * size
                for size, stride in zip(x.shape, x.stride(), strict=True)
            )
        )
        return [x.storage_offset() + sum(step) for step in steps]

    @given(tensors())
    def test_of_one_tensor(self, x):
        places = self.places(x)
        assert len(places) == x.numel()
        if len(set(places)) < len(places):
            assert _overlaps_itself(x)

    @settings(max_examples=500)
    @given(tensors(), tensors())
    def test_of_two_tensors(self, x, y):
        # The same addresses, in one buffer.
        y = x.as_strided(y.shape, y.stride(), y.storage_offset())
        if set(self.places(x)) & set(self.places(y)):
            assert _may_overlap(_Footprint.of(x), _Footprint.of(y))

    def test_of_slices_side_by_side(self):
        """What engines have: no overlap is made up."""
        rows = torch.empty(10, 3, 24)
        x, y, z = rows[:, :, :8], rows[:, :, 8:16], rows[:, 1]
        assert not _may_overlap(_Footprint.of(x), _Footprint.of(y)) and not _overlaps_itself(x)
        assert _may_overlap(_Footprint.of(x), _Footprint.of(z)) and not _overlaps_itself(z.transpose(0, 1))


def test_final_state_overlaps(call):
    buffer = torch.zeros(N + 1, H, 128, 128)
    message = r"^final_state: expected memory of its own, got a tensor that overlaps initial_state"
    rejects(call, ValueError, message, initial_state=buffer[1:], final_state=buffer[:-1])
    flat = torch.zeros(N * H * 128 * 128 * 2, dtype=torch.bfloat16)
    out = flat[: T * H * 128].view(1, T, H, 128)
    rejects(call, ValueError, r"overlaps", final_state=flat.view(torch.float32).view(N, H, 128, 128), out=out)


def test_final_state_may_be_initial_state(call):
    state = call["initial_state"]
    for final_state in (state, state.view(state.shape)):
        validate(*[(call | {"final_state": final_state})[name] for name in ORDER])


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, x) for x in ("1", True, 1j, torch.tensor(-1.0)) for name in ("scale", "lower_bound")] + [("scale", None)],
)
def test_number_type(call, name, value):
    came = "torch.Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    rejects(call, TypeError, rf"^{name}: expected a float, got {re.escape(came)}$", **{name: value})


def test_types_of_numpy_are_named_so(call):
    """NumPy's bool has the name of Python's, an array of strings is compared string by string."""
    np = pytest.importorskip("numpy")
    for name in ("use_qk_l2norm_in_kernel", "allow_neg_eigval"):
        rejects(call, TypeError, rf"^{name}: expected a bool, got numpy\.bool", **{name: np.True_})
    for name, value in (("gate", "raw"), ("checkpoint_at", "end")):
        for array in (np.array([value]), np.array([value, "other"])):
            rejects(call, TypeError, rf"^{name}: expected a str, got numpy\.ndarray", **{name: array})
    rejects(call, TypeError, r"^scale: expected a float, got numpy\.float32", scale=np.float32(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400])
def test_scale_value(call, value):
    rejects(call, ValueError, r"^scale: expected a finite fp32 number, got", scale=value)


@pytest.mark.parametrize("value", [0.0, 0, 1.0, -5.001, -6, float("nan"), -float("inf"), float("inf")])
def test_lower_bound_value(call, value):
    rejects(call, ValueError, r"^lower_bound: expected a number in \[-5, 0\), got", lower_bound=value)


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "cu_seqlens"])
def test_requires_grad(call, name):
    with_grad = call[name].clone().requires_grad_()
    rejects(call, ValueError, rf"^{name}: .*requires_grad=True", **{name: with_grad})
    with torch.no_grad():
        flash_kda.fwd(**call | {name: with_grad})
    with torch.inference_mode():
        flash_kda.fwd(**call | {name: torch.nn.Parameter(call[name])})


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "cu_seqlens"])
def test_forward_mode(call, name):
    """The tangent would be lost, silently. No C++ sees it: such a call must not get there."""
    with torch.autograd.forward_ad.dual_level():
        flash_kda.fwd(**call)
        for output in ("out", "final_state"):
            call[output].fill_(7.0)
        dual = torch.autograd.forward_ad.make_dual(call[name].clone(), torch.ones_like(call[name]))
        arguments = [(call | {name: dual})[argument] for argument in ORDER]
        assert not in_common_form(*arguments)
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor that needs no gradient, got a dual tensor"):
            flash_kda.fwd(**call | {name: dual})
    assert torch.all(call["out"] == 7.0) and torch.all(call["final_state"] == 7.0)


def test_kernels_get_no_tangents(call, monkeypatch):
    monkeypatch.setattr(interface, "_launch", lambda *arguments: pytest.fail("launched"))
    with torch.autograd.forward_ad.dual_level():
        flash_kda.fwd(**call)


@pytest.mark.parametrize("make", [lambda call: call, lambda call: options(call)])
def test_kernels_outputs_count_as_written(call, make, monkeypatch):
    """By their versions autograd tells that what it saved has been overwritten."""
    monkeypatch.setattr(interface, "_launch", lambda *arguments: True)
    call = make(call)
    versions = {name: x._version for name, x in call.items() if isinstance(x, torch.Tensor)}
    flash_kda.fwd(**call)
    changed = {name for name, version in versions.items() if call[name]._version != version}
    assert changed == {"out", "final_state", "checkpoints"} & set(call)
    with torch.inference_mode():  # whose tensors have no version
        flash_kda.fwd(**call | {"out": call["out"].clone()})


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "initial_state"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
@pytest.mark.parametrize("tokens", [T, 0])
def test_within_torch_func(call, transform, name, tokens):
    """What stands in a tensor's place there has no memory."""
    if not tokens:
        call |= {x: call[x][:, :0] for x in (*TOKEN_TENSORS, "beta")} | {"cu_seqlens": torch.tensor([0, 0, 0, 0])}

    def layer(x):
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor with memory of its own, .* torch\.func"):
            flash_kda.fwd(**call | {name: x})
        return x.float().sum()

    x = call[name]
    if transform == "functionalize" and not x.numel():
        return  # there its address is 0, and so is that of every tensor without elements
    arguments = {"vmap": (x[None],), "jvp": ((x,), (torch.ones_like(x),))}.get(transform, (x,))
    if transform == "jvp":
        torch.func.jvp(layer, *arguments)
    else:
        getattr(torch.func, transform)(layer)(*arguments)
    assert torch.all(call["out"] == 7.0) and torch.all(call["final_state"] == 7.0)


def test_schedule(call, monkeypatch):
    monkeypatch.setenv("FLASH_KDA_SCHEDULE", "fastest")
    expected = "one of auto, pairs, portable, sm90, segments, or segments:TOKENS with a multiple of 16, got 'fastest'"
    with pytest.raises(ValueError, match=f"^FLASH_KDA_SCHEDULE: expected {expected}"):
        flash_kda.fwd(**call)
    assert torch.all(call["out"] == 7.0) and torch.all(call["final_state"] == 7.0)
    for unknown in ("", "Auto", "auto ", "segments:", "segments:8", "segments:064", "segments:-64"):
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", unknown)
        with pytest.raises(ValueError, match=f"got '{unknown}'$"):
            flash_kda.fwd(**call)
    for known in (*SCHEDULES, "segments:64"):
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", known)
        flash_kda.fwd(**call)


LAYOUTS = (
    "contiguous",
    "fused projection",
    "head-major",
    "no states",
    "only one state",
    "in place",
    "batch",
    "parameters",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_layouts_take_the_quick_check(call, layout):
    """And the kernels are told by it what they are told after the full check."""
    if layout == "fused projection":
        fused = torch.zeros(1, T, 5 * H * 128 + 8, dtype=torch.bfloat16)
        views = (fused[..., i * H * 128 : (i + 1) * H * 128].unflatten(-1, (H, 128)) for i in range(4))
        call |= dict(zip("qkvg", views, strict=True)) | {"beta": fused[..., -H:]}
    elif layout == "head-major":
        call |= {name: torch.zeros(1, H, T, 128, dtype=torch.bfloat16).transpose(1, 2) for name in TOKEN_TENSORS}
        call["out"] = torch.empty_like(call["v"])
    elif layout == "no states":
        call |= dict.fromkeys(STATES)
    elif layout == "only one state":
        call["initial_state"] = None
        call["final_state"] = call["final_state"].bfloat16()
    elif layout == "in place":
        call["initial_state"] = call["final_state"].view(N, H, 128, 128)  # another tensor of the same memory
    elif layout == "batch":
        call |= make_inputs("random", 3, T, H, "cpu", state_dtype=torch.float32)
        call |= {"out": torch.empty_like(call["q"]), "cu_seqlens": None}
    elif layout == "parameters":
        call |= {name: torch.nn.Parameter(call[name], requires_grad=False) for name in ("A_log", "dt_bias")}
    arguments = [call[name] for name in ORDER]
    validate(*arguments)
    assert (in_common_form(*arguments), True) == numbers_of(*arguments, PLAIN)
    if call_reader.why_not() is None:
        assert call_reader.read(call) == call_reader.expected(call)


def test_import_needs_neither_kernels_nor_a_gpu_nor_nvcc():
    """Nothing but torch comes along at import: no kernels, no rich, no CUDA initialisation, no nvcc look-up."""
    code = (
        "import sys, flash_kda, torch; print(flash_kda.__version__);"
        "assert not {'flash_kda._C', 'rich', 'flash_kda.cli', 'torch.utils.cpp_extension'} & set(sys.modules);"
        "assert not torch.cuda.is_initialized()"
    )
    environment = os.environ | {"PATH": "", "CUDA_HOME": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == flash_kda.__version__


def options(call, **changes):
    """A legal call with every option in use; `changes` on top."""
    intervals = torch.tensor([0, 1, 2, 3])
    return call | {
        "state_indices": torch.tensor([2, 0, -1]),
        "checkpoints": torch.zeros(3, H, 128, 128),
        "checkpoint_interval": 64,
        "checkpoint_offsets": intervals,
        **changes,
    }


def test_the_legal_call_with_options_passes(call):
    flash_kda.fwd(**options(call))
    assert not (call["out"] == 7.0).any()


@pytest.mark.parametrize("name", ["state_indices", "checkpoints", "checkpoint_offsets"])
def test_option_tensors(call, name):
    x = options(call)[name]
    for value in (3, [1, 2]):
        changes = options(call, **{name: value})
        rejects(call, TypeError, rf"^{name}: expected a torch\.Tensor or None, got {type(value).__name__}", **changes)
    rejects(call, TypeError, rf"^{name}: expected dtype .*got torch.float16", **options(call, **{name: x.half()}))
    rejects(call, ValueError, rf"^{name}: expected the device of q", **options(call, **{name: x.to("meta")}))
    rejects(call, ValueError, rf"^{name}: expected shape", **options(call, **{name: x[None]}))
    strided = x.repeat_interleave(2, -1)[..., ::2]
    rejects(call, ValueError, rf"^{name}: expected a contiguous tensor", **options(call, **{name: strided}))
    assert torch.all(options(call)["checkpoints"] == 0)


def test_pools_that_overlap_with_another_pitch(call):
    """The same first row does not make them the same pool: writing one's row 1 would change the other's."""
    row = H * 128 * 128
    buffer = torch.zeros(N * (row + 64))
    near = buffer.as_strided((N, H, 128, 128), (row, 128 * 128, 128, 1))
    far = buffer.as_strided((N, H, 128, 128), (row + 64, 128 * 128, 128, 1))
    message = r"^final_state: .*overlaps initial_state"
    rejects(call, ValueError, message, **options(call, initial_state=near, final_state=far))
    flash_kda.fwd(**options(call, initial_state=far, final_state=far))


def test_option_sizes(call):
    short = torch.zeros(2, dtype=torch.int64)
    rejects(call, ValueError, r"^state_indices: expected shape \[N\] = \[3\]", **options(call, state_indices=short))
    message = r"^checkpoint_offsets: expected shape \[N \+ 1\] = \[4\]"
    rejects(call, ValueError, message, **options(call, checkpoint_offsets=short))
    message = r"^checkpoints: expected shape \[M, HV, V, K\]"
    rejects(call, ValueError, message, **options(call, checkpoints=torch.zeros(3, H + 1, 128, 128)))
    message = r"^final_state: expected shape \[P, HV, V, K\]"
    rejects(call, ValueError, message, **options(call, initial_state=torch.zeros(9, H, 128, 128)))
    no_states = dict.fromkeys(STATES)
    message = r"^state_indices: expected None without initial_state and final_state"
    rejects(call, ValueError, message, **options(call, **no_states))
    batch = make_inputs("random", 2, 128, H, "cpu") | {"out": torch.zeros(2, 128, H, 128, dtype=torch.bfloat16)}
    with pytest.raises(
        ValueError, match=r"^checkpoints: expected at least 4 rows for 2 sequences of 128 tokens, got 3"
    ):
        flash_kda.fwd(**batch, checkpoints=torch.zeros(3, H, 128, 128), checkpoint_interval=64)


@pytest.mark.parametrize("value", [0, -64, 32, 100, 2**31])
def test_interval_value(call, value):
    message = r"^checkpoint_interval: expected a positive multiple of 64"
    rejects(call, ValueError, message, **options(call, checkpoint_interval=value))


@pytest.mark.parametrize("value", [None, 64.0, True, "64"])
def test_interval_type(call, value):
    message = r"^checkpoint_interval: expected an int with checkpoints, got"
    rejects(call, TypeError, message, **options(call, checkpoint_interval=value))


@pytest.mark.parametrize("name", ["checkpoint_interval", "checkpoint_offsets"])
def test_checkpoint_settings_without_checkpoints(call, name):
    rejects(call, ValueError, rf"^{name}: expected None without checkpoints", **{name: options(call)[name]})


def test_checkpoints_overlap(call):
    state = call["final_state"]
    rejects(call, ValueError, r"^(final_state|checkpoints): .*overlaps", **options(call, checkpoints=state))
    message = r"^checkpoints: .*overlaps initial_state"
    rejects(call, ValueError, message, **options(call, checkpoints=call["initial_state"]))
    shifted = torch.zeros(3 * H * 128 * 128 + 4)[1:-3].view(3, H, 128, 128)
    message = r"^checkpoints: expected a 16-byte aligned address"
    rejects(call, ValueError, message, **options(call, checkpoints=shifted))


@pytest.mark.parametrize("name", ["gate", "checkpoint_at"])
def test_names(call, name):
    rejects(call, ValueError, rf"^{name}: expected one of '.*, got 'other'", **{name: "other"})
    rejects(call, TypeError, rf"^{name}: expected a str, got int", **{name: 1})


@pytest.mark.parametrize("name", ["use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"])
def test_switches(call, name):
    rejects(call, TypeError, rf"^{name}: expected a bool, got int", **{name: 1})
    rejects(call, TypeError, rf"^{name}: expected a bool, got NoneType", **{name: None})


def test_contradictions(call):
    changes = {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}
    rejects(call, ValueError, r"^allow_neg_eigval: expected False with use_beta_sigmoid_in_kernel=False", **changes)
    none = {"A_log": None, "dt_bias": None, "lower_bound": None}
    for name in none:
        changes = none | {"gate": "log", name: call[name]}
        rejects(call, ValueError, rf'^{name}: expected None with gate="log"', **changes)


@pytest.mark.parametrize("name", ["v", "g", "beta", "out", "A_log", "dt_bias", *STATES])
def test_grouped_heads(call, name):
    """Two heads of v for each of q: whatever has another number of heads is named."""
    changes = {x: call[x][:, :, :1] for x in ("q", "k")}
    flash_kda.fwd(**call | changes | {x: call[x].clone() for x in ("out", "final_state")})
    dimension = {"A_log": 0, "dt_bias": 0, "initial_state": 1, "final_state": 1}.get(name, 2)
    three = torch.cat((call[name], call[name].narrow(dimension, 0, 1)), dimension)
    # v sets the number of heads, so that another v shows at the first argument that disagrees.
    rejects(call, ValueError, rf"^{'g' if name == 'v' else name}: expected shape", **changes | {name: three})


def test_heads_that_are_no_multiple(call):
    """Three of v for two of q, with whatever goes with v."""
    wide = make_inputs("random", 1, T, 3, "cpu", state_dtype=torch.float32, N=N)
    wide |= {name: call[name] for name in ("q", "k")}
    wide |= {"out": torch.full_like(wide["v"], 7.0), "final_state": torch.full_like(wide["initial_state"], 7.0)}
    rejects(call | wide, ValueError, r"^v: expected shape .* with HV a multiple of H = 2")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_gate_rows_of_fp32(call, dtype):
    wide = torch.zeros(1, T, H, 130)[..., :128]
    rejects(call, ValueError, r"^g: expected a (token|head) stride that is a multiple of 4 elements", g=wide)
    rejects(call, TypeError, r"^g: expected dtype torch.bfloat16 or torch.float32", g=call["g"].to(dtype))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([64, 64], 64), TypeError, r"^lengths: expected a torch\.Tensor, got list"),
        ((torch.ones(2), 64), TypeError, r"^lengths: expected an integer dtype, got torch\.float32"),
        ((torch.tensor(64), 64), ValueError, r"^lengths: expected shape \[N\], got \[\]"),
        ((torch.tensor([64]), "64"), TypeError, r"^interval: expected an int, got str"),
        ((torch.tensor([64]), 0), ValueError, r"^interval: expected a positive multiple of 64 tokens, got 0"),
        ((torch.tensor([64]), 64, 1), TypeError, r"^at: expected a str, got int"),
        ((torch.tensor([64]), 64, "middle"), ValueError, r"^at: expected one of 'end', 'start', got 'middle'"),
    ],
)
def test_checkpoint_offsets(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_kda.checkpoint_offsets(*arguments)
