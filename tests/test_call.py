"""The quick way of a call, csrc/api/call.cpp: it takes legal calls alone, for what they are, and leaves no trace.

tests/test_validation.py shows it every illegal call, too.
"""

import sys

import call_reader
import fuzz
import pytest
import torch
from call_reader import expected, in_order, read
from guarded import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import cu_seqlens_of, make_inputs

import flash_kda
from flash_kda import interface
from flash_kda.validation import PLAIN, in_common_form, validate

needs_reader = pytest.mark.skipif(call_reader.why_not() is not None, reason=str(call_reader.why_not()))

T, H, N = 24, 2, 3


def plain_call(device="cpu"):
    x = make_inputs("random", 1, T, H, device, state_dtype=torch.float32, N=N)
    x |= {"out": torch.full_like(x["q"], 7.0), "final_state": torch.full_like(x["initial_state"], 7.0)}
    return x | {"cu_seqlens": cu_seqlens_of([8, 8, 8], device)}


def general_call(device="cpu"):
    """With every option in use."""
    x = plain_call(device)
    return x | {
        "q": x["q"][:, :, :1],
        "k": x["k"][:, :, :1],
        "g": x["g"].float(),
        "beta": x["beta"].float(),
        "dt_bias": None,
        "lower_bound": None,
        "cu_seqlens": x["cu_seqlens"].int(),
        "initial_state": torch.randn(5, H, 128, 128, device=device),
        "final_state": torch.full((5, H, 128, 128), 7.0, device=device),
        "state_indices": torch.tensor([3, -1, 0], device=device),
        "checkpoints": torch.zeros(4, H, 128, 128, device=device),
        "checkpoint_interval": 64,
        "checkpoint_offsets": torch.tensor([0, 1, 2, 3], device=device),
        "checkpoint_at": "start",
        "allow_neg_eigval": True,
        "use_qk_l2norm_in_kernel": False,
    }


def is_legal(call):
    positional, options = in_order(call)
    try:
        validate(*positional, options)
    except (TypeError, ValueError):
        return False
    return True


def takes_common_form(call):
    positional, options = in_order(call)
    try:
        return options is PLAIN and bool(in_common_form(*positional))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


def check(call):
    """Whether the quick way takes the call: only a legal one, for what it is, and all that Python's quick way takes."""
    numbers = read(call)
    if numbers is not None:
        assert is_legal(call) and numbers == expected(call)
    else:
        assert not takes_common_form(call)
    return numbers is not None


@needs_reader
@pytest.mark.parametrize("make", [plain_call, general_call])
def test_takes_the_legal_call(make):
    assert check(make())


def arguments_of(case):
    """The call that the fuzzer makes of a case, as a dict."""
    made = []

    class Made(Exception):
        pass

    def keep(**call):
        made.append(call)
        raise Made

    with pytest.raises(Made):
        fuzz.Call(case, "cpu", keep).run()
    return made[0]


def is_usual(call):
    """Everything has elements, and who wants checkpoints says where."""
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    lays_out = call.get("checkpoints") is None or call.get("checkpoint_offsets") is not None
    return lays_out and all(x.numel() for x in tensors)


@needs_reader
def test_takes_the_fuzzer_s_calls():
    """All legal, of every layout and option; of the usual ones those where no output lies between others' rows."""
    kinds = {True: 0, False: 0}
    for number in range(120):
        case = fuzz.case_of(5, number)
        call = arguments_of(case)
        assert is_legal(call)
        assert check(call) == is_usual(call), case
        kinds[in_order(call)[1] is PLAIN] += is_usual(call)
    assert min(kinds.values()) > 20


def swapped(x):
    return x.transpose(0, -1) if x.dim() > 1 else x[::2]


def one_number_on(x):
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return flat[1:].view(x.shape)


class Wrapper(torch.Tensor):
    pass


CHANGES = {
    "none": lambda x: None,
    "a copy": torch.clone,
    "bf16": lambda x: x.bfloat16(),
    "fp32": lambda x: x.float(),
    "int32": lambda x: x.int(),
    "shorter": lambda x: x[:-1],
    "longer": lambda x: torch.cat((x, x)),
    "narrower": lambda x: x[..., :-1],
    "another rank": lambda x: x[None],
    "flat": torch.flatten,
    "wide rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "rows apart": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "rows 4 apart": lambda x: torch.nn.functional.pad(x, (0, 4))[..., : x.shape[-1]],
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one for all": lambda x: x[:1].expand(x.shape) if x.dim() else x,
    "swapped": swapped,
    "one number on": one_number_on,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "with gradient": lambda x: x.clone().requires_grad_(),
    "subclass": lambda x: x.as_subclass(Wrapper),
    "sparse": torch.Tensor.to_sparse,
    "on no device": lambda x: x.to("meta"),
    "freed": lambda x: (y := x.clone(), y.untyped_storage().resize_(0))[0],
    "negated": lambda x: torch.complex(x.float(), x.float()).conj().imag,
    "a list": lambda x: x.tolist(),
}


def changed(x, kind):
    """x after one of CHANGES; x itself, if it has no such form."""
    try:
        return CHANGES[kind](x)
    except (IndexError, RuntimeError, NotImplementedError):
        return x


NUMBERS = (0, -1, -5, -5.5, -1e-3, 1, 0.5, True, float("nan"), float("inf"), 1e39, 10**400, "1", None)
SWITCHES = (True, False, None, 1, "raw", "log", "start", "end", 64, 100, 64.0, 2**40)


@st.composite
def changed_calls(draw):
    """A legal call with one or two arguments changed, or given the tensor of another; many are still legal."""
    call = draw(st.sampled_from((plain_call, general_call)))()
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(("change", "change", "another's", "number", "option")))
        name = draw(st.sampled_from(tuple(tensors)))
        if kind == "change":
            call[name] = changed(tensors[name], draw(st.sampled_from(tuple(CHANGES))))
        elif kind == "another's":
            call[name] = tensors[draw(st.sampled_from(tuple(tensors)))]
        elif kind == "number":
            call[draw(st.sampled_from(("scale", "lower_bound")))] = draw(st.sampled_from(NUMBERS))
        elif kind == "option":
            call[draw(st.sampled_from(call_reader.OPTIONS))] = draw(st.sampled_from(SWITCHES))
    return call


@needs_reader
@settings(max_examples=600, deadline=None)
@given(changed_calls())
def test_agrees_with_the_rules(call):
    try:
        check(call)
    except (AttributeError, RuntimeError):
        # `validate` may trip over what two changes make of a tensor: that is an error, too.
        assert read(call) is None


@needs_reader
@pytest.mark.parametrize("make", [plain_call, general_call])
def test_one_change_at_a_time(make):
    """Every change of every tensor; some of them leave the call legal, and taken."""
    call = make()
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    taken = sum(check(call | {name: changed(x, kind)}) for name, x in tensors.items() for kind in CHANGES)
    assert 2 * len(tensors) < taken < len(tensors) * len(CHANGES) / 2


@needs_reader
def test_single_numbers_that_are_lazily_negated():
    """As layouts they would do: A_log of one head, and beta, whose strides are free."""
    pair = torch.complex(torch.ones(1, T, 1), torch.ones(1, T, 1))
    x = make_inputs("random", 1, T, 1, "cpu")
    x |= {"out": torch.empty_like(x["q"])}
    for call in (x | {"A_log": pair.conj().imag[0, 0]}, x | {"beta": pair.conj().imag}):
        assert not is_legal(call) and read(call) is None
    for call in (x | {"A_log": pair.imag[0, 0]}, x | {"beta": pair.imag}):
        assert check(call)


@needs_reader
def test_within_torch_func():
    """Tensors that vmap and grad wrap have the type of tensors, and no memory that could be read."""
    seen, call = [], plain_call()
    q = call["q"]

    def layer(q):
        seen.append(read(call | {"q": q}))
        return q.sum()

    torch.func.vmap(layer)(q[None])
    torch.func.grad(layer)(q)
    torch.func.functionalize(layer)(q)
    assert seen == [None, None, None]


@needs_reader
def test_gradients():
    """A tensor that requires grad is taken where grad mode is off only."""
    call = plain_call()
    call["A_log"] = torch.nn.Parameter(call["A_log"])
    assert not check(call)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert check(call)


@needs_reader
def test_under_a_function_mode():
    """Modes see what Python asks tensors for; here nothing is asked."""
    with torch.device("cpu"):
        assert check(plain_call())


@needs_reader
def test_what_is_no_call():
    table = torch._C._dlpack_exchange_api()
    parts = (torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled)
    positional, _ = in_order(plain_call())
    for arguments in ((), positional[:-1], (*positional, None)):
        assert call_reader._reader().read(table, *parts, arguments) is None
    for other in (None, 1, torch.utils.dlpack.to_dlpack(torch.zeros(1))):
        assert not call_reader._reader().is_table(other)
    assert call_reader._reader().is_table(table)


@needs_reader
@pytest.mark.parametrize("make", [plain_call, general_call])
def test_keeps_no_references(make):
    call = make()
    bad = make() | {"lower_bound": 10**400, "beta": Wrapper(torch.zeros(1))}
    tensors = [x for x in (*call.values(), *bad.values()) if isinstance(x, torch.Tensor)]
    counts = [sys.getrefcount(x) for x in tensors]
    for _ in range(50):
        assert read(call) is not None and read(bad) is None
    assert [sys.getrefcount(x) for x in tensors] == counts


def test_python_s_way_stays_where_tensors_cannot_be_read(monkeypatch):
    class Kernels:
        @staticmethod
        def read_tensors_with(*parts):
            return False

    monkeypatch.setattr(interface, "_launch", interface._not_launched)
    interface._let_it_read_tensors(Kernels)
    monkeypatch.delattr(torch._C, "_dlpack_exchange_api", raising=False)
    interface._let_it_read_tensors(None)
    assert interface._launch is interface._not_launched


def outputs(call):
    return {name: call[name].clone() for name in ("out", "final_state", "checkpoints") if name in call}


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(torch._C, "_dlpack_exchange_api"), reason="needs PyTorch 2.10 or newer")
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def loaded(self):
        interface.extension()
        assert interface._launch is not interface._not_launched

    @pytest.mark.parametrize("schedule", ["auto", "portable", "segments:64"])
    @pytest.mark.parametrize("make", [plain_call, general_call])
    def test_takes_calls_and_gives_the_bits_of_the_slow_way(self, make, schedule, monkeypatch):
        if schedule.startswith("segments") and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("segments need compute capability 9.0")
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", schedule)
        torch.manual_seed(0)
        quick = make("cuda")
        slow = quick | outputs(quick)
        with monkeypatch.context() as patch:
            patch.setattr(interface, "_launch", interface._not_launched)
            flash_kda.fwd(**slow)
        monkeypatch.setattr(interface, "validate", None)  # nobody else looks at the call
        monkeypatch.setattr(interface, "in_common_form", None)
        flash_kda.fwd(**quick)
        for name, x in outputs(quick).items():
            assert_same_bits(x, slow[name], name)

    @pytest.mark.parametrize("make", [plain_call, general_call])
    def test_errors_are_the_rules(self, make, monkeypatch):
        call = make("cuda")
        before = outputs(call)
        for changes, error, message in (
            ({"q": call["q"].half()}, TypeError, r"^q: expected dtype torch\.bfloat16, got torch\.float16"),
            ({"out": call["v"]}, ValueError, r"^out: expected memory of its own, got a tensor that overlaps v"),
            ({"A_log": call["A_log"].cpu()}, ValueError, r"^A_log: expected the device of q"),
            ({"scale": float("nan")}, ValueError, r"^scale: expected a finite fp32 number"),
        ):
            with pytest.raises(error, match=message):
                flash_kda.fwd(**call | changes)
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", "fastest")
        with pytest.raises(ValueError, match=r"^FLASH_KDA_SCHEDULE: expected one of .*got 'fastest'"):
            flash_kda.fwd(**call)
        for name, x in before.items():
            assert_same_bits(call[name], x, name)

    def test_a_workspace_that_is_not_to_be_had(self, monkeypatch):
        """The quick way then leaves the call to the slow one, whose error is PyTorch's own. 64 MB, which no block has
        left over."""
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("segments need compute capability 9.0")
        monkeypatch.setenv("FLASH_KDA_SCHEDULE", "segments:16")
        call = make_inputs("random", 1, 4096, H, "cuda")
        call["out"] = torch.full_like(call["q"], 7.0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                flash_kda.fwd(**call)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()
        assert bool((call["out"] == 7.0).all())
        held = torch.cuda.memory_allocated()
        for _ in range(3):
            flash_kda.fwd(**call)
        assert bool(call["out"].isfinite().all()) and not bool((call["out"] == 7.0).any())
        assert torch.cuda.memory_allocated() == held
