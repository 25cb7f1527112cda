"""flash_kda.fwd on a GPU against the fp64 recurrence: the accuracy table, gate sweep, large states, extreme gates."""

import pytest
import schedules
import torch
from accuracy import BOUNDS, NO_DECAY_BOUNDS, TABLE, record_error, reference
from inputs import GATE_KINDS, HEAD_DIM, cu_seqlens_of, make_inputs, relative_error

import flash_kda

pytestmark = pytest.mark.gpu

T, H = 1024, 4


@pytest.fixture(autouse=True, params=schedules.ACCURATE)
def schedule(request, monkeypatch):
    schedules.use(request.param, monkeypatch)
    return request.param


def fwd(inputs, cu_seqlens=None, state_dtype=torch.float32):
    """(out, final_state) of one call into tensors full of NaN."""
    out = torch.full_like(inputs["v"], float("nan"))
    N = inputs["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (N, inputs["q"].shape[2], HEAD_DIM, HEAD_DIM)
    state = torch.full(shape, float("nan"), dtype=state_dtype, device="cuda")
    flash_kda.fwd(**inputs, out=out, final_state=state, cu_seqlens=cu_seqlens)
    return out, state


def check(inputs, name, bounds, record_property, cu_seqlens=None):
    out, state = fwd(inputs, cu_seqlens)
    expected_out, expected_state = reference(inputs, cu_seqlens)
    errors = (
        record_error(record_property, f"{name}: out", out, expected_out),
        record_error(record_property, f"{name}: final state", state, expected_state),
    )
    assert errors[0] <= bounds[0] and errors[1] <= bounds[1], f"errors of out, final_state {errors}, bounds {bounds}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_accuracy_table(kind, seed, record_property, schedule):
    inputs = make_inputs(kind, 1, T, H, "cuda", seed, torch.float32)
    check(inputs, f"{TABLE}flash_kda {schedule}, {kind}", BOUNDS[kind], record_property)


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_packed_sequences(kind, record_property, schedule):
    lengths = [1, 300, 17, 0, 64, 500, 142]
    inputs = make_inputs(kind, 1, sum(lengths), H, "cuda", 3, torch.float32, N=len(lengths))
    check(inputs, f"{schedule}, {kind}, packed", BOUNDS[kind], record_property, cu_seqlens_of(lengths, "cuda"))


def uniform(shape, bound, generator):
    return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1) * bound


def normal(shape, deviation, generator):
    return torch.randn(shape, generator=generator, device="cuda") * deviation


def either_sign(shape, value, generator):
    return torch.sign(torch.rand(shape, generator=generator, device="cuda") - 0.5) * value


def constant(shape, value, generator):
    return torch.full(shape, float(value), device="cuda")


GATE_SWEEP = [("g", constant, -8), ("g", constant, -4), ("g", constant, 0), ("g", constant, 8)]
GATE_SWEEP += [("g", uniform, 8), ("g", normal, 8)]
GATE_SWEEP += [
    ("dt_bias", either_sign, 4),
    ("dt_bias", either_sign, 8),
    ("dt_bias", uniform, 8),
    ("dt_bias", normal, 8),
]


@pytest.mark.parametrize("name, make, value", GATE_SWEEP, ids=[f"{n}-{m.__name__}-{v}" for n, m, v in GATE_SWEEP])
def test_gate_sweep(name, make, value, record_property, schedule):
    inputs = make_inputs("random", 1, T, H, "cuda", 4, torch.float32)
    generator = torch.Generator(device="cuda").manual_seed(5)
    inputs[name] = make(inputs[name].shape, value, generator).to(inputs[name].dtype)
    no_decay = name == "g" and make is constant and value < 0
    # Elsewhere slow channels are among fast ones, as those of the long gate are, hence its bounds.
    bounds = NO_DECAY_BOUNDS if no_decay else BOUNDS["long"]
    check(inputs, f"{schedule}, {name} {make.__name__} {value}", bounds, record_property)


@pytest.mark.parametrize("scale", [1, 100, 1000])
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_large_states(kind, scale, record_property, schedule):
    """The error of each head, relative to that head's own scale."""
    inputs = make_inputs(kind, 1, T, H, "cuda", 6, torch.float32)
    inputs["initial_state"] *= 10 * scale
    out, state = fwd(inputs)
    expected_out, expected_state = reference(inputs)
    for name, x, ref, dim, bound in (
        ("out", out, expected_out, 2, BOUNDS[kind][0]),
        ("final state", state, expected_state, 1, BOUNDS[kind][1]),
    ):
        worst = max(relative_error(x.select(dim, h), ref.select(dim, h)) for h in range(H))
        record_property(f"error: {schedule}, {kind}, state {scale} N(0, 1), worst head: {name}", worst)
        assert worst <= bound, f"{name}: error {worst} of the worst head, bound {bound}"


@pytest.mark.parametrize("gate", [80.0, -80.0], ids=["saturated", "no decay"])
def test_extreme_gates_over_4096_tokens(gate, record_property, schedule):
    inputs = make_inputs("random", 1, 4096, H, "cuda", 7, torch.float32)
    inputs["g"].fill_(gate)
    bounds = NO_DECAY_BOUNDS if gate < 0 else BOUNDS["long"]
    check(inputs, f"{schedule}, g = {gate:g} for 4096 tokens", bounds, record_property)


def test_bf16_states(record_property, schedule):
    """bf16 states add only their own rounding, below 2^-9 in the mean square, to the error of the final state."""
    inputs = make_inputs("long", 1, T, H, "cuda", 8, torch.bfloat16)
    out, state = fwd(inputs, state_dtype=torch.bfloat16)
    expected_out, expected_state = reference(inputs)
    assert record_error(record_property, f"{schedule}, long, bf16 states: out", out, expected_out) <= BOUNDS["long"][0]
    error = record_error(record_property, f"{schedule}, long, bf16 states: final state", state, expected_state)
    assert error <= BOUNDS["long"][1] + 2**-9


def test_a_sequence_resumed_from_its_state(record_property, schedule):
    """Cut at 63, 64 and 65 tokens with the fp32 state carried over: as accurate as uncut."""
    inputs = make_inputs("long", 1, 200, H, "cuda", 9, torch.float32)
    expected_out, expected_state = reference(inputs)
    for P in (63, 64, 65):
        tokens = ("q", "k", "v", "g", "beta")
        out_head, state = fwd(inputs | {name: inputs[name][:, :P] for name in tokens})
        out_tail, state = fwd(inputs | {name: inputs[name][:, P:] for name in tokens} | {"initial_state": state})
        out = torch.cat([out_head, out_tail], dim=1)
        assert (
            record_error(record_property, f"{schedule}, long, cut at {P}: out", out, expected_out) <= BOUNDS["long"][0]
        )
        error = record_error(record_property, f"{schedule}, long, cut at {P}: final state", state, expected_state)
        assert error <= BOUNDS["long"][1]
